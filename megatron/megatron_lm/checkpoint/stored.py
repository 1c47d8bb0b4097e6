"""Tensors of Megatron's distributed format: which file holds which of their boxes, and reading these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import read_torch_bytes
from megatron.core.parallel.boxes import Box, intersect, whole_box


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a stored tensor, and the file and byte range that hold it."""

    box: Box
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A box of a tensor that is stored as consecutive elements of another tensor.

    stored, offset: that tensor, and where in it the elements begin; shape: of all these elements, of which the box is
    the part at `inside` of shape `part`. transposed: the last two axes of the part are exchanged in the box.
    """

    box: Box
    stored: TorchDistIndexEntry
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    inside: tuple[int, ...]
    part: tuple[int, ...] | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class TorchDistIndexEntry:
    """A tensor in the index of a torch_dist checkpoint. layer: only this slice of axis 0, if layers are stacked."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk | FlatBox, ...]
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor and the folder that it is read from."""

    stored: TorchDistIndexEntry
    folder: Path

    def to(self, device: str) -> Tensor:
        """Return the tensor (any shape) on a device. On "meta" nothing is read."""
        if device == "meta":
            shape = self.stored.shape if self.stored.layer is None else self.stored.shape[1:]
            return torch.empty(shape, dtype=self.stored.dtype, device=device)
        return read_stored_box(self.stored, self.folder)


def read_stored_box(stored: TorchDistIndexEntry, folder: Path, box: Box | None = None) -> Tensor:
    """Read a box of a stored tensor (any shape), or all of it, or one layer of a stack, from the chunks that intersect
    it. Raises `CheckpointError` if they do not cover it.
    """
    box = box or whole_box(stored.shape)
    if stored.layer is not None:
        box = Box((stored.layer, *box.offset[1:]), (1, *box.shape[1:]))
    tensor, filled = torch.empty(box.shape, dtype=stored.dtype), 0
    for chunk in stored.chunks:
        common = intersect(chunk.box, box)
        if common is not None:
            values = read_chunk_values(chunk, stored, folder)
            back = common.shifted(tuple(-start for start in chunk.box.offset))
            tensor[common.shifted(tuple(-start for start in box.offset)).slices()] = values[back.slices()]
            filled += common.num_elements
    if filled != box.num_elements:
        raise CheckpointError(
            f"{folder} is incomplete: of {stored.key} it holds {filled} of {box.num_elements} elements"
        )
    return tensor if stored.layer is None else tensor[0]


def read_chunk_values(chunk: StoredChunk | FlatBox, stored: TorchDistIndexEntry, folder: Path) -> Tensor:
    """Read the values of one stored chunk, in its box's shape (any shape). `CheckpointError` if the file is damaged."""
    if isinstance(chunk, FlatBox):
        row = Box(chunk.offset, (*(1,) * (len(chunk.offset) - 1), math.prod(chunk.shape)))
        values = read_stored_box(chunk.stored, folder, row).reshape(chunk.shape)[
            Box(chunk.inside, chunk.part or chunk.shape).slices()
        ]
        return (values.transpose(-1, -2) if chunk.transposed else values).reshape(chunk.box.shape)
    values = read_stored_chunk(chunk, folder, stored.key)
    if not isinstance(values, Tensor) or values.numel() != chunk.box.num_elements or values.dtype != stored.dtype:
        raise CheckpointError(
            f"{folder / chunk.file} is damaged: what it holds for {stored.key} is not the box that the index promises"
        )
    return values.reshape(chunk.box.shape)


def read_stored_chunk(chunk: StoredChunk, folder: Path, name: str) -> Any:
    """Read the tensor or object that a byte range of a file holds. name: for errors."""
    path = folder / chunk.file
    try:
        with path.open("rb") as file:
            file.seek(chunk.start)
            content = file.read(chunk.length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) != chunk.length:
        raise CheckpointError(f"{path} ends early: {name} lies behind its end")
    return read_torch_bytes(content, f"{path} ({name})")
