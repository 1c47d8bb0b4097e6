"""Published networks with layers that have a state: sizes of tiny ones, by case."""

from __future__ import annotations

from typing import Any

from tests.helpers import tiny

Cases = dict[str, tuple[str, dict[str, Any]]]
STATES = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "n_groups": 2, "chunk_size": 8, "initializer_range": 0.2}
NEMOTRON = {
    **STATES,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "time_step_min": 0.3,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
FALCON = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_chunk_size": 8,
    "pad_token_id": None,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.4, 0.5, 0.6, 0.7, 0.8],
    "ssm_out_multiplier": 0.3,
    "mlp_multipliers": [0.9, 0.35],
}
# transformers cuts the convolution into three equal parts when it saves, so that all three must be equal.
OLMO = {
    **{name: size for name, size in DELTA.items() if name != "head_dim"},
    "linear_key_head_dim": 10,
    "pad_token_id": None,
    "eos_token_id": None,
}


def experts(sparse: dict[str, Any]) -> Cases:
    """Those with experts. sparse: sizes that all networks with experts have."""
    return {
        "qwen3 next": ("Qwen3Next", {**sparse, **DELTA, "shared_expert_intermediate_size": 20}),
        "qwen3 next some": (
            "Qwen3Next",
            {
                **sparse,
                **DELTA,
                "initializer_range": 0.1,
                "norm_topk_prob": False,
                "shared_expert_intermediate_size": 20,
                "mlp_only_layers": [1],
                "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            },
        ),
        "qwen3.5 experts": (
            "Qwen3_5Moe",
            {
                **{name: size for name, size in sparse.items() if name not in ("norm_topk_prob", "intermediate_size")},
                **DELTA,
                "shared_expert_intermediate_size": 20,
            },
        ),
        "nemotron h experts": (
            "NemotronH",
            {**NEMOTRON, "routed_scaling_factor": 1.5, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
        ),
    }


def dense(sizes: dict[str, Any]) -> Cases:
    """Those without. sizes: that all networks have."""
    return {
        "mamba2": (
            "Mamba2",
            {
                **STATES,
                "num_hidden_layers": 2,
                "num_heads": 8,
                "head_dim": 8,
                "state_size": 5,
                "time_step_limit": (0.2, 2.0),
            },
        ),
        "mamba2 tied": (
            "Mamba2",
            {
                **STATES,
                "num_hidden_layers": 2,
                "num_heads": 8,
                "head_dim": 8,
                "state_size": 5,
                "tie_word_embeddings": True,
            },
        ),
        "nemotron h": (
            "NemotronH",
            {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]},
        ),
        "qwen3.5": ("Qwen3_5", {**sizes, **DELTA}),
        "olmo hybrid": ("OlmoHybrid", {**sizes, **OLMO}),
        "olmo hybrid unrotated": (
            "OlmoHybrid",
            {
                **sizes,
                **OLMO,
                "linear_allow_neg_eigval": False,
                "layer_types": ["full_attention", "linear_attention"],
                "num_hidden_layers": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": None},
            },
        ),
        "falcon h1": ("FalconH1", {**sizes, **FALCON}),
        "falcon h1 normed": (
            "FalconH1",
            {**sizes, **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True, "tie_word_embeddings": True},
        ),
        "falcon h1 gated": (
            "FalconH1",
            {**sizes, **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "ssm_multipliers": None},
        ),
        "bamba": (
            "Bamba",
            {
                **sizes,
                "num_hidden_layers": 4,
                "attn_layer_indices": [1],
                "mamba_n_heads": 8,
                "mamba_n_groups": 2,
                "mamba_d_state": 5,
                "mamba_chunk_size": 8,
                "time_step_limit": (0.2, 2.0),
                "pad_token_id": None,
            },
        ),
    }


def ours(kin: dict[str, Any], some: dict[str, Any]) -> Cases:
    """Networks of ours, by the family that they are written as. kin: settings of the kin of Llama; some: of networks with experts."""
    states = {
        "mamba_head_dim": 8,
        "mamba_num_groups": 2,
        "mamba_state_dim": 6,
        "mamba_norm_epsilon": kin["norm_epsilon"],
    }
    delta = {
        "num_layers": 2,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": "2",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 5,
        "qk_layernorm": True,
        "norm_epsilon": 1e-3,
    }
    untied = {"untie_embeddings_and_output_weights": True}
    return {
        "bamba": ("bamba", {**kin, **states, **untied, "num_layers": None, "hybrid_layer_pattern": "M-*-M-"}),
        "falcon h1": ("falcon_h1", {**kin, **states, **untied, "parallel_mamba": True, "key_multiplier": 0.5}),
        "olmo hybrid": (
            "olmo_hybrid",
            {
                **kin,
                **delta,
                **untied,
                "norm_after_sublayer": True,
                "qk_layernorm_across_heads": True,
                "linear_norm_before_sublayer": True,
                "linear_norm_epsilon": 1e-5,
            },
        ),
        "qwen3 next": (
            "qwen3_next",
            {
                **kin,
                **delta,
                **some,
                **untied,
                "apply_layernorm_1p": True,
                "attention_output_gate": True,
                "rotary_percent": 0.5,
                "moe_shared_expert_gate": True,
                "moe_shared_expert_intermediate_size": 20,
            },
        ),
    }
