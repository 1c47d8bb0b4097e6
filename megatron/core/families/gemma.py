"""Gemma: built like Llama, with embeddings scaled by sqrt(hidden size), norms that store their weight minus one, tanh-GELU gates.

Gemma 2 has a norm behind each sublayer too, soft caps on scores and logits, and windows in every other layer. Scores are
scaled by a number of its own, which the largest of them takes from the width instead of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.llama import (
    COPIES,
    SKIPPED,
    attention_rows,
    common_in,
    common_out,
    decoder_rows,
    mlp_rows,
    rows,
)
from megatron.core.families.qwen import layer_kinds
from megatron.core.families.rules import Family, Row
from megatron.core.families.settings import TANH_GELU, Keys, passed_through, windows_in, windows_out

_HEAD_SIZE = 256  # of a config.json that does not say
_ACTIVATIONS = ("hidden_act", "hidden_activation")
_SAYS_NOTHING = ("cache_implementation", "sliding_window_size")  # the second is always the same as sliding_window
_OFF = "use_bidirectional_attention"  # null or false, or the network is refused
_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def _shared_in(config: Mapping[str, Any]) -> tuple[Keys, dict[str, Any]]:
    """The keys that are left, and the settings that all of them have."""
    keys = Keys({"head_dim": _HEAD_SIZE, **{name: value for name, value in config.items() if name not in _ACTIVATIONS}})
    activations = Keys({name: config.get(name) for name in _ACTIVATIONS})
    for name in _ACTIVATIONS:  # "gelu" is the older word for the tanh formula here, and here alone
        activations.one_of(name, ("gelu", *TANH_GELU), TANH_GELU[1])
    keys.problems += activations.problems
    keys.one_of("attention_bias", (False,), False)
    return keys, {
        **common_in(keys, tied=True),
        "swiglu": False,
        "geglu": True,
        "openai_gelu": True,
        "apply_layernorm_1p": True,
        "scale_embeddings": True,
    }


def _shared_out(model: ModelConfig, like: Mapping[str, Any], activation: str) -> dict[str, Any]:
    named = {name: like[name] for name in _ACTIVATIONS if name in like} or {activation: TANH_GELU[1]}
    shared = {name: value for name, value in common_out(model, like).items() if name not in _ACTIVATIONS}
    return {
        **passed_through(like, *_SAYS_NOTHING, _OFF),
        **shared,
        **named,
        "head_dim": model.kv_channels,
        "attention_bias": False,
    }


def _gemma_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys, settings = _shared_in(config)
    return settings, keys.finish()


def _gemma_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return _shared_out(model, like, "hidden_act")


def _gemma2_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys, settings = _shared_in(config)
    layers, window = settings["num_layers"], keys.whole("sliding_window", 4096)
    for name in _SAYS_NOTHING:
        keys.pop(name)
    kinds = keys.pop("layer_types")
    seen = [layer % 2 == 0 for layer in range(layers)] if kinds is None else layer_kinds(keys, kinds, layers)
    scalar = keys.real("query_pre_attn_scalar", 256.0, positive=True)
    caps = {
        ours: _soft_cap(keys, config, theirs, usual)
        for ours, theirs, usual in (
            ("attention_logit_softcap", "attn_logit_softcapping", 50.0),
            ("final_logit_softcap", "final_logit_softcapping", 30.0),
        )
    }
    return {
        **settings,
        **windows_in(window, seen),
        **caps,
        "sandwich_norm": True,
        "softmax_scale": None if scalar == settings["kv_channels"] else scalar**-0.5,
    }, keys.finish()


def _soft_cap(keys: Keys, config: Mapping[str, Any], name: str, usual: float) -> float | None:
    """A soft cap; null is none, and left out is the usual one."""
    if name in config and config[name] is None:
        return None
    return keys.real(name, usual, positive=True)


def _gemma2_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    window, layers = windows_out(model)
    scalar = model.kv_channels if model.softmax_scale is None else round(model.softmax_scale**-2)
    usual = [layer % 2 == 0 for layer in range(model.num_layers)]
    named = {"layer_types": [("full_attention", "sliding_attention")[seen] for seen in layers]}
    return {
        **_shared_out(model, like, "hidden_activation"),
        "sliding_window": window or like.get("sliding_window", 4096),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": model.attention_logit_softcap,
        "final_logit_softcapping": model.final_logit_softcap,
        **(named if "layer_types" in like or layers != usual else {}),
    }


def _gemma2_rows(model: ModelConfig) -> tuple[Row, ...]:
    """All parameters, in the order in which transformers has them."""
    return tuple(decoder_rows(model, attention_rows, {"dense": mlp_rows}, _NORMS))


GEMMA = Family(
    "gemma", "GemmaForCausalLM", "gemma", _gemma_in, _gemma_out, rows, base="model.", skipped=SKIPPED, copies=COPIES
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    "gemma2",
    _gemma2_in,
    _gemma2_out,
    _gemma2_rows,
    base="model.",
    skipped=SKIPPED,
    copies=COPIES,
)
