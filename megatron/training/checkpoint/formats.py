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

from megatron.core.config.flags import flag_fields
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.saved import open_saved
from megatron.core.dist_checkpointing.source import Source
from megatron.core.dist_checkpointing.store import (
    COMMIT,
    FREE,
    CheckpointError,
    SavedStep,
    candidates,
    read_commit,
    scan_folder,
)
from megatron.core.families.hf import is_hf_checkpoint, model_settings, open_folder
from megatron.core.families.megatron.open import find_megatron, open_megatron
from megatron.core.families.megatron.source import MegatronSource
from megatron.core.tokenizers.build import KINDS


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """find: the one checkpoint that a path, and an iteration if one is given, mean; None where it is of another format.

    open: read it; the settings given win over the checkpoint's own. complete: settings that it does not say have their
    defaults, always.
    """

    name: str
    find: Callable[[Path, int | None], Path | None]
    open: Callable[[Path, Mapping[str, Any] | None], Source]
    complete: bool = True


def find_native_checkpoint(path: Path, step: int | None) -> Path | None:
    """A folder with a commit, or the newest such folder in a folder of checkpoints."""
    if (path / COMMIT).is_file():
        return path
    steps = candidates(path, step) if scan_folder(path).steps else []
    return steps[0].folder if steps else None


def _find_hugging_face(path: Path, step: int | None) -> Path | None:
    return path if step is None and is_hf_checkpoint(path) else None


OURS = CheckpointFormat("this project", find_native_checkpoint, lambda path, given: open_saved(path))
FOREIGN = (
    CheckpointFormat("Hugging Face", _find_hugging_face, open_folder),
    CheckpointFormat("Megatron", find_megatron, open_megatron, complete=False),
)
CHECKPOINT_FORMATS = (OURS, *FOREIGN)


def find_foreign(path: str | Path, step: int | None = None) -> tuple[CheckpointFormat, Path] | None:
    """What a path means in the formats of others."""
    places = ((checkpoint_format, checkpoint_format.find(Path(path), step)) for checkpoint_format in FOREIGN)
    return next(((checkpoint_format, place) for checkpoint_format, place in places if place is not None), None)


def foreign_settings(path: str | Path, step: int | None = None) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The model's shape, and its tokenizer if that is there too, as another format's checkpoint has them, by field name.

    None where the path holds none. What a user may choose anew (kernels, dropout, initial values) is left out. The second
    part is what the checkpoint says beside its network, and a command line may say otherwise.
    """
    located = find_foreign(path, step)
    if located is None:
        return None
    checkpoint_format, place = located
    source = None if checkpoint_format.name == "Hugging Face" else checkpoint_format.open(place, None)
    settings = model_settings(place) if source is None else source.settings
    names = {field.name for config in (ModelConfig, TokenizerConfig) for field, _ in flag_fields(config)} - FREE | {
        "null_tokenizer_ids"
    }
    beside: Mapping[str, Any] = source.run_settings if isinstance(source, MegatronSource) else {}
    kind = KINDS.get(beside.get("tokenizer_type", ""))
    reads = kind.reads if kind else frozenset()  # Megatron has defaults for all kinds
    unread = {field.name for field, _ in flag_fields(TokenizerConfig)} - (
        reads | {"tokenizer_type"} if reads else set()
    )
    return (
        {name: value for name, value in settings.items() if name in names},
        {name: value for name, value in beside.items() if name not in unread},
    )


def native_checkpoints(path: str | Path, step: int | None = None, *, required: int | None = None) -> list[SavedStep]:
    """Our checkpoints that a path means, in the order in which they are tried: one folder, or those of `--save`."""
    path = Path(path)
    if (path / COMMIT).is_file():
        return [SavedStep(path, read_commit(path))]
    return candidates(path, step, required=required)


def open_checkpoint(path: str | Path, step: int | None = None, given: Mapping[str, Any] | None = None) -> Source:
    """The checkpoint of any format that a path means. It is opened, and not verified.

    step: an iteration, where the path is a folder of several; else the newest. given: settings that win over the
    checkpoint's, in a format that says less than all. Raises `CheckpointError` when there is none, or it is damaged.
    """
    for checkpoint_format in CHECKPOINT_FORMATS:
        place = checkpoint_format.find(Path(path), step)
        if place is not None:
            return checkpoint_format.open(place, given)
    raise CheckpointError(
        f"{path} holds no checkpoint{'' if step is None else f' of iteration {step}'}: neither one of this project's, nor "
        "a Hugging Face folder, nor one of Megatron's"
    )
