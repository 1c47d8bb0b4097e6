"""Folders of checkpoints: what is complete, what is newest, what may go. Plain files and JSON; needs no torch.

    SAVE/latest_checkpointed_iteration.txt    the newest iteration, as a number; written last of all
    SAVE/iter_0001000/                        one checkpoint; the folder has this name only when it is complete
        config.json                           what the run was told, for people and for --use-checkpoint-args
        .metadata, __0_0.distcp, ...          tensors (see dcp.py)
        metadata.json                         the last file of the folder
    SAVE/iter_0001100.tmp/                    a checkpoint that is being written, or never was finished
    SAVE/iter_0000900.old/                    one that is being deleted

A save is a folder that is filled under another name and then renamed: whoever finds the name finds everything. Only one
rank calls the functions that write here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.flags import flag_fields, refuse
from megatron.core.config.model import ModelConfig

FORMAT_VERSION = 1
TRACKER = "latest_checkpointed_iteration.txt"
_COMPLETE = "metadata.json"
_CONFIG = "config.json"
_SHOWN = 100  # problems an error prints; a wrong model misses thousands of names

# What a user may choose anew for a checkpoint's model: kernels, dropout, initial values, and the padding of this layout.
_FREE = {"attention_backend", "hidden_dropout", "attention_dropout", "init_method_std", "embedding_init_method_std",
         "init_method_xavier_uniform", "make_vocab_size_divisible_by", "padded_vocab_size", "fp32_residual_connection"}


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read. The message lists everything that is wrong with it."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        super().__init__(summary, tuple(problems))  # both, so that the error survives the way to other ranks
        self.summary, self.problems = summary, tuple(problems)

    def __str__(self) -> str:
        shown = [f"  {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            shown.append(f"  ... and {len(self.problems) - _SHOWN} more")
        return "\n".join([self.summary, *shown])


@dataclass(frozen=True, slots=True)
class Description:
    """config.json: the resolved settings of the run that saved, by field name, and how many ranks it had."""

    values: Mapping[str, Any]
    world_size: int


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies."""
    return Path(folder) / f"iter_{iteration:07d}"


def check_writable(folder: str | Path) -> None:
    """Refuse a `--save` folder in which no file can be made, before hours of training are lost for it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse([f"--save {folder} cannot be written: {error.strerror or error}; give a folder that this user may write"])


def complete_iterations(folder: str | Path) -> list[int]:
    """The iterations with a complete checkpoint, ascending."""
    return sorted(iteration for iteration, path in _folders(folder) if (path / _COMPLETE).is_file())


def newest(folder: str | Path) -> int | None:
    """The iteration to resume from: what the tracker names, or the highest complete one if that is damaged or gone."""
    complete = complete_iterations(folder)
    try:
        tracked = int((Path(folder) / TRACKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return complete[-1] if complete else None
    except (OSError, ValueError):
        tracked = None
    if tracked in complete:
        return tracked
    if complete:
        return complete[-1]
    raise CheckpointError(f"{Path(folder) / TRACKER} names a checkpoint, but {folder} holds no complete one; put the "
                          f"iter_... folder back, or remove {TRACKER} to start afresh")


def find(folder: str | Path, step: int | None = None) -> int | None:
    """The iteration to load: `step` (`--ckpt-step`), which must be there, or the newest; None in an empty folder."""
    if step is None:
        return newest(folder)
    complete = complete_iterations(folder)
    if step not in complete:
        there = ", ".join(map(str, complete)) or "none"
        raise CheckpointError(f"--ckpt-step {step}: {folder} has no complete checkpoint of that iteration; it has: {there}")
    return step


def begin(folder: str | Path, iteration: int) -> Path:
    """An empty folder to write the checkpoint of `iteration` into. Remains of earlier saves that failed go away."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path in Path(folder).iterdir():
            if re.fullmatch(r"iter_\d{7,}\.(tmp|old)", path.name):
                shutil.rmtree(path)
        made = iteration_folder(folder, iteration).with_suffix(".tmp")
        made.mkdir()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None
    return made


def finish(folder: str | Path, iteration: int, description: Description) -> Path:
    """Declare the checkpoint begun for `iteration` complete: from here on it is the newest. Returns its folder."""
    target = iteration_folder(folder, iteration)
    made = target.with_suffix(".tmp")
    try:
        _write(made / _CONFIG, _as_json({"world_size": description.world_size, "values": dict(description.values)}))
        _write(made / _COMPLETE, _as_json({"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                                           "names": "megatron boxes", "format_version": FORMAT_VERSION,
                                           "iteration": iteration}))
        _sync(made)
        doomed = target.with_suffix(".old")
        if target.exists():  # the same iteration, saved again after going back
            target.rename(doomed)
        made.rename(target)
        shutil.rmtree(doomed, ignore_errors=True)
        tracker = Path(folder) / TRACKER
        _write(tracker.with_suffix(".tmp"), f"{iteration}\n")
        tracker.with_suffix(".tmp").replace(tracker)
        _sync(Path(folder))
    except OSError as error:
        raise CheckpointError(f"the checkpoint of iteration {iteration} cannot be completed in {folder}: {error}") from None
    return target


def retain(folder: str | Path, interval: int, *, saved: int) -> list[int]:
    """Delete checkpoints before iteration `saved` that are no multiples of `interval`; returns them. Links are kept."""
    gone = []
    for iteration, path in sorted(_folders(folder)):
        if iteration < saved and iteration % interval and not path.is_symlink():
            try:
                _remove(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be deleted (--save-retain-interval {interval}): {error}") from None
            gone.append(iteration)
    return gone


def describe(folder: str | Path) -> Description:
    """Read what a complete iteration's folder says of itself."""
    mark, config = _read(Path(folder) / _COMPLETE), _read(Path(folder) / _CONFIG)
    version = mark.get("format_version")
    if version is None:
        raise CheckpointError(f"{folder} was not written by this program: {_COMPLETE} has no format_version")
    if version > FORMAT_VERSION:
        raise CheckpointError(f"{folder} has format version {version}; this program reads up to {FORMAT_VERSION}, "
                              "use a newer one")
    if not isinstance(config.get("values"), dict) or not isinstance(config.get("world_size"), int):
        raise CheckpointError(f"{Path(folder) / _CONFIG} is damaged: it must hold values and world_size")
    return Description(config["values"], config["world_size"])


def checkpoint_values(folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """The model's shape and tokenizer as a checkpoint in `folder` has them (`--use-checkpoint-args`), by field name."""
    iteration = find(folder, step)
    if iteration is None:
        raise CheckpointError(f"--use-checkpoint-args: {folder} holds no complete checkpoint to take the settings from")
    values = describe(iteration_folder(folder, iteration)).values
    names = [field.name for config in (ModelConfig, TokenizerConfig) for field, _ in flag_fields(config)]
    return {name: values[name] for name in names if name in values and name not in _FREE}


def bytes_in(folder: str | Path) -> int:
    """Size of a checkpoint on disk."""
    return sum(path.stat().st_size for path in Path(folder).iterdir() if path.is_file())


def _folders(folder: str | Path) -> list[tuple[int, Path]]:
    """(iteration, path) of everything named like a finished checkpoint."""
    try:
        paths = list(Path(folder).iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    return [(int(path.name[5:]), path) for path in paths if re.fullmatch(r"iter_\d{7,}", path.name) and path.is_dir()]


def _remove(path: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that half of it is never taken for the whole."""
    doomed = path.with_suffix(".old")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(content).__name__}, not an object")
    return content


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make a folder's list of names durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
