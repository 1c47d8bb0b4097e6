"""Safetensors files: what is in them, one tensor at a time; and files written in place, a tensor at a time.

    8 bytes: length of the header | header: JSON, name -> dtype, shape, range of bytes | the tensors' bytes, end to end

A tensor that is read is a mapping of its own bytes, so memory holds what is in use and no file stays open. A file that is
written has its whole length first, and every tensor goes to its place; its bytes are those that the safetensors package
writes for the same tensors.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.saved import DTYPES, WORDS
from megatron.core.dist_checkpointing.source import ShapeAndDtype

_ORDER = tuple(DTYPES.values())  # a file holds its widest floats first, then names in order
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """A tensor in a safetensors file. start: offset of its first byte in the file."""

    format: ShapeAndDtype
    path: Path
    start: int

    def read(self) -> Tensor:
        """Return the tensor (any shape), as a mapping of the file that must not be written to."""
        if not self.format.num_bytes:
            return torch.empty(self.format.shape, dtype=self.format.dtype)
        first = self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(
                    file.fileno(), self.start - first + self.format.num_bytes, offset=first, access=mmap.ACCESS_COPY
                )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from None
        flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=self.start - first, count=self.format.num_bytes)
        if self.start % self.format.dtype.itemsize:  # a header of another program that ends at an odd place
            flat = flat.clone()
        return flat.view(self.format.dtype).view(self.format.shape)


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Return every tensor of a safetensors file by name, not yet read. `CheckpointError` if the file is damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(
                    f"{path} is cut short or no safetensors file: it has {size} bytes, its header alone "
                    f"would have {length}"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_dict_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
        header.pop("__metadata__", None)
        tensors = {name: _parse_header_entry(name, entry, path, 8 + length) for name, entry in header.items()}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read: {error}") from None
    end = 8 + length
    for stored in sorted(tensors.values(), key=lambda one: (one.start, one.format.num_bytes)):
        if stored.start != end:
            raise CheckpointError(f"{path} is damaged: its tensors overlap or leave bytes between them at {end}")
        end += stored.format.num_bytes
    if end != size:
        raise CheckpointError(
            f"{path} is {'cut short' if size < end else 'damaged'}: it has {size} bytes, its header promises {end}"
        )
    return tensors


def preallocate_safetensors_file(path: Path, formats: Mapping[str, ShapeAndDtype]) -> dict[str, SafetensorsEntry]:
    """Create a safetensors file of full length for these tensors, all zero. Returns their places, for `write`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name in sorted(formats, key=lambda name: (_ORDER.index(formats[name].dtype), name)):
        one = formats[name]
        size = one.num_bytes
        entries[name] = {"dtype": WORDS[one.dtype], "shape": list(one.shape), "data_offsets": [end, end + size]}
        places[name], end = end, end + size
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return {name: SafetensorsEntry(formats[name], path, 8 + len(header) + start) for name, start in places.items()}


def write_safetensors_tensor(place: SafetensorsEntry, tensor: Tensor) -> None:
    """Write a tensor (any shape) to the place that `create` reserved for it."""
    assert (tuple(tensor.shape), tensor.dtype) == (place.format.shape, place.format.dtype), (
        "a tensor goes where its like has room"
    )
    if not place.format.num_bytes:
        return
    content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    handle = os.open(place.path, os.O_WRONLY)
    try:
        done = 0
        while done < len(content):
            done += os.pwrite(handle, content[done:], place.start + done)
    finally:
        os.close(handle)


def _parse_header_entry(name: str, entry: Any, path: Path, base: int) -> SafetensorsEntry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name} is not one of a tensor")
    shape, offsets, word = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not _is_list_of_whole_numbers(shape) or not _is_list_of_whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"the shape or the place of {name} is no list of whole numbers")
    if word not in DTYPES:
        raise ValueError(
            f"{name} has numbers of the kind {word!r}, which is not known here; save it as F32, BF16 or F16"
        )
    stored = SafetensorsEntry(ShapeAndDtype(tuple(shape), DTYPES[word]), path, base + offsets[0])
    if stored.format.num_bytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"{name} of shape {shape} takes {stored.format.num_bytes} bytes, and its place has {offsets[1] - offsets[0]}"
        )
    return stored


def _is_list_of_whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value
    )


def _dict_without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("it names a tensor twice")
    return members
