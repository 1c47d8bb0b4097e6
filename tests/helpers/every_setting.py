"""Every setting of a run, changed by itself, in networks that between them use all of them."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

from megatron.core.config.flags.declare import config_from_flat_dict, config_to_flat_dict, flag_fields
from megatron.core.config.settings.architecture import Architecture
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.plan.command import parse_training_command
from megatron.plan.setup import RunSetup
from tests.helpers import tiny

Changes = dict[str, Any]
ROTARY = {"position_embedding_type": "rope", "max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "init_method_std": 0.3}
# Networks that between them use every setting.
NETWORKS: dict[str, Changes] = {
    "dense": {},
    "gated": {
        **ROTARY,
        "swiglu": True,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "window_size": "3,0",
        "window_attn_skip_freq": "2",
        "no_rope_freq": "2",
        "rotary_base_local": 100.0,
        "use_rope_scaling": True,
    },
    "yarn": {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 4,
        "untie_embeddings_and_output_weights": True,
    },
    "mrope": {"position_embedding_type": "mrope", "mrope_section": (1, 1, 0)},
    "latent": {
        **ROTARY,
        "multi_latent_attention": True,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_layernorm": True,
    },
    "experts": {
        **EXPERTS,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": "2",
    },
    "groups": {
        **EXPERTS,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_score_function": "sigmoid",
    },
    "states": {
        "hybrid_layer_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "mamba_num_groups": 2,
        "mamba_state_dim": 4,
    },
    "delta": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "2",
        "norm_after_sublayer": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    },
    "ahead": {"mtp_num_layers": 2},
    "adapters": {"lora_rank": 4, "lora_alpha": 6.0},
    "images": {
        "vision_model_type": "clip",
        "img_h": 8,
        "img_w": 8,
        "patch_dim": 4,
        "vision_num_layers": 2,
        "vision_hidden_size": 16,
        "vision_num_attention_heads": 4,
        "pixel_shuffle": True,
    },
    "classes": {"architecture": "vit", "img_h": 8, "img_w": 8, "patch_dim": 4},
    "bert": {"architecture": "bert"},
    "t5": {
        "architecture": "t5",
        "encoder_num_layers": 4,
        "decoder_seq_length": 8,
        "position_embedding_type": "relative",
        "scale_tied_logits": True,
    },
}
DATA = {
    "dataloader_type": "cyclic",
    "mock_data": False,
    "data_path": ["0.5", "a/one", "0.5", "a/two"],
    "split": "90,5,5",
}
OTHERS: Changes = {  # where no other value follows from the type
    "window_size": "5,0",
    "window_attn_skip_freq": "3",
    "no_rope_freq": "3",
    "moe_layer_freq": "3",
    "hybrid_layer_pattern": "M-*M",
    "linear_attention_freq": "3",
    "mamba_time_step_limit": [0.1, 2.0],
    "mrope_section": [0, 1, 1],
    "lora_targets": ["q_proj"],
    "data_path": ["0.4", "b/one", "0.6", "b/two"],
    "split": "80,10,10",
}


def resolved(changes: Changes) -> RunConfig:
    """The tiny run with these changes."""
    return tiny.config(**{"train_iters": 8, **changes})


def other(name: str, kind: Any, value: Any) -> Any:
    """Another value of a field."""
    if name in OTHERS:
        return OTHERS[name]
    if kind is Architecture:
        return "bert" if value == "gpt" else "gpt"
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is typing.Literal:
        return next(one for one in kinds if one != value)
    if typing.get_origin(kind) is tuple:
        return [*(value or ()), other(name, kinds[0], None)]
    if any(typing.get_origin(one) in (typing.Literal, tuple) for one in kinds):
        return other(name, next(one for one in kinds if typing.get_origin(one) in (typing.Literal, tuple)), value)
    if bool in kinds:
        return not value
    if str in kinds:
        return f"{value or ''}other"
    return (value or 0) + 1 if int in kinds else (value or 0.0) + 0.5


def fields() -> Iterator[tuple[str, Any]]:
    """(name, type) of every field of a run, flag or not."""
    yield from ((field.name, kind) for field, kind in flag_fields(RequestedRun))
    hints = typing.get_type_hints(ModelConfig)
    yield from (
        (field.name, hints[field.name])
        for field in dataclasses.fields(ModelConfig)
        if "help" not in field.metadata and not dataclasses.is_dataclass(hints[field.name])
    )


def changed(config: RunConfig, name: str, kind: Any) -> tuple[Changes, RunConfig]:
    """What a checkpoint of this run says, as read from its file, and a run that has one setting otherwise."""
    values = config_to_flat_dict(config)
    saved = json.loads(json.dumps(values))
    return saved, config_from_flat_dict(RunConfig, {**values, name: other(name, kind, values[name])})


# Runs of every kind of network and of every script, each of which starts: script, number of ranks, flags.
_SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 8 --train-iters 8 --lr 1e-3"
_TEXT = f"{_SIZES} --seq-length 16 --mock-data"
_GPT = f"{_TEXT} --tokenizer-type NullTokenizer --vocab-size 50"
_MOE = "--num-experts 4 --moe-ffn-hidden-size 16"
_MAMBA = "--mamba-num-heads 8 --mamba-head-dim 8"
_IMAGES = "--img-h 8 --img-w 8 --patch-dim 4"
RUNS: dict[str, tuple[str, int, str]] = {
    "gpt": ("pretrain_gpt.py", 1, _GPT),
    "layout": (
        "pretrain_gpt.py",
        8,
        f"{_GPT} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16",
    ),
    "rope": ("pretrain_gpt.py", 1, f"{_GPT} --position-embedding-type rope --swiglu --normalization RMSNorm"),
    "yarn": ("pretrain_gpt.py", 1, f"{_GPT} --position-embedding-type yarn --rotary-scaling-factor 4"),
    "moe": ("pretrain_gpt.py", 2, f"{_GPT} {_MOE} --expert-model-parallel-size 2"),
    "groups": (
        "pretrain_gpt.py",
        1,
        f"{_GPT} {_MOE} --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-score-function sigmoid "
        "--moe-shared-expert-intermediate-size 16 --moe-expert-capacity-factor 1",
    ),
    "mla": (
        "pretrain_gpt.py",
        1,
        f"{_GPT} --multi-latent-attention --position-embedding-type rope --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 8",
    ),
    "mtp": ("pretrain_gpt.py", 1, f"{_GPT} --mtp-num-layers 2"),
    "mamba": ("pretrain_hybrid.py", 1, f"{_GPT} --hybrid-layer-pattern MMMM {_MAMBA}"),
    "hybrid": ("pretrain_hybrid.py", 1, f"{_GPT} --hybrid-layer-pattern M*-E {_MAMBA} {_MOE}"),
    "delta": (
        "pretrain_gpt.py",
        1,
        f"{_GPT} --experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 4 "
        "--linear-key-head-dim 4 --linear-value-head-dim 4",
    ),
    "adapters": ("pretrain_gpt.py", 1, f"{_GPT} --lora-rank 4"),
    "fp8": ("pretrain_gpt.py", 1, f"{_GPT} --bf16 --fp8-format hybrid --num-attention-heads 4 --hidden-size 64"),
    "muon": ("pretrain_gpt.py", 1, f"{_GPT} --optimizer muon"),
    "compiled": ("pretrain_gpt.py", 1, f"{_GPT} --compile --compile-backend aot_eager --use-precision-aware-optimizer"),
    "images": (
        "pretrain_vlm.py",
        1,
        f"{_GPT} --vision-model-type clip {_IMAGES} --vision-num-layers 2 --vision-hidden-size 16 --vision-num-attention-heads 4",
    ),
    "classes": ("pretrain_vision_classify.py", 1, f"{_SIZES} --data-path absent {_IMAGES} --vocab-size 50"),
    "bert": ("pretrain_bert.py", 1, f"{_TEXT} --vocab-file absent.txt"),
    "t5": (
        "pretrain_t5.py",
        1,
        f"{_TEXT} --encoder-num-layers 4 --decoder-seq-length 8 --position-embedding-type relative --vocab-file absent.txt",
    ),
    "preference": (
        "finetune.py",
        1,
        f"{_SIZES} --seq-length 16 --data-path pairs.jsonl --finetune-task reward --tokenizer-type NullTokenizer --vocab-size 50",
    ),
    "rl": ("train_rl.py", 1, f"{_GPT} --langrl-env-config absent.yaml --grpo-kl-beta 0"),
}
Verdict = tuple[
    str, tuple[str, ...], tuple[str, ...]
]  # refused, noted or accepted; names of broken rules; what is noted


def run_setup(label: str) -> RunSetup:
    """A run of `RUNS`, checked as before its start on a machine with a CPU, which may lack its files."""
    entry, ranks, words = RUNS[label]
    command = parse_training_command([entry, *words.split()], ranks=ranks)
    assert command.setting is not None and not command.unread, command.unread
    return dataclasses.replace(command.setting, whole=True, device="cpu")


def verdict(setup: RunSetup, values: Changes) -> Verdict:
    """What the checks of a start say of a run with these settings otherwise."""
    checked = setup.with_values(values).run_preflight_checks()
    rules = tuple(sorted({rule for rule, _ in checked.problems}))
    notes = tuple(note for note in checked.notes if "(on this machine)" not in note)
    return "refused" if rules else "noted" if notes else "accepted", rules, notes


def other_values(name: str, kind: Any, value: Any) -> list[Any]:
    """Other values of a setting: all choices where there are some, else one that is near, none, and some numbers."""
    kinds = typing.get_args(kind) if type(None) in typing.get_args(kind) else (kind,)
    chosen = next((one for one in kinds if typing.get_origin(one) is typing.Literal), None)
    if chosen is not None:
        return [one for one in typing.get_args(chosen) if one != value]
    near = other(name, kind, value)
    near = tuple(near) if isinstance(near, list) else near
    far: list[Any] = [None] if type(None) in typing.get_args(kind) else []
    far += [0, 8] if int in kinds else []
    return [near, *(one for one in far if one not in (near, value))]
