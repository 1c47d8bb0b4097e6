"""Which linear layers of a layer have an adapter, and of what rank.

    --lora-targets q_proj v_proj=16  ->  layers.0.self_attention.linear_qkv: part q of rank 8, part v of rank 16;  layers.1 ...

A fused matrix is made of parts (q, k, v; gate, up). An adapter belongs to one part, as in PEFT's files, or to all parts of the
matrix together, which then share A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron.core.config.mixers.mixer import LinearShape
from megatron.core.config.plan.layers import LayerPlan
from megatron.core.config.plan.linear_layers import EXPERTS, layer_module_path, linear_shapes_of_layer
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig

ALL_LINEAR = "all-linear"
WHOLE = "whole"  # what the pair of factors of a whole matrix is called among parameters
# (our matrix, its part) -> the projection as published networks call it.
PROJECTIONS: Mapping[tuple[str, str], str] = {
    ("linear_qkv", "q"): "q_proj",
    ("linear_qkv", "k"): "k_proj",
    ("linear_qkv", "v"): "v_proj",
    ("linear_q", ""): "q_proj",
    ("linear_kv", "k"): "k_proj",
    ("linear_kv", "v"): "v_proj",
    ("linear_proj", ""): "o_proj",
    ("linear_fc1", "gate"): "gate_proj",
    ("linear_fc1", "up"): "up_proj",
    ("linear_fc1", ""): "up_proj",
    ("linear_fc2", ""): "down_proj",
    ("linear_q_proj", ""): "q_proj",
    ("linear_q_down_proj", ""): "q_a_proj",
    ("linear_q_up_proj", ""): "q_b_proj",
    ("linear_kv_down_proj", ""): "kv_a_proj_with_mqa",
    ("linear_kv_up_proj", ""): "kv_b_proj",
}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """One adapter of a layer. linear: path of the linear layer. part: name of the fused part; "": the whole matrix.

    scale: factor of B A.
    """

    linear: str
    part: str
    rank: int
    scale: float


def layer_adapter_plans(model: ModelConfig, plan: LayerPlan) -> tuple[AdapterPlan, ...]:
    """Return the adapters of a layer, none without --lora-rank; of targets that name the same one, the last counts."""
    config, result = model.adapter, []
    if config.lora_rank is None:
        return ()
    for linear, shape in linear_shapes_of_layer(model, plan).items():
        chosen: dict[str, str] = {}
        for target in config.lora_targets:
            chosen |= dict.fromkeys(
                linear_parts_matching_target(target, f"{layer_module_path(model, plan)}.{linear}", shape), target
            )
        for part in ("", *(name for name, _ in shape.parts if name)):
            rank, alpha = rank_and_alpha_of_lora_target(config, chosen[part]) if part in chosen else (0, 0.0)
            if rank > 0:
                scale = alpha / (math.sqrt(rank) if config.lora_rslora else rank)
                result.append(AdapterPlan(linear, part, rank, scale))
    return tuple(result)


def rank_and_alpha_of_lora_target(config: AdapterConfig, target: str) -> tuple[int, float]:
    """Return rank and alpha of NAME, NAME=RANK or NAME=RANK:ALPHA; (0, 0.0) for others, which a rule reports."""
    result = re.fullmatch(r"[^=]+(?:=(\d+)(?::(\d*\.?\d+(?:[eE][-+]?\d+)?))?)?", target)
    if result is None:
        return 0, 0.0
    default = config.lora_rank or 0
    alpha = float(default) if config.lora_alpha is None else config.lora_alpha
    return int(result[1] or default), float(result[2] or alpha)


def linear_parts_matching_target(target: str, linear: str, shape: LinearShape) -> tuple[str, ...]:
    """Return which parts of a linear layer (global name) a target names: "" for all of it, else fused parts.

    A target that names both means the parts; for experts, whose matrices are fused in published networks, the whole.
    """
    name, matrix = target.partition("=")[0], linear.rpartition(".")[2]
    parts = [""] if len(shape.parts) == 1 else ["", *(part for part, _ in shape.parts)]
    result = [
        part
        for part in parts
        if _matches_target(name, f"{linear}.{part}" if part else linear, PROJECTIONS.get((matrix, part)))
    ]
    if "" in result and len(result) > 1:
        result = [""] if EXPERTS in linear else result[1:]
    return tuple(result)


def _matches_target(name: str, full: str, projection: str | None) -> bool:
    """Whether a target's name is "all-linear", the projection, the full name, or a pattern of it or of its ending."""
    return name in (ALL_LINEAR, projection, full) or fnmatchcase(full, name) or fnmatchcase(full, f"*.{name}")


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter, by its global name, belongs to an adapter."""
    return ".adapter." in name


def is_trained_parameter(name: str, config: AdapterConfig) -> bool:
    """Whether a parameter is trained, by name: with adapters those and --lora-modules-to-save; none of --freeze."""
    frozen = (
        config.has_adapters
        and not is_adapter_parameter(name)
        and not _matches_any_pattern(name, config.lora_modules_to_save)
    )
    return not frozen and not _matches_any_pattern(name, config.freeze)


def _matches_any_pattern(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def layers_matching_target(
    model: ModelConfig, rows: Iterable[LayerPlan], target: str
) -> list[tuple[str, str, LinearShape]]:
    """Return (path of linear layer, part, its shape) of everything that a target names in the layers `rows`."""
    return [
        (linear, part, shape)
        for plan in rows
        for linear, shape in linear_shapes_of_layer(model, plan).items()
        for part in linear_parts_matching_target(target, f"{layer_module_path(model, plan)}.{linear}", shape)
    ]
