"""Rows of the table of layouts for state of other shapes than the weights', and for gradients of weights that wait."""

from __future__ import annotations

from typing import Any

_ADAFACTOR: dict[str, Any] = {"optimizer": "adafactor", "lr": 0.05, "min_lr": 0.01}
_SOAP: dict[str, Any] = {"optimizer": "soap", "lr": 3e-3, "min_lr": 1e-3}
_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
}

MODELS: dict[str, dict[str, Any]] = {
    # A bias that all keys share has no gradient but rounding, which a direction would make large.
    "adafactor": {**_ADAFACTOR, "add_bias_linear": False},
    "adafactor-gqa": {
        **_ADAFACTOR,
        **_LLAMA,
        "num_query_groups": 2,
        "group_query_attention": True,
        "adafactor_clip_threshold": 0.7,
        "adafactor_decay_rate": 0.6,
        "adafactor_min_rms": 0.02,
        "decoupled_lr": 0.02,
    },
    "soap": {**_SOAP, **_LLAMA, "num_query_groups": 2, "group_query_attention": True, "add_bias_linear": False},
    "soap-plain": {**_SOAP, "soap_use_kl_shampoo": False, "soap_shampoo_beta": 0.8},
    "soap-moe": {**_SOAP, **_LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24},
    "adafactor-moe": {**_ADAFACTOR, **_LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24},
}
# What must not change any result.
WORDS: dict[str, dict[str, Any]] = {
    "delay": {"delay_wgrad_compute": True},
    "gathered-turns": {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "allgather"},
}
ROWS: tuple[tuple[str, str], ...] = (
    ("tp4 mb4", "adafactor-gqa"),
    ("pp2 dp2 zero bucket600 overlap-gather mb2", "adafactor"),
    ("tp2 dp2 fsdp mb2", "adafactor"),
    ("tp2 sp ep2 etp2 dp4 zero mb2", "adafactor-moe"),
    ("ep2 dp2 fsdp mb2", "adafactor-moe"),
    ("dp4 zero bucket600 mb2", "soap"),
    ("tp4 mb4", "soap"),
    ("tp2 sp mb4", "soap"),
    ("pp2 dp2 zero overlap-gather mb2", "soap-plain"),
    ("tp2 dp2 fsdp mb2", "soap-plain"),
    ("tp2 sp ep2 etp2 dp4 zero mb2", "soap-moe"),
    ("ep2 dp2 fsdp mb2", "soap-moe"),
    ("tp2 sp ep2 dp2 turns delay", "moe-shared-bias"),
    ("ep2 dp2 gathered-turns", "moe-balanced"),
    ("pp2 ep2 dp2 delay alltoall zero overlap-reduce bucket600", "moe-shared"),
    ("recompute-moe ep2 dp2 delay average", "moe-balanced"),
    ("ep2 dp2 delay alltoall overlap-reduce bucket600", "moe-bias"),
)
