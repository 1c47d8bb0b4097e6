"""The table of layouts: each row trains the same network from the same named draws, and must give the serial run.

A row is written in words, and its words are its id: ("tp2 sp pp2 vpp2 dp2 zero", "llama") is a world of eight ranks.
The first string says how the work is divided: `LAYOUT_WORDS` are switches, `NUMBERED_WORDS` take a number or text. The
second names the network and its training, `MODELS`; both runs of a comparison share it.
"""

from __future__ import annotations

import re
from typing import Any

Changes = dict[str, Any]

# Formats in which rows are compared. Adam divides a gradient by its own size, so where the true gradient is zero (a bias
# that all keys share cancels in the softmax), its update would be rounding of full size. An epsilon well above that
# rounding, in both runs, takes it away.
PRECISIONS: dict[str, Changes] = {"fp64": {"fp64": True, "adam_eps": 1e-6}, "fp32": {"adam_eps": 1e-4}}

# What must not change any result: switches.
LAYOUT_WORDS: dict[str, Changes] = {
    "sp": {"sequence_parallel": True},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "blocking": {"overlap_p2p_communication": False},
    "account-embedding": {"account_for_embedding_in_pipeline_split": True},
    "account-loss": {"account_for_loss_in_pipeline_split": True},
    "pp-before-dp": {"use_tp_pp_dp_mapping": True},
    "zero": {"use_distributed_optimizer": True},
    "overlap-reduce": {"overlap_grad_reduce": True},
    "overlap-gather": {"overlap_param_gather": True, "use_distributed_optimizer": True},
    "average": {"ddp_average_in_collective": True},
    "recompute-attention": {"recompute_activations": True},
    "recompute-norm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "recompute-mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "recompute-all-parts": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
    "recompute-uniform": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "recompute-block": {"recompute_granularity": "full", "recompute_method": "block"},
    "distribute-saved": {"distribute_saved_activations": True},
}
# What must not change any result: words with a value.
NUMBERED_WORDS: dict[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "chunk-layers": "num_layers_per_virtual_pipeline_stage",
    "group": "microbatch_group_size_per_virtual_pipeline_stage",
    "first-layers": "decoder_first_pipeline_num_layers",
    "last-layers": "decoder_last_pipeline_num_layers",
    "layout=": "pipeline_model_parallel_layout",
    "bucket": "ddp_bucket_size",
    "buckets": "ddp_num_buckets",
    "recompute-layers": "recompute_num_layers",
    "mb": "micro_batch_size",
    "vocab": "padded_vocab_size",
}

_LLAMA: Changes = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "ffn_hidden_size": 48,
    "add_bias_linear": False, "group_query_attention": True, "num_query_groups": 4, "untie_embeddings_and_output_weights": True,
}
_MEAN: Changes = {"calculate_per_token_loss": False}
_BERT: Changes = {"architecture": "bert"}
_T5: Changes = {"architecture": "t5", "decoder_num_layers": 2, "decoder_seq_length": 8}  # six layers in one line
_T5_PUBLISHED: Changes = {
    **_T5, "position_embedding_type": "relative", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
    "normalization": "RMSNorm", "add_bias_linear": False, "softmax_scale": 0.5,
}

