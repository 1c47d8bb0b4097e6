"""Rows of the table of layouts for networks of layers of several kinds: Mamba-2, gated delta net, attention, MLPs and experts.

`hybrid` has as many groups as four tensor ranks need; `hybrid-two-groups` fewer than four context-parallel ranks; the groups of `hybrid-odd`
are not divided by context-parallel ranks, which then gather states.
"""

from __future__ import annotations

from typing import Any

_STATES: dict[str, Any] = {
    "num_layers": None,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "mamba_head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_num_groups": 4,
    "mamba_state_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
}
_PACKED: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}

_ODD: dict[str, Any] = {
    **_STATES,
    "hybrid_layer_pattern": "M*-G",
    "mamba_num_heads": 6,
    "mamba_num_groups": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}
_EVEN_BY_TENSOR: dict[str, Any] = {
    "mamba_num_heads": 12,
    "mamba_num_groups": 6,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
}

MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {**_STATES, "hybrid_layer_pattern": "M*-M"},
    "hybrid-limits": {**_STATES, "hybrid_layer_pattern": "MM", "mamba_time_step_limit": (0.01, 0.05)},
    "hybrid-two-groups": {**_STATES, "hybrid_layer_pattern": "MM-*", "mamba_num_groups": 2},
    "hybrid-packed": {**_STATES, **_PACKED, "hybrid_layer_pattern": "M*-G"},
    "hybrid-odd": _ODD,
    "hybrid-odd-packed": {**_ODD, **_PACKED},
    "hybrid-odd-tensor": {**_ODD, **_EVEN_BY_TENSOR},
    "hybrid-moe": {**_STATES, "hybrid_layer_pattern": "ME*E", "num_experts": 4, "moe_ffn_hidden_size": 24},
    "hybrid-mtp": {**_STATES, "hybrid_layer_pattern": "M-M*/MG/MG"},
    "hybrid-mtp-moe": {
        **_STATES,
        "hybrid_layer_pattern": "M-**/*E/*E",
        "mtp_use_repeated_layer": True,
        "window_size": "2,0",
        "window_attn_skip_freq": "3",
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
        "moe_router_load_balancing_type": ("aux_loss",),
        "moe_aux_loss_coeff": (0.1,),
    },
    "hybrid-muon": {
        **_STATES,
        "hybrid_layer_pattern": "M-*G",
        "optimizer": "muon",
        "muon_fp32_matmul_prec": "high",
        "lr": 3e-3,
        "min_lr": 1e-3,
    },
    "delta": {**_STATES, "hybrid_layer_pattern": "G-G*"},
    "delta-every-second": {
        **_STATES,
        "num_layers": 4,
        "swiglu": True,
        "ffn_hidden_size": 48,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "2",
    },
}
MODELS["delta-norms"] = {
    **MODELS["delta-every-second"],
    "norm_after_sublayer": True,
    "linear_norm_before_sublayer": True,
    "linear_allow_neg_eigval": True,
    "linear_norm_epsilon": 1e-3,
}
MODELS["parallel"] = {
    **_STATES,
    "num_layers": 2,
    "swiglu": True,
    "ffn_hidden_size": 48,
    "parallel_mamba": True,
    "mamba_output_norm": "before_gate",
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 1.5,
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": (0.4, 0.5, 0.6, 0.7, 0.8),
    "ssm_out_multiplier": 0.3,
    "mlp_multipliers": (0.9, 0.35),
}
MODELS["bamba"] = {
    **_STATES,
    "hybrid_layer_pattern": "M-*-",
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "swiglu": True,
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
}
# What must not change any result: the ends of stages, where activations are.
WORDS: dict[str, dict[str, Any]] = {
    "pattern-stages": {"hybrid_layer_pattern": "M*|-M"},
    "states": {"state_comm_type": "states"},
    "pattern-chunks": {"hybrid_layer_pattern": "M|*|-|M"},
    "offload-attention": {
        "fine_grained_activation_offloading": True,
        "min_offloaded_tensor_size": 0,
        "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
    },
}
ROWS: tuple[tuple[str, str], ...] = (
    ("tp2", "hybrid"),
    ("tp2 sp", "hybrid"),
    ("tp4 sp", "hybrid"),
    ("pp2 pattern-stages", "hybrid"),
    ("pp2 pattern-chunks", "hybrid"),
    ("cp2", "hybrid"),
    ("cp4 a2a", "hybrid"),
    ("dp2 zero overlap-reduce mb2", "hybrid"),
    ("dp2 fsdp", "hybrid"),
    ("tp2 sp recompute-uniform", "hybrid"),
    ("tp2 sp cp2 pp2", "hybrid"),
    ("tp2", "hybrid-limits"),
    ("cp2", "hybrid-two-groups"),
    ("cp4", "hybrid-two-groups"),
    ("tp2 sp", "hybrid-packed"),
    ("cp2", "hybrid-packed"),
    ("cp2", "hybrid-odd"),
    ("cp4 recompute-uniform", "hybrid-odd"),
    ("cp2", "hybrid-odd-packed"),
    ("cp4", "hybrid-odd-packed"),
    ("tp2 sp cp2 pp2", "hybrid-odd-tensor"),
    ("ep2 dp2", "hybrid-moe"),
    ("tp2 sp ep2 dp2 alltoall", "hybrid-moe"),
    ("pp2", "hybrid-mtp"),
    ("tp2 sp", "hybrid-mtp"),
    ("tp2 sp pp2 ep2 dp2", "hybrid-mtp-moe"),
    ("tp2 dp2 zero mb2", "hybrid-muon"),
    ("pp2 zb mb2", "hybrid"),
    ("offload-attention", "hybrid"),
    ("tp2", "delta"),
    ("tp4 sp", "delta"),
    ("cp2", "delta"),
    ("dp2 fsdp mb2", "delta"),
    ("pp2 dp2 zero", "delta"),
    ("tp2 sp", "delta-every-second"),
    ("pp2 cp2", "delta-every-second"),
    ("tp2 sp", "delta-norms"),
    ("tp2 sp", "parallel"),
    ("cp2", "parallel"),
    ("pp2 dp2 zero", "parallel"),
    ("mb4", "delta-every-second"),
    ("tp2 sp", "bamba"),
    ("cp2", "bamba"),
    ("cp2 states", "hybrid-packed"),
)
