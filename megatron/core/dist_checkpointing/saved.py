"""NativeCheckpoint: an opened checkpoint of our own format, a `Source` that maps its files, and can verify all bytes.

Opening reads commit.txt, config.json and the manifest, and checks the sizes of the files. `verify` reads every byte, or
a part of them if several ranks share the work.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import rank_file
from megatron.core.dist_checkpointing.checkpoint_folders import (
    COMMIT,
    CONFIG,
    MANIFEST,
    CheckpointError,
    CommitRecord,
    SavedRunConfig,
    read_commit_record,
    read_committed_json,
    read_saved_run_config,
)
from megatron.core.dist_checkpointing.files import DISK, FileSystem, read_file
from megatron.core.dist_checkpointing.manifest import (
    Manifest,
    StoredShard,
    is_data_file_name,
    parse_manifest,
    shard_key,
)
from megatron.core.dist_checkpointing.rank_file import HashedByteRange
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.parallel.boxes import Box, intersect

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
WORDS = {dtype: word for word, dtype in DTYPES.items()}
_MOST_THREADS = 8


class NativeCheckpoint:
    """An opened checkpoint. commit: its commit record; description: the run that wrote it; manifest: its shards."""

    def __init__(
        self, folder: Path, commit: CommitRecord, description: SavedRunConfig, manifest: Manifest, files: FileSystem
    ) -> None:
        self.folder, self.where, self.commit, self.description, self.manifest = (
            folder,
            str(folder),
            commit,
            description,
            manifest,
        )
        self.values: Mapping[str, Any] = manifest.values
        self.formats = {
            name: ShapeAndDtype(whole.shape, DTYPES[whole.dtype]) for name, whole in manifest.tensors.items()
        }
        self.settings = migrate_saved_settings(description.values, self.formats, self.where)
        self._files = files
        self._maps: dict[str, memoryview] = {}

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return (
            sum(facts.size for facts in self.manifest.files.values())
            + self.commit.manifest.size
            + self.commit.config.size
            + len(self.commit.text())
        )

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, [*box.shape], in its saved dtype; see `Source`.

        If one stored shard contains the box, as in the layout that saved it, the result is a view of mapped memory.
        """
        whole = self.manifest.tensors[name]
        result, results = torch.empty(0), 0
        for piece in whole.pieces if box.num_elements else ():
            common = intersect(box, piece.box)
            if common is None:
                continue
            saved = self._map_shard_as_tensor(piece, DTYPES[whole.dtype])[_slices_within_box(common, piece.box)]
            if common == box:
                return saved
            if not results:
                result = torch.empty(box.shape, dtype=saved.dtype)
            result[_slices_within_box(common, box)] = saved
            results += common.num_elements
        if results != box.num_elements:
            raise CheckpointError(f"{self.where} lacks a part of {name}")
        return result if results else torch.empty(box.shape, dtype=DTYPES[whole.dtype])

    def verify(self, *, part: int = 0, parts: int = 1, threads: int | None = None) -> list[str]:
        """Read part number `part` of `parts` equal parts of all bytes; return a message for each wrong hash."""
        return rank_file.verify_ranges(
            self._files,
            self.folder,
            _part_of_ranges(self._byte_ranges(), part, parts),
            save=self.commit.save,
            threads=threads or min(_MOST_THREADS, os.cpu_count() or 1),
            maps=self._maps,
        )

    def _byte_ranges(self) -> list[HashedByteRange]:
        """Return every byte range of every data file."""
        headers = [
            HashedByteRange(name, 0, facts.header_length, facts.header_hash, "its header")
            for name, facts in self.manifest.files.items()
        ]
        return headers + [
            HashedByteRange(
                piece.file,
                piece.start,
                piece.box.num_elements * DTYPES[whole.dtype].itemsize,
                piece.hash,
                shard_key(name, piece.box, whole.shape),
            )
            for name, whole in self.manifest.tensors.items()
            for piece in whole.pieces
        ]

    def _map_shard_as_tensor(self, piece: StoredShard, dtype: torch.dtype) -> Tensor:
        """Return a stored shard as a view of its file."""
        if piece.file not in self._maps:
            path = self.folder / piece.file
            try:
                self._maps[piece.file] = self._files.map(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        content = self._maps[piece.file]
        if len(content) != self.manifest.files[piece.file].size:
            raise CheckpointError(f"{self.folder / piece.file} is cut short")
        return torch.frombuffer(content, dtype=dtype, offset=piece.start, count=piece.box.num_elements).view(
            piece.box.shape
        )


def open_native_checkpoint(folder: str | Path, *, files: FileSystem = DISK) -> NativeCheckpoint:
    """Open a committed folder. Raises `CheckpointError` with all problems that show without reading tensors."""
    folder = Path(folder)
    commit = read_commit_record(folder, files=files)
    problems: list[str] = []
    description = manifest = None
    try:
        description = read_saved_run_config(folder, files=files)
    except CheckpointError as error:
        problems.append(str(error))
    try:
        manifest = parse_manifest(read_committed_json(folder, MANIFEST, commit.manifest, files=files))
        if (manifest.save, manifest.iteration) != (commit.save, commit.iteration):
            problems.append(f"{folder / MANIFEST} belongs to another save, of iteration {manifest.iteration}")
    except CheckpointError as error:
        problems.append(_stale_manifest_message(folder, str(error), commit, files))
    if manifest is not None:
        problems += _rank_file_problems(folder, manifest, files)
    if problems or description is None or manifest is None:
        raise CheckpointError(f"{folder} is damaged", problems)
    return NativeCheckpoint(folder, commit, description, manifest, files)


def migrate_saved_settings(settings: Mapping[str, Any], names: Collection[str], where: str) -> Mapping[str, Any]:
    """Return the settings of a checkpoint with these tensor names, as a run would give them today. Latent attention
    once had norms without --qk-layernorm, and rotated neighbouring channels with --rotary-interleaved only.
    """
    if not settings.get("multi_latent_attention") or settings.get("qk_layernorm"):
        return settings
    if not any(name.startswith("model.") and name.endswith(".kv_layernorm.weight") for name in names):
        return settings
    if not settings.get("rotary_interleaved"):
        raise CheckpointError(
            f"{where} was saved when --multi-latent-attention without --rotary-interleaved rotated the halves of a head; "
            "today it always rotates neighbouring channels, as Megatron does, so these weights are another network's: "
            "use the version that saved them, or train anew"
        )
    return {**settings, "qk_layernorm": True, "rotary_interleaved": False}


def _stale_manifest_message(folder: Path, complaint: str, commit: CommitRecord, files: FileSystem) -> str:
    """Return the message on a manifest that is not the committed one: that it is another save's, else `complaint`."""
    try:
        other = parse_manifest(json.loads(read_file(files, folder / MANIFEST)))
    except (OSError, ValueError, RecursionError, CheckpointError):
        return complaint
    if other.save == commit.save:
        return complaint
    return f"{folder / MANIFEST} is stale: it belongs to another save, of iteration {other.iteration}"


def _rank_file_problems(folder: Path, manifest: Manifest, files: FileSystem) -> list[str]:
    """Return a message for each data file that is missing, superfluous, or of a wrong size."""
    try:
        there = {entry.name for entry in files.list_entries(folder)}
        sizes = {name: files.size(folder / name) for name in manifest.files if name in there}
    except OSError as error:
        return [f"{folder} cannot be read: {error.strerror or error}"]
    problems = [f"{folder / name} is missing" for name in sorted(manifest.files.keys() - there)]
    problems += [
        f"{folder / name} is no part of this checkpoint; another save left it, or it was put here: move it away"
        for name in sorted(there - manifest.files.keys())
        if is_data_file_name(name)
    ]
    for name, size in sorted(sizes.items()):
        expected = manifest.files[name].size
        if size != expected:
            message = rank_file.file_of_other_save_problem(files, folder, name, save=manifest.save)
            problems.append(
                message
                or f"{folder / name} is {'cut short' if size < expected else 'too long'}: it has {size} bytes, the manifest "
                f"says {expected}"
            )
    return problems


def unknown_files(saved: NativeCheckpoint, *, files: FileSystem = DISK) -> list[str]:
    """Return names in a checkpoint's folder that are not its files. They do no harm."""
    known = {COMMIT, MANIFEST, CONFIG, *saved.manifest.files}
    return [entry.name for entry in files.list_entries(saved.folder) if entry.name not in known]


def _slices_within_box(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of `box` in a tensor that holds `outer`."""
    return box.shifted(tuple(-start for start in outer.offset)).slices()


def _part_of_ranges(ranges: list[HashedByteRange], part: int, parts: int) -> list[HashedByteRange]:
    """Return part number `part` when the ranges are divided, in file order, into `parts` parts of about equal bytes."""
    total, end, mine = sum(one.length for one in ranges), 0, []
    for one in sorted(ranges, key=lambda one: (one.file, one.start)):
        if min(parts - 1, (end + one.length // 2) * parts // max(1, total)) == part:
            mine.append(one)
        end += one.length
    return mine
