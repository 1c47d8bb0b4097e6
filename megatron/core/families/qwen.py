"""Qwen: built like Llama, with a bias on queries, keys and values (2, 2.5) or a norm of every query and key head (3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.model import ModelConfig
from megatron.core.families.llama import COPIES, SKIPPED, common_in, common_out, rows
from megatron.core.families.rules import Family
from megatron.core.families.settings import Keys, kept

_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")  # say nothing while no window is in use


def _windows(keys: Keys) -> None:
    used = keys.switch("use_sliding_window", False)
    kinds = keys.pop("layer_types") or []
    window, first = keys.pop("sliding_window"), keys.pop("max_window_layers")
    if used:
        keys.problems.append(f"use_sliding_window: True (sliding_window {window}, max_window_layers {first}); windows are not "
                             "built here")
    elif any(kind != "full_attention" for kind in kinds):
        others = sorted({str(kind) for kind in kinds} - {"full_attention"})
        keys.problems.append(f"layer_types: {', '.join(others)} is not built here; full_attention is")


def _qwen2_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    _windows(keys)
    return {**common_in(keys), "add_qkv_bias": True}, keys.finish()


def _qwen2_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    found = {**kept(like, *_WINDOWS), **common_out(model, like), "use_sliding_window": False}
    plain = model.kv_channels * model.num_attention_heads == model.hidden_size
    return found if plain and "head_dim" not in like else {**found, "head_dim": model.kv_channels}


def _qwen3_in(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys = Keys(config)
    _windows(keys)
    keys.one_of("attention_bias", (False,), False)
    return {**common_in(keys), "qk_layernorm": True}, keys.finish()


def _qwen3_out(model: ModelConfig, like: Mapping[str, Any]) -> dict[str, Any]:
    return {**kept(like, *_WINDOWS), **common_out(model, like), "head_dim": model.kv_channels, "attention_bias": False,
            "use_sliding_window": False}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", "qwen2", _qwen2_in, _qwen2_out, rows, base="model.", skipped=SKIPPED,
               copies=COPIES)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", "qwen3", _qwen3_in, _qwen3_out, rows, base="model.", skipped=SKIPPED,
               copies=COPIES)
