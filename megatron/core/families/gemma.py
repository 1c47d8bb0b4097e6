"""Gemma: built like Llama, with embeddings scaled by sqrt(hidden size), norms that store their weight minus one, tanh-GELU gates.

Gemma 2 has a norm behind each sublayer too, soft caps on scores and logits, and windows in every other layer. Scores are
scaled by a number of its own, which the largest of them takes from the width instead of the heads. Gemma 3 (its language
model) has norms of queries and keys in the place of the caps, windows in five of six layers, and another rotary base there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import (
    TANH_GELU,
    preserved_keys,
    sliding_window_to_settings,
    window_and_layers_of_model,
)
from megatron.core.families.llama import NO_BIAS, parameter_mappings, read_llama_keys, write_llama_keys
from megatron.core.families.parameter_mapping import Family
from megatron.core.families.qwen import read_windowed_layers

_ACTIVATIONS = ("hidden_act", "hidden_activation")
_SAYS_NOTHING = ("cache_implementation", "sliding_window_size")  # the second is always the same as sliding_window
_OFF = "use_bidirectional_attention"  # null or false, or the network is refused
_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def _read_gemma_keys(keys: ForeignMapping, *, base: float = 10000.0) -> dict[str, Any]:
    """The settings that all of them have. base: default of rope_theta."""
    keys.one_of("hidden_act", ("gelu", *TANH_GELU), TANH_GELU[1])  # Gemma 1 has the tanh formula by the older word too
    keys.one_of("hidden_activation", TANH_GELU, TANH_GELU[1])
    return {
        **read_llama_keys(keys, tied=True, base=base),
        "swiglu": False,
        "geglu": True,
        "openai_gelu": True,
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    }


def _write_gemma_keys(model: ModelConfig, like: Mapping[str, Any], activation: str) -> dict[str, Any]:
    """Return the keys of config.json that Gemma 1 and 2 share. activation: name of its key, if `like` has none."""
    named = {name: like[name] for name in _ACTIVATIONS if name in like} or {activation: TANH_GELU[1]}
    shared = {name: value for name, value in write_llama_keys(model, like).items() if name not in _ACTIVATIONS}
    return {**preserved_keys(like, *_SAYS_NOTHING, _OFF), **shared, **named, "head_dim": model.kv_channels}


def _write_gemma_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return _write_gemma_keys(model, like, "hidden_act")


def _read_gemma2_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = _read_windowed_gemma_keys(keys, _read_gemma_keys(keys), final_cap=30.0, full_every=2)
    return {**settings, "attention_logit_softcap": _read_soft_cap(keys, "attn_logit_softcapping", 50.0)}


def _read_gemma3_config(keys: ForeignMapping) -> dict[str, Any]:
    local = _pop_local_rotary_base(keys)
    settings = _read_gemma_keys(keys, base=1000000.0)
    every = keys.positive_int("sliding_window_pattern", keys.positive_int("_sliding_window_pattern", 6))
    settings = _read_windowed_gemma_keys(keys, settings, final_cap=None, full_every=every)
    keys.one_of("attn_logit_softcapping", (None,), None)  # transformers' class has it, and caps nothing
    has_windows = "window_size" in settings
    return {**settings, "qk_layernorm": True, **({"rotary_base_local": local} if has_windows else {})}


def _pop_local_rotary_base(keys: ForeignMapping) -> float:
    """Take the rotary base of layers with a window, and leave `rope_parameters` of the others as those of one kind.

    transformers writes `rope_parameters` by kind of layer; the published files have `rope_local_base_freq`.
    """
    usual, by_kind = (
        keys.non_negative_float("rope_local_base_freq", 10000.0, positive=True),
        keys.pop_or_none("rope_parameters"),
    )
    if by_kind is None:
        return usual
    if not isinstance(by_kind, Mapping):
        keys.problems.append(f"rope_parameters: {short_value(by_kind)} does not say them by kind of layer")
        return usual
    keys.set_key_defaults(rope_parameters=by_kind.get("full_attention"))
    local = by_kind.get("sliding_attention")
    inner = ForeignMapping(
        local if isinstance(local, Mapping) else {} if local is None else {"sliding_attention": local}
    )
    inner.one_of("rope_type", ("default",), "default")
    base = inner.non_negative_float("rope_theta", usual, positive=True)
    others = sorted(set(by_kind) - {"sliding_attention", "full_attention"})
    keys.problems += [f"rope_parameters of sliding_attention: {problem}" for problem in inner.all_problems()]
    keys.problems += [f"rope_parameters: {name} is no kind of layer here" for name in others]
    return base


def _read_windowed_gemma_keys(
    keys: ForeignMapping, settings: Mapping[str, Any], *, final_cap: float | None, full_every: int
) -> dict[str, Any]:
    """Add to settings what Gemma 2 and 3 share. final_cap: usual soft cap of logits; full_every: every n-th layer has no
    window, if `layer_types` does not say which.
    """
    layers, window = settings["num_layers"], keys.positive_int("sliding_window", 4096)
    kinds = keys.pop_or_none("layer_types")
    seen = [(layer + 1) % full_every != 0 for layer in range(layers)]
    scalar = keys.non_negative_float("query_pre_attn_scalar", 256.0, positive=True)
    return {
        **settings,
        **sliding_window_to_settings(window, seen if kinds is None else read_windowed_layers(keys, kinds, layers)),
        "final_logit_softcap": _read_soft_cap(keys, "final_logit_softcapping", final_cap),
        "sandwich_norm": True,
        "softmax_scale": None if scalar == settings["kv_channels"] else scalar**-0.5,
    }


def _read_soft_cap(keys: ForeignMapping, name: str, usual: float | None) -> float | None:
    """Read a soft cap: None if the key is null, `usual` if it is missing."""
    if keys.mapping.get(name, usual) is None:
        return None
    return keys.non_negative_float(name, usual, positive=True)


def _write_gemma2_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return _write_windowed_gemma_keys(model, like, full_every=2)


def _write_gemma3_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    every = like.get("sliding_window_pattern", like.get("_sliding_window_pattern", 6))
    config = {
        **preserved_keys(like, "sliding_window_pattern", "_sliding_window_pattern"),
        **_write_windowed_gemma_keys(model, like, full_every=every),
    }
    local = model.rope.rotary_base_local or like.get("rope_local_base_freq", 10000.0)
    if (both := config.get("rope_parameters")) is None:
        return {**config, "rope_local_base_freq": local}
    config |= preserved_keys(like, "rope_local_base_freq", "rope_theta")
    return {
        **config,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": local}, "full_attention": both},
    }


def _write_windowed_gemma_keys(model: ModelConfig, like: Mapping[str, Any], *, full_every: int) -> dict[str, Any]:
    window, layers = window_and_layers_of_model(model)
    scalar = model.kv_channels if model.softmax_scale is None else round(model.softmax_scale**-2)
    usual = [(layer + 1) % full_every != 0 for layer in range(model.num_layers)]
    named = {"layer_types": [("full_attention", "sliding_attention")[seen] for seen in layers]}
    return {
        **_write_gemma_keys(model, like, "hidden_activation"),
        "sliding_window": window or like.get("sliding_window", 4096),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": model.attention_logit_softcap,
        "final_logit_softcapping": model.final_logit_softcap,
        **(named if "layer_types" in like or layers != usual else {}),
    }


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    "gemma",
    _read_gemma_keys,
    _write_gemma_config,
    parameter_mappings,
    pinned=NO_BIAS,
    usual=(("max_position_embeddings", 8192), ("head_dim", 256), ("num_key_value_heads", 16)),
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    "gemma2",
    _read_gemma2_config,
    _write_gemma2_config,
    partial(parameter_mappings, norms=_NORMS),
    silent=_SAYS_NOTHING,
    pinned=NO_BIAS,
    usual=(("max_position_embeddings", 8192), ("head_dim", 256), ("num_key_value_heads", 4)),
)
GEMMA3 = Family(
    "gemma3",
    "Gemma3ForCausalLM",
    "gemma3_text",
    _read_gemma3_config,
    _write_gemma3_config,
    partial(parameter_mappings, norms=_NORMS),
    silent=_SAYS_NOTHING,
    pinned=NO_BIAS,
    usual=(("max_position_embeddings", 131072), ("head_dim", 256), ("num_key_value_heads", 4)),
)
