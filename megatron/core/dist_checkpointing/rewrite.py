"""Write any source as a checkpoint of our own format: in one process, one tensor at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import checkpoint_folders, rank_file, save_plan
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, SavedRunConfig
from megatron.core.dist_checkpointing.files import DISK, FileSystem
from megatron.core.dist_checkpointing.manifest import Manifest, data_file_name
from megatron.core.dist_checkpointing.save_plan import BoxToWrite
from megatron.core.dist_checkpointing.saved import WORDS
from megatron.core.dist_checkpointing.source import CheckpointSource, ShapeAndDtype
from megatron.core.parallel.boxes import Box, whole_box

_WIDE = (".router.expert_bias",)  # sums of many small steps


class CastSource:
    """A source whose weights (`model.*`) are converted to another dtype, except those that are fp32 in every network."""

    def __init__(self, source: CheckpointSource, dtype: torch.dtype) -> None:
        self.where, self.values, self.settings = source.where, source.values, source.settings
        self.formats: Mapping[str, ShapeAndDtype] = {
            name: ShapeAndDtype(one.shape, dtype) if name.startswith("model.") and not name.endswith(_WIDE) else one
            for name, one in source.formats.items()
        }
        self._source = source

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, [*box.shape], cast to the dtype it is rewritten to.

        Raises `CheckpointError` for a finite value that this dtype cannot represent.
        """
        values, dtype = self._source.read(name, box), self.formats[name].dtype
        if values.dtype == dtype:
            return values
        made = values.to(dtype)
        if torch.finfo(dtype).max < torch.finfo(values.dtype).max and bool((made.isinf() & values.isfinite()).any()):
            raise CheckpointError(
                f"{self.where}: {name} has values that {str(dtype).removeprefix('torch.')} cannot hold; choose "
                "bfloat16 or float32"
            )
        return made


def rewrite_checkpoint(
    source: CheckpointSource,
    folder: str | Path,
    *,
    iteration: int,
    settings: Mapping[str, Any],
    num_files: int = 1,
    world_size: int = 1,
    files: FileSystem = DISK,
) -> Path:
    """Write every tensor and value of a source as the checkpoint of `iteration` into SAVE `folder`. Returns its folder.

    settings: for its config.json, by field name. num_files: number of data files of about equal size. world_size: ranks
    of the run that the settings describe. Raises `CheckpointError` if SAVE has that iteration already; a failure leaves
    existing files unchanged.
    """
    target = checkpoint_folders.iteration_folder(folder, iteration)
    if target.exists():
        raise CheckpointError(f"{target} is there already; move it away, or choose another folder")
    # A source may also have dtypes that only masks and counters have; all of them have a word.
    offers = [
        BoxToWrite(name, whole_box(one.shape), WORDS[one.dtype], one.shape) for name, one in source.formats.items()
    ]
    shares = save_plan.assign_writers([offers] * num_files)
    save = uuid.uuid4().hex
    made = checkpoint_folders.begin_save(folder, iteration, save, files=files)
    try:
        hashes = [
            _write_rank_file(made, rank, share, source, save=save, iteration=iteration, files=files)
            for rank, share in enumerate(shares)
        ]
        facts, tensors = save_plan.manifest_entries(shares, hashes, save=save, iteration=iteration)
        manifest = Manifest(save, iteration, facts, tensors, source.values).json_bytes()
        step, _ = checkpoint_folders.commit_save(
            folder,
            iteration,
            save=save,
            manifest=manifest,
            sizes={name: one.size for name, one in facts.items()},
            description=SavedRunConfig(settings, world_size),
            files=files,
        )
    except BaseException as error:
        checkpoint_folders.abandon_save(folder, iteration, save, files=files)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} cannot be written: {error}") from None
        raise
    return step.folder


def _write_rank_file(
    folder: Path,
    rank: int,
    share: Sequence[BoxToWrite],
    source: CheckpointSource,
    *,
    save: str,
    iteration: int,
    files: FileSystem,
) -> list[str]:
    """Write one data file; returns the hashes of its header and boxes, or [] if its share is empty."""
    if not share:
        return []
    header = save_plan.rank_file_header(rank, share, save=save, iteration=iteration)
    return rank_file.write_rank_file(files, folder / data_file_name(rank), header, _iter_shard_bytes(share, source))


def _iter_shard_bytes(share: Sequence[BoxToWrite], source: CheckpointSource) -> Iterator[memoryview]:
    """Yield the bytes of each box, read from the source."""
    for offer in share:
        yield memoryview(source.read(offer.name, offer.box).contiguous().view(-1).view(torch.uint8).numpy())
