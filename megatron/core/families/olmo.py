"""OLMo 2: built like Llama, with norms behind each sublayer instead of before it, and norms over the queries and keys of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.llama import COPIES, SKIPPED, attention_rows, common_in, common_out, decoder_rows, mlp_rows
from megatron.core.families.rules import Family, Row
from megatron.core.families.settings import Keys, passed_through

_NORMS = {"post_attention_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"}


def _config_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys({"rms_norm_eps": 1e-5, **config})
    keys.one_of("attention_bias", (False,), False)
    settings = common_in(keys)
    return {
        **settings,
        "norm_after_sublayer": True,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
    }, keys.finish()


def _config_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**passed_through(like), **common_out(model, like), "attention_bias": False}


def _parameter_rows(model: ModelConfig) -> tuple[Row, ...]:
    """All parameters, in the order in which transformers has them."""
    return tuple(decoder_rows(model, attention_rows, {"dense": mlp_rows}, _NORMS))


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "olmo2",
    _config_in,
    _config_out,
    _parameter_rows,
    base="model.",
    skipped=SKIPPED,
    copies=COPIES,
)
