"""The bank: a file of JSON lines for each round of rollouts, written before the round's first optimizer step.

It is the log of what was sampled, and what a run that is resumed within a round goes on with, to the last bit. Beside it lies what was sampled
ahead (rollout_queue.py). `remove_expired_bank_files` removes what no checkpoint needs any more.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.storage import atomic_file
from megatron.core.dist_checkpointing.checkpoint_folders import scan_checkpoint_folder
from megatron.rl.rollout_batches import TrainingRollout
from megatron.rl.rollouts import Rollout


def rollout_bank_path(folder: Path, first: int) -> Path:
    """Return the path of the rollouts of the round that begins at iteration `first`."""
    return folder / f"round_{first:07d}.jsonl.gz"


def rollout_queue_path(folder: Path, first: int) -> Path:
    """Return the path of the rollouts sampled ahead of the round that begins at iteration `first`."""
    return folder / f"ahead_{first:07d}.jsonl.gz"


def write_rollout_bank(file: Path, trained: Sequence[TrainingRollout]) -> None:
    """Write the rollouts of a round, atomically."""
    write_json_lines_gz(file, map(dataclasses.asdict, trained))


def read_rollout_bank(file: str | Path) -> list[TrainingRollout]:
    """Read the rollouts of a round. Raises `DataError` for a file that is damaged."""
    try:
        return [_rollout_from_json(values) for values in read_json_lines_gz(file)]
    except (KeyError, TypeError) as error:
        raise DataError(f"the rollouts of {file} cannot be read: {type(error).__name__}: {error}") from None


def write_json_lines_gz(file: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write a gzip file of JSON lines, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file, durable=False) as raw, gzip.open(raw, "wt", encoding="utf-8", compresslevel=1) as lines:
        for one in values:
            lines.write(json.dumps(one) + "\n")


def read_json_lines_gz(file: str | Path) -> list[dict[str, Any]]:
    """Read a file of `write_json_lines_gz`. `DataError` if it is damaged."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return [dict(json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise DataError(f"the rollouts of {file} cannot be read: {type(error).__name__}: {error}") from None


def saved_checkpoint_iterations(folders: Iterable[str | None]) -> list[int]:
    """Return the iterations of all checkpoints in these folders."""
    return [
        step.iteration
        for folder in folders
        if folder and Path(folder).is_dir()
        for step in scan_checkpoint_folder(folder).steps
    ]


def remove_expired_bank_files(
    folder: Path, *, first: int, steps: int, saved: Sequence[int] | None, max_bytes: int = 0
) -> str:
    """Remove files that no checkpoint needs; return a message if the limit cannot be kept, else "".

    first: iteration at which the current round begins. steps: iterations of a round. saved: iterations of the
    checkpoints; None: the run saves none. A run resumed at an iteration needs the file of the round that holds it,
    unless it begins there, and what was ahead of the round of the iteration before it. Files of what was ahead are
    removed once no checkpoint needs them; those after the newest checkpoint stay, as one may be being written. Rounds
    are the run's log: the oldest are removed only if all files together exceed max_bytes (0: no limit).
    """
    newest = first if saved is None else max(saved, default=0)
    for file, begin in _files_of_earlier_rounds(folder, "ahead", first):
        if begin + steps < newest and not any(begin < one <= begin + steps for one in saved or ()):
            file.unlink(missing_ok=True)
    if not max_bytes:
        return ""
    oldest = [
        file
        for file, begin in _files_of_earlier_rounds(folder, "round", first)
        if begin + steps <= newest and not set(range(begin + 1, begin + steps)) & set(saved or ())
    ]
    size = _remove_until_size(max_bytes, oldest, sum(file.stat().st_size for file in folder.glob("*_*.jsonl.gz")))
    if size <= max_bytes:
        return ""
    return (
        f"the rollouts of {folder} have {size} bytes, more than --rl-rollout-bank-max-bytes {max_bytes}, and checkpoints need all of them; "
        "save more often, or keep fewer checkpoints"
    )


def _remove_until_size(limit: int, files: Sequence[Path], size: int) -> int:
    """Remove files in order until `size`, the bytes of all, is within the limit; return the remaining size."""
    for file in files:
        if size > limit:
            size -= file.stat().st_size
            file.unlink(missing_ok=True)
    return size


def _files_of_earlier_rounds(folder: Path, kind: str, first: int) -> list[tuple[Path, int]]:
    """Return (file, iteration at which its round begins) of the files of a kind whose rounds begin before iteration
    `first`.
    """
    files = ((file, int(file.name.split("_")[1].split(".")[0])) for file in sorted(folder.glob(f"{kind}_*.jsonl.gz")))
    return [(file, begin) for file, begin in files if begin < first]


def _rollout_from_json(values: dict[str, Any]) -> TrainingRollout:
    return TrainingRollout(
        **list_values_to_tuples(values) | {"rollout": Rollout(**list_values_to_tuples(values["rollout"]))}
    )


def list_values_to_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with lists as tuples, as JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
