"""Megatron's hybrid networks, whose layers have one part each, as layers of attention and an MLP.

    --hybrid-layer-pattern *-*E        attention, MLP, attention, experts: four layers there, two here

Other letters (M: Mamba, G: gated delta rule, ...) stand for layers that are not built here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from megatron.core.dist_checkpointing.store import CheckpointError

_LAYER = re.compile(r"(?<=decoder\.layers\.)(\d+)(?=\.)")
Held = TypeVar("Held")


def pairs_of(arguments: Mapping[str, Any]) -> str:
    """A letter for each layer of the network here: - with an MLP, E with experts. Empty when it is no hybrid.

    Raises `CheckpointError` for layers that are not built here.
    """
    given = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    if not given:
        return ""
    pattern = str(given).replace("|", "")
    if not re.fullmatch(r"(\*[-E])+", pattern):
        raise CheckpointError(
            f"the checkpoint is of a hybrid network with the layers {given}; built here are pairs of attention (*) and "
            "an MLP (-) or experts (E)"
        )
    return pattern[1::2]


def hybrid_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the layers of a hybrid say of the network here."""
    pairs = pairs_of(arguments)
    settings: dict[str, Any] = {"num_layers": len(pairs)} if pairs else {}
    return settings | ({"moe_layer_freq": str([int(one == "E") for one in pairs])} if "E" in pairs else {})


def in_pairs(entries: Mapping[str, Held], arguments: Mapping[str, Any]) -> dict[str, Held]:
    """Entries by names (ours) in which every two layers of a hybrid are one."""
    if not pairs_of(arguments):
        return dict(entries)
    return {_LAYER.sub(lambda match: str(int(match[1]) // 2), name): held for name, held in entries.items()}