MODELS: dict[str, Changes] = {
    "gpt": {},
    "gpt2": {"openai_gelu": True, "init_method_std": 0.15, "embedding_init_method_std": 0.05},
    "untied": {"untie_embeddings_and_output_weights": True},
    "llama": _LLAMA,
    "llama-tied": {**_LLAMA, "untie_embeddings_and_output_weights": False},
    "gqa2": {**_LLAMA, "num_query_groups": 2},
    "mqa": {"group_query_attention": True, "num_query_groups": 1},
    "narrow-heads": {"kv_channels": 6},
    "qkv-bias": {**_LLAMA, "add_qkv_bias": True, "num_query_groups": 2},
    "qk-norm": {**_LLAMA, "qk_layernorm": True, "num_query_groups": 2},
    "qk-norm-decays": {"position_embedding_type": "rope", "qk_layernorm": True, "apply_wd_to_qk_layernorm": True},
    "rope-interleaved": {**_LLAMA, "rotary_interleaved": True},
    "rope-partial": {**_LLAMA, "rotary_percent": 0.5, "rotary_base": 500.0},
    "rope-scaled": {**_LLAMA, "use_rope_scaling": True, "rope_scaling_factor": 4.0},
    "rope-interpolated": {**_LLAMA, "rotary_seq_len_interpolation_factor": 2.0},
    "no-positions": {"position_embedding_type": "none"},
    "squared-relu": {"squared_relu": True, "add_bias_linear": False},
    "quick-geglu": {"quick_geglu": True, "ffn_hidden_size": 48},
    "norm-plus-one": {"apply_layernorm_1p": True},
    "residual-after-norm": {"apply_residual_connection_post_layernorm": True},
    "wide-residual": {"fp32_residual_connection": True},
    "wide-residual-after-norm": {"fp32_residual_connection": True, "apply_residual_connection_post_layernorm": True},
    "packed": {"reset_position_ids": True, "reset_attention_mask": True},
    "packed-rope": {**_LLAMA, "reset_position_ids": True, "reset_attention_mask": True},
    "unfused": {"attention_backend": "unfused"},
    "xavier": {"init_method_xavier_uniform": True},
    "decoupled": {"decoupled_lr": 2e-2, "decoupled_min_lr": 1e-3},
    "sgd": {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.8},
    "unclipped": {"clip_grad": 0.0},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},  # equal only where the random streams are the serial run's
    "mean": _MEAN,
    "mean-llama": {**_LLAMA, **_MEAN},
    "bert": _BERT,
    "bert-published": {**_BERT, "norm_after_residual": True, "embedding_layernorm": True},
    "bert-words": {**_BERT, "bert_binary_head": False, "untie_embeddings_and_output_weights": True},
    "bert-mean": {**_BERT, **_MEAN},
    "t5": _T5,
    "t5-v1.0": {**_T5_PUBLISHED, "relu": True, "scale_tied_logits": True},
    "t5-v1.1": {**_T5_PUBLISHED, "geglu": True, "openai_gelu": True, "ffn_hidden_size": 48, "untie_embeddings_and_output_weights": True},
    "t5-rope": {**_T5, "position_embedding_type": "rope", "group_query_attention": True, "num_query_groups": 2},
    "t5-dropout": {**_T5_PUBLISHED, "hidden_dropout": 0.1, "attention_dropout": 0.1},  # as "dropout"
}

