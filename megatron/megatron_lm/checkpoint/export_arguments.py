"""Which networks Megatron can build, the arguments that its checkpoints hold for them, and the flags that these leave out.

Every setting that makes a network's function (`core/config/plan/network.py`) must have its default, or stand in the table
`COUNTERPARTS`, or the network cannot be written for Megatron; so a setting that is new here is refused until it is added.
"""

from __future__ import annotations

import math
import shlex
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron.core.config.flags.declare import config_to_flat_dict, flag_name
from megatron.core.config.flags.parse import parse_layer_frequency
from megatron.core.config.plan.network import network_fields, unused_settings
from megatron.core.config.settings.model import ModelConfig

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
_PATTERNS = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq")
# What Megatron's `--use-checkpoint-args` takes from a checkpoint, in every release since 0.8. (apply_layernorm_1p it still
# takes since 0.16, and no longer reads: the argument is layernorm_zero_centered_gamma there.)
_TAKEN = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels max_position_embeddings
    position_embedding_type rotary_base rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu
    swiglu untie_embeddings_and_output_weights normalization num_experts moe_layer_freq
    moe_router_topk moe_router_pre_softmax moe_shared_expert_intermediate_size
    """.split()
)
_OURS = frozenset(
    ("architecture", "openai_gelu", "true_vocab_size", "mamba_norm_epsilon", "mamba_time_step_limit")
)  # said otherwise there, or not at all


def settings_unknown_to_megatron(model: ModelConfig) -> list[str]:
    """Return the settings that Megatron cannot build, a line each. model: resolved."""
    values, usual, idle = config_to_flat_dict(model), config_to_flat_dict(ModelConfig()), unused_settings(model)
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


def padded_vocab_rows(rows: int, settings: Mapping[str, Any], ranks: int) -> int:
    """Return the number of rows of a vocabulary padded so that `ranks` tensor ranks divide it."""
    multiple = int(settings.get("make_vocab_size_divisible_by") or 128) * ranks
    return math.ceil(rows / multiple) * multiple


def megatron_arguments_of(
    model: ModelConfig, settings: Mapping[str, Any], more: Mapping[str, Any]
) -> types.SimpleNamespace:
    """Return the arguments of a Megatron run that has this network, as a namespace.

    model: resolved; settings: of the run; more: overrides both.
    """
    plain_values = {
        name: value
        for name, value in {**settings, **config_to_flat_dict(model)}.items()
        if value is None or isinstance(value, (bool, int, float, str, tuple, list))
    }
    grouped = not model.mla.multi_latent_attention and model.num_query_groups != model.num_attention_heads
    return types.SimpleNamespace(
        **{
            **{
                name: _megatron_value(name, value, model.encoder_or_decoder_depth())
                for name, value in plain_values.items()
            },
            "group_query_attention": grouped,
            "bias_gelu_fusion": megatron_fuses_gelu(model),
            "add_position_embedding": True,
            "use_rotary_position_embeddings": False,
            **_hybrid_arguments(model),
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "use_mcore_models": True,
            "no_save_optim": True,
            "no_save_rng": True,
            **more,
        }
    )


def _hybrid_arguments(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's further arguments for stateful mixers: the pattern's older name, or a list of all layers."""
    if model.is_hybrid:
        return {"is_hybrid_model": True, "hybrid_override_pattern": model.hybrid.layer_symbols}
    if model.hybrid.experimental_attention_variant and model.hybrid.linear_attention_freq is None:
        return {"linear_attention_freq": [1] * model.num_layers}
    return {}


def additional_megatron_flags(model: ModelConfig) -> str:
    """Return the flags that Megatron needs beside `--use-checkpoint-args`, which takes only part of a network from a
    checkpoint; as one text, empty if none. model: resolved.
    """
    values, usual, idle = config_to_flat_dict(model), config_to_flat_dict(ModelConfig()), unused_settings(model)
    words = [
        f"{flag_name(name)}{_shell_value(values[name])}"
        for name in network_fields()
        if name not in _TAKEN | _OURS | idle
        and values[name] != usual[name]
        and not (name == "rope_type" and values[name] == "rope" and not model.mla.multi_latent_attention)
    ]
    return " ".join([*words, *_mlp_fusion_flags(model)])


def _mlp_fusion_flags(model: ModelConfig) -> Iterator[str]:
    """Yield flags of MLPs and experts whose defaults in Megatron depend on the network."""
    if model.add_bias_linear and not model.swiglu and not megatron_fuses_gelu(model):
        yield "--no-bias-gelu-fusion"
    if model.moe.moe_grouped_gemm and not model.add_bias_linear and model.activation_name in ("silu", "gelu"):
        yield "--moe-grouped-gemm"  # where Megatron has that; without it the network is the same
    biased_experts = bool(model.moe.num_experts and model.add_bias_linear)
    if model.swiglu and (model.activation_func_clamp_value is not None or model.glu_linear_offset or biased_experts):
        yield "--no-bias-swiglu-fusion"


def _shell_value(value: Any) -> str:
    """Return a value as it stands behind its flag on a command line, with a blank before it; "" for True."""
    if value is True:
        return ""
    return f" {' '.join(map(str, value))}" if isinstance(value, (tuple, list)) else f" {shlex.quote(str(value))}"


def _megatron_value(name: str, value: Any, layers: int) -> Any:
    """Return a setting as Megatron's arguments have it: patterns as numbers or lists, windows as tuples."""
    if name in _PATTERNS and isinstance(value, str):
        pattern = parse_layer_frequency(value, layers, flag_name(name))
        return pattern if isinstance(pattern, int) else list(pattern)
    if name == "window_size" and isinstance(value, str):
        return tuple(int(size) for size in value.strip("() ").split(","))
    return (value[0] if len(value) == 1 else list(value)) if isinstance(value, (tuple, list)) else value
