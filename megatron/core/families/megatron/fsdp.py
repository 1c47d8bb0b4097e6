"""Megatron FSDP's format (`--ckpt-format fsdp_dtensor`), told in the names of the distributed format.

    .metadata, __R_N.distcp                                torch.distributed.checkpoint of one nested state, its names joined with dots
    model.module.<parameter>                               weights, layer by layer and expert by expert
    optimizer.state.module.<parameter>.exp_avg             Adam's moments
    optimizer.param_to_group_meta.module.<parameter>.step  how many updates it has made (or `step` beside the moments)
    args, iteration, ...                                   what is no tensor

There is no metadata.json. How often `module.` stands before a parameter depends on what wraps the network. The halves of a
gated matrix are apart, `<parameter>_w` and `<parameter>_v`: its rows are cut over ranks, and each rank has rows of both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.families.megatron.experts import split_expert_name
from megatron.core.families.megatron.stored import StoredChunk, TorchDistIndexEntry
from megatron.core.parallel.boxes import Box

_WEIGHT = re.compile(r"^model\.(?:module\.)*(.+)$")
_MOMENT = re.compile(r"^optimizer\.state\.(?:module\.)*(.+)\.(exp_avg|exp_avg_sq|fp32_param|param)$")
STEP = re.compile(r"^optimizer\.(state|param_to_group_meta)\..+\.step$")
COMMON = ("args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far")
_HALF = re.compile(r"^(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])$")


def is_megatron_fsdp(names: Collection[str]) -> bool:
    """Whether the names of an index are those of Megatron FSDP's format."""
    return "args" in names and any(name.startswith("model.module.") for name in names)


def rename_to_torch_dist(tensors: Mapping[str, TorchDistIndexEntry]) -> dict[str, TorchDistIndexEntry]:
    """Return the entries under the names of torch_dist: weights by their own, moments as
    `optimizer.state.<slot>.<parameter>`.
    """
    renamed: dict[str, TorchDistIndexEntry] = {}
    for key, stored in tensors.items():
        moment, weight = _MOMENT.match(key), _WEIGHT.match(key)
        if moment:
            renamed[f"optimizer.state.{moment[2]}.{moment[1]}"] = stored
        elif weight:
            renamed[weight[1]] = stored
    return _stack_expert_entries(_join_gated_half_entries(renamed))


def _join_gated_half_entries(entries: Mapping[str, TorchDistIndexEntry]) -> dict[str, TorchDistIndexEntry]:
    """Join the halves (_w, _v) of each gated matrix along dimension 0."""
    joined = {}
    for key, stored in entries.items():
        half = _HALF.match(key)
        if not half:
            joined[key] = stored
        elif half[2] == "w" and f"{half[1]}_v" in entries:
            below = entries[f"{half[1]}_v"]
            rows, shift = stored.shape[0], (stored.shape[0], *(0,) * (len(stored.shape) - 1))
            chunks = (*stored.chunks, *(replace(chunk, box=chunk.box.shifted(shift)) for chunk in below.chunks))
            joined[half[1]] = TorchDistIndexEntry(
                half[1], (rows + below.shape[0], *stored.shape[1:]), stored.dtype, chunks
            )
    return joined


def _stack_expert_entries(entries: Mapping[str, TorchDistIndexEntry]) -> dict[str, TorchDistIndexEntry]:
    """Stack single experts to one entry with a leading axis."""
    tensors, stacks = {}, dict[str, dict[int, TorchDistIndexEntry]]()
    for key, stored in entries.items():
        if one := split_expert_name(key):
            stacks.setdefault(one[0], {})[one[1]] = stored
        else:
            tensors[key] = stored
    for key, experts in stacks.items():
        first = next(iter(experts.values()))
        chunks = tuple(
            _shift_chunk_to_expert(chunk, expert) for expert, stored in experts.items() for chunk in stored.chunks
        )
        tensors[key] = TorchDistIndexEntry(key, (len(experts), *first.shape), first.dtype, chunks)
    return tensors


def _shift_chunk_to_expert(chunk: Any, expert: int) -> StoredChunk:
    return replace(chunk, box=Box((expert, *chunk.box.offset), (1, *chunk.box.shape)))
