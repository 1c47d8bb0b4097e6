"""OLMo 2: built like Llama, with norms behind each sublayer instead of before it, and norms over the queries and keys of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.plan import layer_rows
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.llama import COPIES, SKIPPED, attention_rows, common_in, common_out, mlp_rows
from megatron.core.families.rules import Family, Row, same
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
    rows = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), same)]
    for plan in layer_rows(model):
        ours, theirs = f"decoder.layers.{plan.index}.", f"model.layers.{plan.index}."
        rows += attention_rows(model, f"{ours}self_attention.", f"{theirs}self_attn.")
        rows += mlp_rows(model, f"{ours}mlp.", f"{theirs}mlp.")
        rows += [Row(f"{ours}{name}.weight", (f"{theirs}{there}.weight",), same) for name, there in _NORMS.items()]
    rows.append(Row("decoder.final_layernorm.weight", ("model.norm.weight",), same))
    return (*rows, *(() if model.ties_embeddings else (Row("output_layer.weight", ("lm_head.weight",), same),)))


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
