"""Rows of the table of layouts for matrices of 8 bits: their networks, and how the work is divided.

They are compared in fp64 alone: what is left of a sum in fp32 can carry a value over to the next number of 8 bits.
"""

from __future__ import annotations

from typing import Any

_DELAYED: dict[str, Any] = {
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 2,
    "fp8_amax_compute_algo": "max",
    "fp8_margin": 1,
}
# Wide enough that each of two tensor ranks holds whole blocks.
_MX: dict[str, Any] = {
    "fp8_format": "e4m3",
    "fp8_recipe": "mxfp8",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
}

_EXPERTS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": 4,
}

# Widths of the first projections that two tensor ranks divide into multiples of 16: 352 rows each.
_STATES: dict[str, Any] = {
    "num_layers": None,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hybrid_layer_pattern": "M*-G",
    "mamba_head_dim": 4,
    "mamba_num_heads": 32,
    "mamba_num_groups": 4,
    "mamba_state_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

MODELS: dict[str, dict[str, Any]] = {
    "fp8-tensorwise": {
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 0,
    },
    "fp8-delayed": _DELAYED,
    "fp8-mx": _MX,
    "fp8-blocks": {
        "fp8_format": "hybrid",
        "fp8_recipe": "blockwise",
        "num_layers": 2,
        "hidden_size": 256,
        "ffn_hidden_size": 256,
    },
    "fp8-wide-weights": {**_MX, "fp8_wgrad": False},
    "fp8-experts": {**_DELAYED, **_EXPERTS, "moe_ffn_hidden_size": 24},
    "fp8-experts-tensorwise": {
        **_EXPERTS,
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
        "moe_ffn_hidden_size": 32,
    },
    "fp8-hybrid-delayed": {**_DELAYED, **_STATES},
    "fp8-hybrid-tensorwise": {**_STATES, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}
# What must not change any result.
WORDS: dict[str, dict[str, Any]] = {"fp8-gather": {"fp8_param_gather": True, "use_distributed_optimizer": True}}
ROWS: tuple[tuple[str, str], ...] = (
    ("tp2 sp", "fp8-tensorwise"),
    ("tp4", "fp8-tensorwise"),
    ("cp2 tp2 sp", "fp8-tensorwise"),
    ("pp2 zb tp2 sp", "fp8-tensorwise"),
    ("tp2 sp pp2 dp2 fp8-gather", "fp8-tensorwise"),
    ("dp4 fp8-gather overlap-reduce overlap-gather bucket900 average", "fp8-tensorwise"),
    ("tp2 sp dp2 zero", "fp8-delayed"),
    ("pp2 vpp2 dp2", "fp8-delayed"),
    ("recompute-uniform cp2", "fp8-delayed"),
    ("dp2 fsdp", "fp8-delayed"),
    ("tp2 sp", "fp8-mx"),
    ("tp2 sp pp2 zb", "fp8-mx"),
    ("recompute-all-parts dp2 zero", "fp8-mx"),
    ("tp2 sp", "fp8-blocks"),
    ("tp2 sp dp2 fp8-gather overlap-gather", "fp8-blocks"),
    ("tp2 sp dp2 fp8-gather", "fp8-mx"),
    ("tp2 sp dp2 fp8-gather", "fp8-experts-tensorwise"),
    ("tp2 sp", "fp8-wide-weights"),
    ("tp2 sp", "fp8-experts"),
    ("tp2 sp", "fp8-hybrid-tensorwise"),
    ("dp2 fsdp recompute-uniform", "fp8-hybrid-tensorwise"),
    ("cp2 dp2 zero", "fp8-hybrid-delayed"),
    ("tp2 sp dp2 fp8-gather overlap-gather", "fp8-hybrid-tensorwise"),
)
