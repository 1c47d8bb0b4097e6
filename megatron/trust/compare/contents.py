"""What a checkpoint holds, without reading a tensor: names, dtypes, shapes, bytes, and which file holds which box.

A checkpoint of our own is described by its manifest alone, which needs no torch; one of another format by its `Source`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.manifest import WIDTHS, parse_manifest
from megatron.core.dist_checkpointing.store import (
    COMMIT,
    MANIFEST,
    SavedStep,
    candidates,
    describe,
    read_commit,
    read_committed,
    scan_folder,
)

OWN = "this project"  # the format of our own
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class BoxPlace:
    """A box of a tensor, and the file that holds it."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor. dtype: safetensors' word. size: bytes. places: empty where a format does not say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    places: tuple[BoxPlace, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint. iteration, world_size: None where it does not say. files: name -> bytes. size: bytes of all tensors."""

    path: str
    checkpoint_format: str
    iteration: int | None
    world_size: int | None
    files: Mapping[str, int]
    tensors: tuple[TensorEntry, ...]
    values: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(one.size for one in self.tensors)

    def groups(self) -> dict[str, tuple[int, int, int]]:
        """Group of names -> tensors, elements, bytes."""
        totals: dict[str, tuple[int, int, int]] = {}
        for one in self.tensors:
            count, elements, size = totals.get(tensor_group(one.name), (0, 0, 0))
            totals[tensor_group(one.name)] = count + 1, elements + one.elements, size + one.size
        return dict(sorted(totals.items()))

    def select(self, patterns: Sequence[str]) -> list[TensorEntry]:
        """The tensors whose names fit one of the patterns (`model.*.weight`); all where there are none."""
        return [one for one in self.tensors if matches_pattern(one.name, patterns)]


def matches_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name fits one of the shell-like patterns; any name does where there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def tensor_group(name: str) -> str:
    """What a tensor belongs to: `model`, a slot of the optimizer, the random streams."""
    parts = name.split(".")
    return parts[0] if parts[0] == "model" else ".".join(parts[:2])


def native_checkpoint_folder(path: str | Path, step: int | None = None) -> Path | None:
    """The folder of the checkpoint of our own that a path means, as `formats.find_native_checkpoint` finds it; None for others."""
    path = Path(path)
    if (path / COMMIT).is_file():
        return path
    steps: Sequence[SavedStep] = candidates(path, step) if scan_folder(path).steps else ()
    return steps[0].folder if steps else None


def native_contents(folder: Path) -> Contents:
    """A checkpoint of our own, from its manifest. Raises `CheckpointError` when it is damaged."""
    description, commit = describe(folder), read_commit(folder)
    manifest = parse_manifest(read_committed(folder, MANIFEST, commit.manifest))
    tensors = tuple(
        TensorEntry(
            name,
            one.dtype,
            one.shape,
            math.prod(one.shape) * WIDTHS[one.dtype],
            tuple(BoxPlace(piece.file, piece.box.offset, piece.box.shape) for piece in one.pieces),
        )
        for name, one in manifest.tensors.items()
    )
    files = {name: facts.size for name, facts in manifest.files.items()}
    return Contents(
        str(folder), OWN, commit.iteration, description.world_size, files, tensors, manifest.values, description.values
    )


def as_json(contents: Contents, patterns: Sequence[str] = ()) -> dict[str, Any]:
    """All of it for a program to read."""
    groups = {
        name: {"tensors": count, "elements": elements, "bytes": size}
        for name, (count, elements, size) in contents.groups().items()
    }
    tensors = {
        one.name: {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "bytes": one.size,
            "boxes": [
                {"file": place.file, "offset": list(place.offset), "shape": list(place.shape)} for place in one.places
            ],
        }
        for one in contents.select(patterns)
    }
    return {
        "path": contents.path,
        "format": contents.checkpoint_format,
        "iteration": contents.iteration,
        "world_size": contents.world_size,
        "bytes": contents.size,
        "files": dict(contents.files),
        "groups": groups,
        "tensors": tensors,
        "values": {name: value for name, value in contents.values.items() if matches_pattern(name, patterns)},
        "settings": dict(contents.settings),
    }


def size_words(size: float) -> str:
    """Bytes as people say them."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"


def count_with_unit(number: int, word: str) -> str:
    """`1 file`, `2 files`, `no files`."""
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
