"""What the fixtures are of: one run of Megatron-LM for every kind of network and of checkpoint. Plain data, for both sides.

A case is a command line of Megatron-LM, as the values of its arguments. `RUN` is common to all: it saves after iteration 3
and goes on to 8, so that the losses of iterations 4 to 8 are those of its own continuation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SAVED, LAST = 3, 8
RUN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "ffn_hidden_size": 16,
    "max_position_embeddings": 16,
    "seq_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": LAST,
    "lr": 2e-3,
    "min_lr": 2e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "lr_decay_iters": LAST,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "adam_beta2": 0.95,
    "init_method_std": 0.2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 16,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 31,
    "data_path": ["tokens"],
    "split": "100,0,0",
    "save": "checkpoints",
    "save_interval": SAVED,
    "eval_iters": 0,
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "log_interval": 1,
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
}
GQA = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 3,
    "position_embedding_type": "rope",
    "rope_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}
DEEPSEEK = {
    **LATENT,
    **EXPERTS,
    "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 8,
    "qk_layernorm": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "mtp_num_layers": 1,
}
ADAM = {
    "plain": {},
    "distributed": {"use_distributed_optimizer": True},
    "reshardable": {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True},
}


@dataclass(frozen=True)
class Case:
    """A run. given: arguments beyond `RUN`; ranks: processes; optimizer: a name of `ADAM`."""

    name: str
    given: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    optimizer: str = "plain"

    @property
    def arguments(self) -> dict[str, Any]:
        """What the user of Megatron-LM gave."""
        return {**RUN, **ADAM[self.optimizer], **self.given}


_EP = {"expert_model_parallel_size": 2}
_TORCH = {"ckpt_format": "torch"}
_HYBRID = {"num_layers": 4, "hybrid_override_pattern": "*-*-", "is_hybrid_model": True}
_BF16 = {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}
CASES = {
    case.name: case
    for case in (
        Case("dense"),
        Case("dense-torch", _TORCH),
        Case("gqa", GQA),
        Case("gqa-torch", {**GQA, **_TORCH}),
        Case("latent", LATENT),
        Case("latent-torch", {**LATENT, **_TORCH}),
        Case("experts", EXPERTS),
        Case("experts-torch", {**EXPERTS, **_TORCH}),
        Case("experts-grouped", {**EXPERTS, "moe_grouped_gemm": True}),
        Case("experts-grouped-torch", {**EXPERTS, **_TORCH, "moe_grouped_gemm": True}),
        Case("mtp", {**GQA, "mtp_num_layers": 1}),
        Case("mtp-torch", {**GQA, "mtp_num_layers": 1, **_TORCH}),
        Case("deepseek", DEEPSEEK),
        Case("deepseek-torch", {**DEEPSEEK, **_TORCH}),
        Case("tp2", {**GQA, "tensor_model_parallel_size": 2}, ranks=2),
        Case("tp2-torch", {**GQA, "tensor_model_parallel_size": 2, **_TORCH}, ranks=2),
        Case("gqa-distributed", GQA, optimizer="distributed"),
        Case("gqa-reshardable", GQA, optimizer="reshardable"),
        Case("gqa-distributed-torch", {**GQA, **_TORCH}, optimizer="distributed"),
        Case("dense-distributed-torch", _TORCH, optimizer="distributed"),
        # Attention and MLPs as layers of their own, as Megatron's hybrid networks have them.
        Case("hybrid", {**GQA, **_HYBRID}),
        Case("hybrid-torch", {**GQA, **_HYBRID, **_TORCH}),
        Case("hybrid-distributed", {**GQA, **_HYBRID}, optimizer="distributed"),
        # Weights in bf16, whose fp32 main weights are the optimizer's.
        Case("bf16", {**GQA, **_BF16}),
        Case("bf16-distributed", {**GQA, **_BF16}, ranks=2, optimizer="distributed"),
        Case("bf16-distributed-torch", {**GQA, **_BF16, **_TORCH}, optimizer="distributed"),
        # In the layout of Megatron FSDP, which itself runs on GPUs alone: see `fsdp_state` in run_peer.py.
        Case("gqa-fsdp", {**GQA, "ckpt_format": "fsdp_dtensor"}, ranks=2),
        Case("deepseek-fsdp", {**DEEPSEEK, "ckpt_format": "fsdp_dtensor"}, ranks=2),
        # Flat buffers of two data-parallel ranks, of two expert ranks, of two tensor ranks.
        Case("deepseek-distributed", DEEPSEEK, ranks=2, optimizer="distributed"),
        Case("deepseek-reshardable", DEEPSEEK, ranks=2, optimizer="reshardable"),
        Case("ep2-distributed", {**DEEPSEEK, **_EP}, ranks=2, optimizer="distributed"),
        Case("ep2-reshardable", {**DEEPSEEK, **_EP}, ranks=2, optimizer="reshardable"),
        Case("grouped-distributed", {**EXPERTS, "moe_grouped_gemm": True}, optimizer="distributed"),
        Case("grouped-reshardable", {**EXPERTS, "moe_grouped_gemm": True}, optimizer="reshardable"),
        Case("tp2-distributed", {**GQA, "tensor_model_parallel_size": 2}, ranks=2, optimizer="distributed"),
        Case("tp2-reshardable", {**GQA, "tensor_model_parallel_size": 2}, ranks=2, optimizer="reshardable"),
    )
}
# Of other releases the cases that each wrote otherwise; all others are of the release that the fixtures are of.
RELEASES = {
    "0.8.0": ("dense-torch", "dense-distributed-torch"),
    "0.12.3": ("gqa-distributed", "latent", "ep2-distributed"),
    "0.14.0": ("gqa", "tp2-distributed", "deepseek-distributed"),
    "0.19.2": ("gqa", "deepseek-torch", "deepseek-distributed", "tp2-distributed"),
}
