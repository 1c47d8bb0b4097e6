"""Megatron's hybrid networks, whose layers have one part each, and its layers with a state.

    --hybrid-layer-pattern *-*E        attention, MLP, attention, experts: four layers there, two here, as of a GPT
    --hybrid-layer-pattern M-M*-       layers of one part here too
    --hybrid-layer-pattern M-M*-/*-    and one depth of multi-token prediction, of two layers

Distributed checkpoints cut the fused matrices of layers with a state into pieces, each of which any number of tensor ranks divides:

    decoder.layers.I.mixer.in_proj.weight.z  .x .B .C .dt                                  Mamba-2
    decoder.layers.I.mixer.conv1d.weight.x  .B .C, and the same of conv1d.bias
    decoder.layers.I.self_attention.in_proj.weight.query  .key .value .z .beta .alpha      gated delta net
    decoder.layers.I.self_attention.conv1d.weight.query  .key .value

Layers of multi-token prediction are mtp.layers.DEPTH.mtp_model_layer.layers.I, where a GPT's one is mtp.layers.DEPTH.transformer_layer.
Files of tensor ranks hold the pieces of their rank end to end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.core.config.plan.pattern import layer_symbols
from megatron.core.config.settings.hybrid import HybridConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError

_LAYER = re.compile(r"(?<=decoder\.layers\.)(\d+)(?=\.)")
_PARTS = {  # beginnings of names -> the symbol of a layer that has them
    "mixer.": "M",
    "self_attention.in_proj.": "G",
    "self_attention.linear_qkv.": "*",
    "self_attention.linear_kv_down_proj.": "+",
    "mlp.router.": "E",
    "mlp.linear_fc1.": "-",
}
_PIECES = (
    (re.compile(r"\.mixer\.in_proj\.weight$"), ("z", "x", "B", "C", "dt")),
    (re.compile(r"\.mixer\.conv1d\.(weight|bias)$"), ("x", "B", "C")),
    (re.compile(r"\.self_attention\.in_proj\.weight$"), ("query", "key", "value", "z", "beta", "alpha")),
    (re.compile(r"\.self_attention\.conv1d\.weight$"), ("query", "key", "value")),
)
Held = TypeVar("Held")


class LazyTensorShard(Protocol):
    """A tensor rank's shard or a piece of a parameter: a tensor, or an object that reads one when it is asked for."""

    def to(self, device: str, /) -> Tensor:
        """Return the tensor (any shape) on a device. On "meta" nothing is read."""


@dataclass(frozen=True, slots=True)
class ConcatenatedTensor:
    """Pieces of a parameter, concatenated along dimension 0 when they are read."""

    pieces: Sequence[LazyTensorShard]

    def to(self, device: str) -> Tensor:
        """Return the whole tensor [rows, ...] on a device. On "meta" nothing is read."""
        return torch.cat([piece.to(device) for piece in self.pieces])


@dataclass(frozen=True, slots=True)
class MixerPieceSizes:
    """Number of rows of each piece of the fused parameters of Mamba-2 (mamba) and of the gated delta net (delta)."""

    mamba: Mapping[str, int]
    delta: Mapping[str, int]

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> MixerPieceSizes:
        """Return the sizes from the settings of a model."""
        known = {
            field.name: settings[field.name] for field in fields(HybridConfig) if settings.get(field.name) is not None
        }
        hybrid = HybridConfig(**known)
        heads = hybrid.mamba_num_heads or 2 * int(settings["hidden_size"]) // hybrid.mamba_head_dim
        inner, shared = heads * hybrid.mamba_head_dim, hybrid.mamba_num_groups * hybrid.mamba_state_dim
        keys, value_heads = hybrid.linear_num_key_heads * hybrid.linear_key_head_dim, hybrid.linear_num_value_heads
        values = value_heads * hybrid.linear_value_head_dim
        return MixerPieceSizes(
            {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads},
            {"query": keys, "key": keys, "value": values, "z": values, "beta": value_heads, "alpha": value_heads},
        )

    def piece_sizes(self, name: str) -> dict[str, int]:
        """Return piece -> number of rows of a parameter (our name); {} if it is not stored in pieces."""
        sizes = self.mamba if ".mixer." in name else self.delta
        return {piece: sizes[piece] for piece in mixer_piece_names(name)}


def mixer_piece_names(name: str) -> tuple[str, ...]:
    """Return the names of the pieces of a parameter, in order; () if it is not stored in pieces."""
    return next((pieces for pattern, pieces in _PIECES if pattern.search(name)), ())


