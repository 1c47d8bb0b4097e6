"""The arguments that Megatron's checkpoints hold, for a network of ours, and the flags that its loader does not take from them."""

from __future__ import annotations

import math
import shlex
import types
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.config.flags import config_to_dict, flag_name
from megatron.core.config.layer_frequency import parse_layer_frequency
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.network import network_fields, unused_settings
from megatron.core.families.megatron.expressible import megatron_fuses_gelu

_PATTERNS = ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq")
# What Megatron's `--use-checkpoint-args` takes from a checkpoint, in every release since 0.8.
_TAKEN = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels max_position_embeddings
    position_embedding_type rotary_base rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu
    swiglu untie_embeddings_and_output_weights apply_layernorm_1p normalization num_experts moe_layer_freq
    moe_router_topk moe_router_pre_softmax moe_shared_expert_intermediate_size
    """.split()
)
_OURS = frozenset(
    ("architecture", "openai_gelu", "true_vocab_size", "mamba_norm_epsilon", "mamba_time_step_limit")
)  # said otherwise there, or not at all


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
        for name, value in {**settings, **config_to_dict(model)}.items()
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
    values, usual, idle = config_to_dict(model), config_to_dict(ModelConfig()), unused_settings(model)
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
