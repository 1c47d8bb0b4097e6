"""Which format a checkpoint is written in: a table of those that are known, asked in order.

ours           SAVE, or one of its iter_... folders
Hugging Face   a folder with config.json and safetensors
Megatron       mp_rank_... folders of any age, or torch_dist; or what the tracker of such a folder names

Looking for a checkpoint reads names and small files. What reads tensors is imported when one is opened: a run that starts afresh, or
from a checkpoint of our own, needs no reader of others, and no family of networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.checkpoint_folders import (
    COMMIT,
    CheckpointError,
    CommittedCheckpoint,
    checkpoints_to_try,
    read_commit_record,
    scan_checkpoint_folder,
)
from megatron.core.families.hf_folder import is_hf_checkpoint
from megatron.megatron_lm.checkpoint.folders import find_megatron_checkpoint

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.source import CheckpointSource

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """A checkpoint format.
    find: (path, iteration or None) -> the folder of the one checkpoint that they mean; None if it is of another format.
    open: (folder, settings that override the checkpoint's) -> its source. settings: folder -> (settings of model and
    tokenizer, further settings of its run), by field name. complete: whether a setting that the checkpoint lacks has its
    default value.
    """

    name: str
    find: Callable[[Path, int | None], Path | None]
    open: Callable[[Path, Settings | None], CheckpointSource]
    settings: Callable[[Path], tuple[Settings, Settings]]
    complete: bool = True


def find_native_checkpoint(path: Path, step: int | None) -> Path | None:
    """Return the path if it is a committed checkpoint (`step` is ignored), else the newest one in that folder, or that
    of iteration `step`; None if the folder has no checkpoint. Raises `CheckpointError` if it has no iteration `step`.
    """
    if (path / COMMIT).is_file():
        return path
    scan = scan_checkpoint_folder(path)
    steps = checkpoints_to_try(path, step) if scan.steps or scan.newer else []
    return steps[0].folder if steps else None


def _open_native(folder: Path, given: Settings | None) -> CheckpointSource:
    from megatron.core.dist_checkpointing.saved import open_native_checkpoint

    return open_native_checkpoint(folder)


def _find_hugging_face(path: Path, step: int | None) -> Path | None:
    """Return the path if it is a Hugging Face checkpoint and no iteration is asked for, else None."""
    return path if step is None and is_hf_checkpoint(path) else None


def _open_hugging_face(folder: Path, given: Settings | None) -> CheckpointSource:
    from megatron.core.families import hf

    return hf.open_hf_folder(folder, given)


def _hugging_face_settings(folder: Path) -> tuple[Settings, Settings]:
    from megatron.core.families import hf

    return hf.hf_model_settings(folder), {}


def _open_megatron(folder: Path, given: Settings | None) -> CheckpointSource:
    from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint

    return open_megatron_checkpoint(folder, given)


def _megatron_settings(folder: Path) -> tuple[Settings, Settings]:
    from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint

    source = open_megatron_checkpoint(folder)
    return source.settings, source.run_settings


NATIVE = CheckpointFormat(
    "this project", find_native_checkpoint, _open_native, lambda folder: (_open_native(folder, None).settings, {})
)
HUGGING_FACE = CheckpointFormat("Hugging Face", _find_hugging_face, _open_hugging_face, _hugging_face_settings)
MEGATRON_LM = CheckpointFormat("Megatron", find_megatron_checkpoint, _open_megatron, _megatron_settings, complete=False)
CHECKPOINT_FORMATS = (NATIVE, HUGGING_FACE, MEGATRON_LM)


def find_foreign_checkpoint(path: str | Path, step: int | None = None) -> tuple[CheckpointFormat, Path] | None:
    """Return (format, folder) of the checkpoint that a path means in Hugging Face's or Megatron's format, or None."""
    for checkpoint_format in CHECKPOINT_FORMATS:
        if checkpoint_format is not NATIVE and (place := checkpoint_format.find(Path(path), step)) is not None:
            return checkpoint_format, place
    return None


def native_checkpoints(
    path: str | Path, step: int | None = None, *, required: int | None = None
) -> list[CommittedCheckpoint]:
    """Return our checkpoints that a path means, in the order to try them: one folder, or those of `--save`."""
    path = Path(path)
    if (path / COMMIT).is_file():
        return [CommittedCheckpoint(path, read_commit_record(path))]
    return checkpoints_to_try(path, step, required=required)


def open_checkpoint(
    path: str | Path, step: int | None = None, given: Mapping[str, Any] | None = None
) -> CheckpointSource:
    """Open the checkpoint of any format at a path; it is not verified.
    step: iteration in a folder of several, else the newest. given: settings that override the checkpoint's, in formats
    other than ours. Raises `CheckpointError` if there is none, or it is damaged.
    """
    for checkpoint_format in CHECKPOINT_FORMATS:
        place = checkpoint_format.find(Path(path), step)
        if place is not None:
            return checkpoint_format.open(place, given)
    raise CheckpointError(
        f"{path} holds no checkpoint{'' if step is None else f' of iteration {step}'}: neither one of this project's, nor "
        "a Hugging Face folder, nor one of Megatron's"
    )
