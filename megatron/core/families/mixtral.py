"""Mixtral: built like Mistral, with experts for an MLP; and the rows that all networks with experts share.

Each token uses some experts, weighed by the softmax of their scores. Files hold the experts one by one, with gate, up and
down called w1, w3 and w2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.llama import (
    attention_mappings,
    common_config_keys,
    decoder_mappings,
    read_common_keys,
    read_sliding_window,
    sliding_window_key,
)
from megatron.core.families.rules import Family, ParameterMapping, concat, module_mappings, per_expert, same
from megatron.core.families.settings import BALANCE, ConfigReader

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
    """A router and its experts, expert by expert. parts: what gate, up and down are called."""
    moe, (gate, up, down) = model.moe, parts
    width, each = moe.expert_width, [f"{theirs}experts.{expert}." for expert in range(moe.experts)]
    gated, downs = [f"{expert}{part}" for expert in each for part in (gate, up)], [f"{expert}{down}" for expert in each]
    return [
        *module_mappings(f"{ours}router", f"{theirs}gate"),
        *module_mappings(f"{ours}experts.linear_fc1", *gated, op=per_expert(concat(width, width), 2)),
        *module_mappings(f"{ours}experts.linear_fc2", *downs, op=per_expert(same, 1)),
    ]


def read_config(keys: ConfigReader) -> dict[str, Any]:
    """Settings of a config.json."""
    settings = read_common_keys(keys, base=1e6)
    return {
        **settings,
        **read_sliding_window(keys, settings),
        "num_experts": keys.positive_int("num_local_experts", 8),
        "moe_ffn_hidden_size": settings["ffn_hidden_size"],
        "moe_router_topk": keys.positive_int("num_experts_per_tok", 2),
    }


def write_config(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a network of ours."""
    plain = model.kv_channels * model.num_attention_heads == model.hidden_size
    return {
        **common_config_keys(model, like),
        **sliding_window_key(model, like),
        "head_dim": like.get("head_dim") if plain else model.kv_channels,
        "num_local_experts": model.moe.num_experts,
        "intermediate_size": model.moe.moe_ffn_hidden_size,
        "num_experts_per_tok": model.moe.moe_router_topk,
    }


def parameter_mappings(model: ModelConfig) -> tuple[ParameterMapping, ...]:
    """All parameters."""
    return decoder_mappings(model, attention_mappings, {"moe": _expert_mappings})


def _expert_mappings(model: ModelConfig, ours: str, theirs: str) -> list[ParameterMapping]:
    return expert_mappings(model, ours, theirs.replace("mlp.", "block_sparse_moe."), ("w1", "w3", "w2"))


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    "mixtral",
    read_config,
    write_config,
    parameter_mappings,
    silent=BALANCE,
    renamed=((".mlp.gate.weight", ".block_sparse_moe.gate.weight"),),
    fused=_FUSED,
)