def join_mixer_pieces(entries: Mapping[str, LazyTensorShard]) -> dict[str, LazyTensorShard]:
    """Return entries by our names with each parameter's pieces concatenated. `CheckpointError` if some are missing."""
    joined: dict[str, LazyTensorShard] = {}
    for name, held in entries.items():
        whole, _, piece = name.rpartition(".")
        pieces = mixer_piece_names(whole)
        if piece not in pieces:
            joined[name] = held
        elif missing := [f"{whole}.{one}" for one in pieces if f"{whole}.{one}" not in entries]:
            raise CheckpointError(f"the checkpoint has {name}, and lacks {', '.join(missing)}")
        elif whole not in joined:
            joined[whole] = ConcatenatedTensor([entries[f"{whole}.{one}"] for one in pieces])
    return joined


def hybrid_pattern_of_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the hybrid layer pattern of the arguments of a run, with / before the layers of each MTP depth; "" for no
    hybrid. Raises `CheckpointError` for layers that are not built here.
    """
    given = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern") or ""
    pattern, ahead = str(given).replace("|", ""), arguments.get("mtp_hybrid_override_pattern")
    if pattern and ahead and "/" not in pattern:  # releases before the symbol / state the layers of a depth once
        pattern += f"/{ahead}" * int(arguments.get("mtp_num_layers") or 1)
    if set(pattern) - {*layer_symbols(), "/"}:
        raise CheckpointError(
            f"the checkpoint is of a hybrid network with the layers {given}; read are {' '.join(layer_symbols())} and /"
        )
    return pattern


def mlp_symbols_of_layer_pairs(arguments: Mapping[str, Any]) -> str:
    """Return, for a hybrid of attention and MLP by turns, a symbol a pair: - for MLP, E for experts; else ""."""
    symbols = hybrid_pattern_of_arguments(arguments)
    return symbols[1::2] if re.fullmatch(r"(\*[-E])+", symbols) else ""


def hybrid_settings_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a hybrid's layers from the arguments of a run; None for settings that these replace."""
    pattern, pairs = hybrid_pattern_of_arguments(arguments), mlp_symbols_of_layer_pairs(arguments)
    settings: dict[str, Any] = dict.fromkeys(("hybrid_attention_ratio", "hybrid_mlp_ratio")) if pattern else {}
    if pairs:
        settings |= {"num_layers": len(pairs), "hybrid_layer_pattern": None}
        return settings | ({"moe_layer_freq": str([int(one == "E") for one in pairs])} if "E" in pairs else {})
    if pattern:
        symbols, *depths = pattern.split("/")
        settings |= {"num_layers": len(symbols), "hybrid_layer_pattern": pattern, "moe_layer_freq": None}
        settings |= {"mtp_num_layers": len(depths)} if depths else {}
    return settings


def infer_hybrid_settings(names: Iterable[str], settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the hybrid settings that parameter names (ours) imply, and how they contradict the given settings."""
    pattern, stated = infer_layer_pattern(names), str(settings.get("hybrid_layer_pattern") or "").replace("|", "")
    stored = "/".join(stated.split("/")[:2]) if settings.get("mtp_use_repeated_layer") else stated
    if stored == pattern or not (stated or "M" in pattern):
        return {}, []
    if stated:
        there = pattern or "layers of two parts"
        return {}, [f"hybrid_layer_pattern: {stated} in the settings, {there} in the tensors"]
    return {"hybrid_layer_pattern": pattern, "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0}, []


def merge_layer_pairs(entries: Mapping[str, Held], arguments: Mapping[str, Any]) -> dict[str, Held]:
    """Return entries by our names with every two layers of a hybrid of pairs counted as one."""
    if not mlp_symbols_of_layer_pairs(arguments):
        return dict(entries)
    return {_LAYER.sub(lambda match: str(int(match[1]) // 2), name): held for name, held in entries.items()}


def infer_layer_pattern(names: Iterable[str]) -> str:
    """Return the hybrid pattern of a network with these parameters (our names); "" if layers have more than one part."""
    names = list(names)
    depths = {int(match[1]) for name in names if (match := re.match(r"mtp\.layers\.(\d+)\.", name))}
    ahead = [_infer_symbols(names, rf"mtp\.layers\.{depth}\.mtp_model_layer\.") for depth in sorted(depths)]
    symbols = _infer_symbols(names, r"decoder\.")
    return "/".join([symbols, *ahead]) if symbols else ""


def _infer_symbols(names: Iterable[str], stack: str) -> str:
    """Return the symbols of a stack's layers; "" if one has not exactly one part. stack: regex of its prefix."""
    layers: dict[int, set[str]] = {}
    for name in names:
        if match := re.match(rf"{stack}layers\.(\d+)\.(.*)", name):
            symbols = {symbol for part, symbol in _PARTS.items() if match[2].startswith(part)}
            layers.setdefault(int(match[1]), set()).update(symbols)
    if any(len(symbols) != 1 for symbols in layers.values()):
        return ""
    return "".join(symbol for index in sorted(layers) for symbol in layers[index])
