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

from megatron.core.dist_checkpointing.checkpoint_folders import (
    COMMIT,
    MANIFEST,
    CommittedCheckpoint,
    checkpoints_to_try,
    read_commit_record,
    read_committed_json,
    read_saved_run_config,
    scan_checkpoint_folder,
)
from megatron.core.dist_checkpointing.manifest import WIDTHS, parse_manifest

OWN = "this project"  # the format of our own
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class BoxInFile:
    """A box of a tensor, and the file that holds it."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A checkpoint's tensor without its values. dtype: as in safetensors. size: bytes. places: empty if unknown."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    places: tuple[BoxInFile, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """What a checkpoint holds. iteration, world_size: None if it does not say. files: name -> bytes."""

    path: str
    checkpoint_format: str
    iteration: int | None
    world_size: int | None
    files: Mapping[str, int]
    tensors: tuple[TensorEntry, ...]
    values: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.size for one in self.tensors)

    def totals_by_group(self) -> dict[str, tuple[int, int, int]]:
        """Return group of tensors (`tensor_category`) -> (number of tensors, elements, bytes)."""
        totals: dict[str, tuple[int, int, int]] = {}
        for one in self.tensors:
            count, elements, size = totals.get(tensor_category(one.name), (0, 0, 0))
            totals[tensor_category(one.name)] = count + 1, elements + one.elements, size + one.size
        return dict(sorted(totals.items()))

    def matching_tensors(self, patterns: Sequence[str]) -> list[TensorEntry]:
        """Return the tensors whose names match one of the patterns (`model.*.weight`); all without patterns."""
        return [one for one in self.tensors if matches_pattern(one.name, patterns)]


def matches_pattern(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the shell-like patterns; True without patterns."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def tensor_category(name: str) -> str:
    """Return what a tensor belongs to, by the start of its name: `model`, an optimizer slot, the random streams."""
    parts = name.split(".")
    return parts[0] if parts[0] == "model" else ".".join(parts[:2])


def native_checkpoint_folder(path: str | Path, step: int | None = None) -> Path | None:
    """Return the folder of our own checkpoint that a path means, found without torch; None for others."""
    path = Path(path)
    if (path / COMMIT).is_file():
        return path
    scan = scan_checkpoint_folder(path)
    steps: Sequence[CommittedCheckpoint] = checkpoints_to_try(path, step) if scan.steps or scan.newer else ()
    return steps[0].folder if steps else None


def native_contents(folder: Path) -> CheckpointContents:
    """Return the contents of one of our checkpoints, from its manifest. `CheckpointError` if it is damaged."""
    description, commit = read_saved_run_config(folder), read_commit_record(folder)
    manifest = parse_manifest(read_committed_json(folder, MANIFEST, commit.manifest))
    tensors = tuple(
        TensorEntry(
            name,
            one.dtype,
            one.shape,
            math.prod(one.shape) * WIDTHS[one.dtype],
            tuple(BoxInFile(piece.file, piece.box.offset, piece.box.shape) for piece in one.pieces),
        )
        for name, one in manifest.tensors.items()
    )
    files = {name: facts.size for name, facts in manifest.files.items()}
    return CheckpointContents(
        str(folder), OWN, commit.iteration, description.world_size, files, tensors, manifest.values, description.values
    )


def contents_as_json(contents: CheckpointContents, patterns: Sequence[str] = ()) -> dict[str, Any]:
    """Return the contents as JSON-serializable values; patterns restrict tensors and values by name."""
    groups = {
        name: {"tensors": count, "elements": elements, "bytes": size}
        for name, (count, elements, size) in contents.totals_by_group().items()
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
        for one in contents.matching_tensors(patterns)
    }
    return {
        "path": contents.path,
        "format": contents.checkpoint_format,
        "iteration": contents.iteration,
        "world_size": contents.world_size,
        "bytes": contents.total_bytes,
        "files": dict(contents.files),
        "groups": groups,
        "tensors": tensors,
        "values": {name: value for name, value in contents.values.items() if matches_pattern(name, patterns)},
        "settings": dict(contents.settings),
    }


def bytes_with_unit_text(size: float) -> str:
    """Format bytes with a fitting unit: "1.5 GB"."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"


def plural_count_text(number: int, word: str) -> str:
    """Format a count: `1 file`, `2 files`, `no files`."""
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
