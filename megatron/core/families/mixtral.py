"""Mixtral: built like Mistral, with experts for an MLP; and the rows that all networks with experts share.

Each token uses some experts, weighed by the softmax of their scores. Files hold the experts one by one, with gate, up and
down called w1, w3 and w2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.config_json import BALANCE, PlainKeys, read_plain_keys, write_plain_keys
from megatron.core.families.llama import (
    attention_mappings,
    decoder_mappings,
    read_llama_keys,
    read_sliding_window_settings,
    write_llama_keys,
    write_sliding_window_key,
)
from megatron.core.families.parameter_mapping import (
    Family,
    ParameterMapping,
    concat_conversion,
    module_mappings,
    per_expert_conversion,
    same,
)

_FUSED = (
    (
        r"(model\.layers\.\d+\.)mlp\.experts\.gate_up_proj",
        (r"\1block_sparse_moe.experts.{e}.w1.weight", r"\1block_sparse_moe.experts.{e}.w3.weight"),
    ),
    (r"(model\.layers\.\d+\.)mlp\.experts\.down_proj", (r"\1block_sparse_moe.experts.{e}.w2.weight",)),
)


def expert_mappings(
    model: ModelConfig, ours: str, theirs: str, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[ParameterMapping]:
    """Return the mappings of a router and its experts, expert by expert. parts: their names for gate, up and down."""
    moe, (gate, up, down) = model.moe, parts
    width, each = moe.expert_width, [f"{theirs}experts.{expert}." for expert in range(moe.num_experts_or_zero)]
    gated, downs = [f"{expert}{part}" for expert in each for part in (gate, up)], [f"{expert}{down}" for expert in each]
    return [
        *module_mappings(f"{ours}router", f"{theirs}gate"),
        *module_mappings(
            f"{ours}experts.linear_fc1", *gated, op=per_expert_conversion(concat_conversion(width, width), 2)
        ),
        *module_mappings(f"{ours}experts.linear_fc2", *downs, op=per_expert_conversion(same, 1)),
    ]


_KEYS: PlainKeys = {"num_local_experts": ("num_experts", 8), "num_experts_per_tok": ("moe_router_topk", 2)}


def _read_mixtral_config(keys: ForeignMapping) -> dict[str, Any]:
    settings = read_llama_keys(keys, base=1e6)
    return {
        **settings,
        **read_sliding_window_settings(keys, settings),
        "moe_ffn_hidden_size": settings["ffn_hidden_size"],
        **read_plain_keys(keys, _KEYS),
    }


def _write_mixtral_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    plain = model.kv_channels * model.num_attention_heads == model.hidden_size
    return {
        **write_llama_keys(model, like),
        **write_sliding_window_key(model, like),
        "head_dim": like.get("head_dim") if plain else model.kv_channels,
        **write_plain_keys(model, _KEYS),
        "intermediate_size": model.moe.moe_ffn_hidden_size,
    }


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """Return the mappings of all parameters between our names and those of transformers, in its order."""
    return decoder_mappings(model, attention_mappings, {"moe": _expert_mappings})


def _expert_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    return expert_mappings(model, ours, theirs.replace("mlp.", "block_sparse_moe."), ("w1", "w3", "w2"))


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    "mixtral",
    _read_mixtral_config,
    _write_mixtral_config,
    parameter_mappings,
    silent=BALANCE,
    usual=(("max_position_embeddings", 131072), ("rms_norm_eps", 1e-5), ("num_key_value_heads", 8)),
    respelled=((r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight"),),
    fused=_FUSED,
)
