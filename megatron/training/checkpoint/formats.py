"""Which format a checkpoint is written in: a table of those that are known, asked in order.

ours           SAVE, or one of its iter_... folders
Hugging Face   a folder with config.json and safetensors
Megatron       mp_rank_... folders of any age, or torch_dist; or what the tracker of such a folder names
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import flag_fields
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import (
    COMMIT,
    FREE,
    CheckpointError,
    CommittedCheckpoint,
    checkpoints_to_try,
    read_commit_record,
    scan_checkpoint_folder,
)
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families.hf import hf_model_settings, is_hf_checkpoint, open_hf_folder
from megatron.core.tokenizers.build import settings_of_kind
from megatron.megatron_lm.checkpoint.open import find_megatron_checkpoint, open_megatron_checkpoint
from megatron.megatron_lm.checkpoint.source import MegatronSource


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """A checkpoint format.
    find: (path, iteration or None) -> the folder of the one checkpoint that they mean; None if it is of another format.
    open: (folder, settings that override the checkpoint's) -> its source. complete: whether a setting that the
    checkpoint lacks has its default value.
    """

    name: str
    find: Callable[[Path, int | None], Path | None]
    open: Callable[[Path, Mapping[str, Any] | None], CheckpointSource]
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


def _find_hugging_face(path: Path, step: int | None) -> Path | None:
    """Return the path if it is a Hugging Face checkpoint and no iteration is asked for, else None."""
    return path if step is None and is_hf_checkpoint(path) else None


OURS = CheckpointFormat("this project", find_native_checkpoint, lambda path, given: open_native_checkpoint(path))
FOREIGN = (
    CheckpointFormat("Hugging Face", _find_hugging_face, open_hf_folder),
    CheckpointFormat("Megatron", find_megatron_checkpoint, open_megatron_checkpoint, complete=False),
)
CHECKPOINT_FORMATS = (OURS, *FOREIGN)


def find_foreign_checkpoint(path: str | Path, step: int | None = None) -> tuple[CheckpointFormat, Path] | None:
    """Return (format, folder) of the checkpoint that a path means in Hugging Face's or Megatron's format, or None."""
    places = ((checkpoint_format, checkpoint_format.find(Path(path), step)) for checkpoint_format in FOREIGN)
    return next(((checkpoint_format, place) for checkpoint_format, place in places if place is not None), None)


def foreign_checkpoint_settings(
    path: str | Path, step: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return (settings of model and tokenizer, further run settings) of another format's checkpoint, by field name, or
    None. Free choices (kernels, dropout, initial values) are left out; flags may override the further ones.
    """
    located = find_foreign_checkpoint(path, step)
    if located is None:
        return None
    checkpoint_format, place = located
    source = None if checkpoint_format.name == "Hugging Face" else checkpoint_format.open(place, None)
    settings = hf_model_settings(place) if source is None else source.settings
    names = {field.name for config in (ModelConfig, TokenizerConfig) for field, _ in flag_fields(config)} - FREE | {
        "null_tokenizer_ids"
    }
    beside: Mapping[str, Any] = source.run_settings if isinstance(source, MegatronSource) else {}
    reads = settings_of_kind(beside.get("tokenizer_type", ""))  # Megatron has defaults for all kinds
    unread = {field.name for field, _ in flag_fields(TokenizerConfig)} - (
        reads | {"tokenizer_type"} if reads else set()
    )
    return (
        {name: value for name, value in settings.items() if name in names},
        {name: value for name, value in beside.items() if name not in unread},
    )


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
