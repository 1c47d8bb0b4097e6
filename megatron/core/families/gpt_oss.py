"""gpt-oss: experts with biases and a clamped gate, attention sinks, and a window in every other layer.

Files hold all experts of a layer in one tensor, transposed, with the columns of gate and up taking turns: [gate 0, up 0, gate
1, up 1, ...]. They were published in 4 bits (`dequantize.py`); what is written here is in the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import BALANCE, sliding_window_to_settings, window_and_layers_of_model
from megatron.core.families.llama import attention_mappings, decoder_mappings, read_llama_keys, write_llama_keys
from megatron.core.families.parameter_mapping import (
    BIASED,
    Family,
    ParameterMapping,
    ReversibleTensorConversion,
    module_mappings,
    same,
)
from megatron.core.families.qwen import read_windowed_layers


def _deinterleave_gate_up(rows: Tensor) -> Tensor:
    """Reorder rows [e, (gate, up, gate, up, ...), ...] to [e, (gate, gate, ..., up, up, ...), ...]."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def _interleave_gate_up(rows: Tensor) -> Tensor:
    """Undo `_deinterleave_gate_up`."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


_DOWN = ReversibleTensorConversion(lambda parts: parts[0].transpose(1, 2), lambda whole: (whole.transpose(1, 2),))
_GATED = ReversibleTensorConversion(
    lambda parts: _deinterleave_gate_up(parts[0].transpose(1, 2)),
    lambda whole: (_interleave_gate_up(whole).transpose(1, 2),),
)
_GATED_BIAS = ReversibleTensorConversion(
    lambda parts: _deinterleave_gate_up(parts[0]), lambda whole: (_interleave_gate_up(whole),)
)


# What the class rotates by where the file says nothing.
_USUAL_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss_config(keys: ForeignMapping) -> dict[str, Any]:
    """Read our settings from the keys of a config.json; what cannot be expressed is noted in `keys.problems`."""
    keys.one_of("swiglu_alpha", (1.702,), 1.702)
    if not keys.mapping.get("rope_scaling") and keys.mapping.get("rope_parameters") is None:
        keys.pop_or_none("rope_parameters")
        keys.set_key_defaults(rope_parameters=_USUAL_ROPE)
    settings, used = read_llama_keys(keys, base=150000.0), keys.positive_int("num_experts_per_tok", 4)
    keys.one_of("experts_per_token", (used,), used)  # the same by another name
    layers = settings["num_layers"]
    kinds = keys.pop_or_none("layer_types") or [
        ("sliding_attention", "full_attention")[place % 2] for place in range(layers)
    ]
    window = keys.positive_int("sliding_window", 128)
    return {
        **settings,
        "swiglu": False,
        "quick_geglu": True,
        "activation_func_clamp_value": keys.non_negative_float("swiglu_limit", 7.0, positive=True),
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        **sliding_window_to_settings(window, read_windowed_layers(keys, kinds, layers)),
        "num_experts": keys.positive_int("num_local_experts"),
        "moe_ffn_hidden_size": settings["ffn_hidden_size"],
        "moe_router_topk": used,
    }


def write_gpt_oss_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a network. like: an earlier config.json of it, whose spellings are kept."""
    window, layers = window_and_layers_of_model(model)
    config = {
        **write_llama_keys(model, like),
        "head_dim": model.kv_channels,
        "swiglu_limit": model.activation_func_clamp_value,
        "sliding_window": window or like.get("sliding_window", 128),
        "layer_types": [("full_attention", "sliding_attention")[seen] for seen in layers],
        "num_local_experts": model.moe.num_experts,
        "intermediate_size": model.moe.moe_ffn_hidden_size,
        "num_experts_per_tok": model.moe.moe_router_topk,
    }
    if (
        not config.get("rope_parameters") and not config["rope_scaling"]
    ):  # which the class would take for its own scaling
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        del config["rope_scaling"]
    alike = {"swiglu_alpha": 1.702, "experts_per_token": model.moe.moe_router_topk}
    return {**config, **{name: value for name, value in alike.items() if name in like}}


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters between our names and those of transformers, in its order."""
    return decoder_mappings(model, _attention_mappings, {"moe": _expert_mappings})


def _attention_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    return [
        *attention_mappings(model, ours, theirs),
        ParameterMapping(f"{ours}softmax_offset", (f"{theirs}sinks",), same),
    ]


def _expert_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    return [
        *module_mappings(f"{ours}router", f"{theirs}router", kinds=BIASED),
        ParameterMapping(f"{ours}experts.linear_fc1.weight", (f"{theirs}experts.gate_up_proj",), _GATED),
        ParameterMapping(f"{ours}experts.linear_fc1.bias", (f"{theirs}experts.gate_up_proj_bias",), _GATED_BIAS),
        ParameterMapping(f"{ours}experts.linear_fc2.weight", (f"{theirs}experts.down_proj",), _DOWN),
        ParameterMapping(f"{ours}experts.linear_fc2.bias", (f"{theirs}experts.down_proj_bias",), same),
    ]


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    "gpt_oss",
    read_gpt_oss_config,
    write_gpt_oss_config,
    parameter_mappings,
    silent=(*BALANCE, "initial_context_length"),
    pinned=(("attention_bias", True),),
    usual=(("max_position_embeddings", 131072), ("head_dim", 64), ("num_key_value_heads", 8), ("rms_norm_eps", 1e-5)),
)
