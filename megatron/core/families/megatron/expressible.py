"""Which networks Megatron can build: a table of the settings that it has a counterpart of.

Every other setting that makes a network's function (`core/config/settings/network.py`) must have its default, or the network cannot be
written for Megatron; so a setting that is new here is refused until it is added to the table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.config.flags import config_to_dict, flag_name
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.network import network_fields, unused_settings

ANY: Collection[Any] | None = None
# Setting -> the values beside its default of which Megatron has a counterpart.
COUNTERPARTS: Mapping[str, Collection[Any] | None] = {
    **dict.fromkeys(
        """
        num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups
        max_position_embeddings true_vocab_size untie_embeddings_and_output_weights normalization norm_epsilon
        apply_layernorm_1p add_bias_linear add_qkv_bias swiglu quick_geglu squared_relu openai_gelu
        activation_func_clamp_value glu_linear_offset qk_layernorm qk_l2_norm softmax_scale window_size
        window_attn_skip_freq bert_binary_head rotary_base rotary_percent rotary_interleaved
        rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor mrope_section no_rope_freq
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mtp_num_layers
        mtp_use_repeated_layer num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk
        moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups
        moe_router_group_topk moe_router_enable_expert_bias moe_shared_expert_intermediate_size
        moe_shared_expert_gate attention_output_gate hybrid_layer_pattern mamba_state_dim mamba_head_dim
        mamba_num_groups mamba_num_heads experimental_attention_variant linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        """.split(),
        ANY,
    ),
    "architecture": ("bert",),  # a T5 is read, and not written
    "position_embedding_type": ("rope", "mrope", "none"),
    "rope_type": ("rope",),
    "softmax_type": ("off-by-one",),
    "mamba_time_step_limit": ([0.0, math.inf],),
}

# The same with latent attention, which alone has YaRN there.
LATENT: Mapping[str, Collection[Any] | None] = {
    "rope_type": ("rope", "yarn"),
    "rotary_scaling_factor": ANY,
    "mscale": ANY,
    "mscale_all_dim": ANY,
}


def settings_unknown_to_megatron(model: ModelConfig) -> list[str]:
    """Return the settings that Megatron cannot build, a line each. model: resolved."""
    values, usual, idle = config_to_dict(model), config_to_dict(ModelConfig()), unused_settings(model)
    table = {**COUNTERPARTS, **LATENT} if model.mla.multi_latent_attention else COUNTERPARTS
    lines = [
        f"{flag_name(name)}{_flag_value_text(values[name])}: Megatron builds no such network"
        for name in network_fields()
        if name not in idle
        and values[name] != usual[name]
        and (name not in table or (allowed := table[name]) is not None and values[name] not in allowed)
    ]
    return lines + [line for line, holds in _unsupported_combinations(model).items() if holds]


def _unsupported_combinations(model: ModelConfig) -> dict[str, bool]:
    """Return line -> whether it holds, for settings that Megatron supports alone but not together."""
    ahead = bool(model.mtp.mtp_num_layers)
    return {
        "--openai-gelu: Megatron has the tanh formula only in MLPs with biases, without experts and gates": model.activation_name
        == "gelu_tanh"
        and not megatron_fuses_gelu(model),
        "--moe-shared-expert-intermediate-size: Megatron's shared expert has no biases, as with --disable-bias-linear": bool(
            model.moe.num_experts and model.moe.moe_shared_expert_intermediate_size and model.add_bias_linear
        ),
        "--window-attn-skip-freq with --mtp-num-layers: which layers ahead have the window differs between Megatron's releases": ahead
        and model.parsed_window_size is not None
        and model.window_attn_skip_freq is not None,
        "--no-rope-freq with --mtp-num-layers: Megatron has no such network": ahead
        and model.uses_rotary
        and model.rope.no_rope_freq is not None,
    }


def megatron_fuses_gelu(model: ModelConfig) -> bool:
    """Whether Megatron fuses the GELU of the MLP with its bias, which is the tanh formula."""
    return (
        model.activation_name == "gelu_tanh"
        and model.add_bias_linear
        and not model.has_gated_mlp
        and not model.moe.num_experts
    )


def _flag_value_text(value: Any) -> str:
    return "" if value is True else f" {value}"