ROWS: tuple[tuple[str, str], ...] = (
    # tensor and sequence parallelism
    ("tp2", "gpt"),
    ("tp2 sp", "gpt"),
    ("tp4 mb2", "llama"),
    ("tp4 sp mb4", "llama"),
    ("tp8 sp mb4", "gpt2"),
    ("tp2 sp vocab96 mb4", "untied"),
    ("tp4 sp mb2", "gqa2"),
    ("tp4 mb4", "mqa"),
    ("tp8 mb8", "gqa2"),
    ("tp2 sp mb4", "narrow-heads"),
    ("tp4 mb4", "qkv-bias"),
    ("tp4 sp mb4", "qk-norm"),
    ("tp2 mb4", "qk-norm-decays"),
    ("tp2 sp mb4", "packed"),
    ("tp2 sp mb4", "packed-rope"),
    # networks
    ("tp2 sp mb4", "rope-interleaved"),
    ("tp2 mb4", "rope-partial"),
    ("tp2 mb4", "rope-scaled"),
    ("tp2 sp mb4", "rope-interpolated"),
    ("tp2 sp mb4", "no-positions"),
    ("tp2 sp mb4", "squared-relu"),
    ("tp2 mb4", "quick-geglu"),
    ("tp2 sp mb4", "norm-plus-one"),
    ("tp2 sp pp2 mb2", "residual-after-norm"),
    ("tp2 sp pp2 mb2", "wide-residual"),
    ("tp2 sp mb4", "unfused"),
    ("tp2 mb4", "xavier"),
    # pipelines
    ("pp2", "gpt"),
    ("pp4", "llama"),
    ("pp2 gpipe", "gpt"),
    ("pp2 blocking", "untied"),
    ("pp2 vpp2", "gpt"),
    ("pp2 vpp2 blocking", "llama"),
    ("pp2 chunk-layers1", "llama-tied"),
    ("pp2 vpp2 group4", "gpt"),
    ("pp2 vpp2 gpipe", "gpt"),
    ("pp4 layout=E|t*2|t*2|L", "gpt"),
    ("pp2 layout=Et|t|tt|L", "llama"),
    ("pp2 first-layers1", "gpt"),
    ("pp2 last-layers1", "untied"),
    ("pp2 account-embedding account-loss", "gpt"),
    ("pp4 mb2", "packed-rope"),
    # data parallelism and its buffers
    ("dp2", "gpt"),
    ("dp4 zero", "llama"),
    ("dp2 overlap-reduce bucket500", "gpt"),
    ("dp2 zero overlap-reduce buckets3", "llama"),
    ("dp2 overlap-gather bucket300", "untied"),
    ("dp4 overlap-reduce overlap-gather bucket700", "gpt"),
    ("dp2 average", "gpt"),
    ("dp8 zero average overlap-reduce bucket900", "llama"),
    ("dp2 zero", "sgd"),
    ("dp2 zero", "unclipped"),
    # microbatches and recomputation
    ("mb2", "gpt"),
    ("mb4 dp2", "llama"),
    ("mb8", "packed"),
    ("recompute-attention tp2", "gpt"),
    ("recompute-norm tp2 sp", "llama"),
    ("recompute-norm", "residual-after-norm"),
    ("recompute-mlp pp2", "gpt"),
    ("recompute-all-parts tp2 sp pp2", "qk-norm"),
    ("recompute-uniform recompute-layers3 dp2 overlap-reduce bucket500", "llama"),
    ("recompute-uniform tp2 distribute-saved", "gpt"),
    ("recompute-block recompute-layers1 pp2 vpp2", "gpt"),
    ("recompute-uniform tp2 sp pp2", "packed"),
    ("recompute-uniform recompute-layers2", "dropout"),
    ("recompute-all-parts", "dropout"),
    # everything at once
    ("tp2 pp2", "gpt"),
    ("tp2 dp2", "gpt"),
    ("tp2 sp dp2 zero", "qk-norm"),
    ("pp2 dp2 pp-before-dp", "gpt"),
    ("tp2 pp2 dp2 zero pp-before-dp", "llama"),
    ("tp2 sp pp2 dp2 overlap-reduce overlap-gather bucket600", "gpt"),
    ("tp2 sp pp2 vpp2 dp2 zero average", "llama-tied"),
    ("tp2 pp4 layout=E|tt|tt|L", "gpt"),
    ("tp4 sp dp2 zero overlap-reduce bucket400 mb2", "mqa"),
    ("tp4 pp2 vpp2 recompute-uniform mb2", "qkv-bias"),
    ("pp2", "decoupled"),
    ("tp2 pp2 dp2", "sgd"),
    ("tp2 sp pp2 vpp2 mb2", "rope-partial"),
    ("pp2 dp4 zero gpipe overlap-gather", "norm-plus-one"),
    # the mean of the microbatches' means, with the same cut into microbatches
    ("dp2", "mean"),
    ("tp2 sp pp2", "mean-llama"),
    ("pp2 vpp2 dp2 zero average", "mean"),
    # encoders of pairs of texts
    ("tp2", "bert"),
    ("tp2 sp mb2", "bert"),
    ("tp4 sp mb4", "bert-published"),
    ("tp2 sp mb4", "bert-words"),
    ("pp2 vpp2", "bert"),
    ("pp4 mb2", "bert-published"),
    ("mb4 dp2", "bert"),
    ("dp2 zero overlap-reduce overlap-gather bucket700", "bert-published"),
    ("dp2", "bert-mean"),
    ("recompute-all-parts tp2 sp pp2 mb2", "bert-published"),
    ("recompute-uniform tp2 distribute-saved mb2", "bert"),
    ("tp2 sp pp2 dp2 zero average", "bert"),
    # encoders and decoders in one line
    ("tp2 mb4", "t5"),
    ("tp4 sp mb2", "t5-v1.0"),
    ("tp2 sp mb4", "t5-v1.1"),
    ("tp4 mb4", "t5-rope"),
    ("pp2", "t5"),
    ("pp2 first-layers4", "t5-v1.1"),
    ("pp2 vpp3", "t5-v1.0"),
    ("pp2 vpp3 blocking mb2", "t5-v1.1"),
    ("pp4 layout=Ett|tt|t|tL mb2", "t5-v1.0"),
    ("pp4 layout=E|t*5|t|L gpipe", "t5-rope"),
    ("mb4 dp2 zero", "t5"),
    ("recompute-uniform recompute-layers2 pp2 mb2", "t5-v1.0"),
    ("recompute-all-parts tp2 sp pp2 mb2", "t5-v1.1"),
    ("recompute-uniform", "t5-dropout"),
    ("recompute-all-parts", "t5-dropout"),
    ("tp2 sp pp2 vpp3 dp2 zero average", "t5-v1.0"),
)


def read_layout(words: str) -> tuple[int, Changes]:
    """(number of ranks, changes to the base config) of a row's first string."""
    changes: Changes = {}
    data_parallel = 1
    for word in words.split():
        if word in LAYOUT_WORDS:
            changes.update(LAYOUT_WORDS[word])
            continue
        name, value = re.fullmatch(r"(layout=|[a-z-]+)(.+)", word).groups()
        if name == "dp":
            data_parallel = int(value)
        else:
            changes[NUMBERED_WORDS[name]] = value if name == "layout=" else int(value)
    ranks = changes.get("tensor_model_parallel_size", 1) * changes.get("pipeline_model_parallel_size", 1) * data_parallel
    return ranks, changes


def named(layout: str, model: str) -> str:
    """A row in one line: its id."""
    return f"{layout or 'serial'} / {model}"
