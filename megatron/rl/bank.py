"""The bank: a file of JSON lines for each round of rollouts, written before the round's first optimizer step.

It is the log of what was sampled, and what a run that is resumed within a round goes on with, to the last bit. Beside it lies what was sampled
ahead (rollout_queue.py). `remove_expired` removes what no checkpoint needs any more.
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
from megatron.core.dist_checkpointing.store import scan_folder
from megatron.rl.batches import TrainingRollout
from megatron.rl.rollouts import Rollout


def bank_file(folder: Path, first: int) -> Path:
    """The file of the round that begins at an iteration."""
    return folder / f"round_{first:07d}.jsonl.gz"


def queue_file(folder: Path, first: int) -> Path:
    """The file of what was ahead of the round that begins at an iteration."""
    return folder / f"ahead_{first:07d}.jsonl.gz"


def write_bank(file: Path, trained: Sequence[TrainingRollout]) -> None:
    """Write a round, complete or not at all."""
    write_lines(file, map(dataclasses.asdict, trained))


def read_bank(file: str | Path) -> list[TrainingRollout]:
    """Read the rollouts of a round. Raises `DataError` for a file that is damaged."""
    try:
        return [_rollout_from_json(values) for values in read_lines(file)]
    except (KeyError, TypeError) as error:
        raise DataError(f"the rollouts of {file} cannot be read: {type(error).__name__}: {error}") from None


def write_lines(file: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write a compressed file of JSON lines, complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file, durable=False) as raw, gzip.open(raw, "wt", encoding="utf-8", compresslevel=1) as lines:
        for one in values:
            lines.write(json.dumps(one) + "\n")


def read_lines(file: str | Path) -> list[dict[str, Any]]:
    """Read a file of `write_lines`. Raises `DataError` for a file that is damaged."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return [dict(json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise DataError(f"the rollouts of {file} cannot be read: {type(error).__name__}: {error}") from None


def saved_iterations(folders: Iterable[str | None]) -> list[int]:
    """The iterations of all checkpoints in these folders."""
    return [
        step.iteration for folder in folders if folder and Path(folder).is_dir() for step in scan_folder(folder).steps
    ]


def remove_expired(folder: Path, *, first: int, steps: int, saved: Sequence[int] | None, max_bytes: int = 0) -> str:
    """Remove the files that no checkpoint needs, and return what is wrong, usually "".

    first: iteration at which the round under way begins. steps: iterations of a round. saved: iterations of the checkpoints; None: the run
    saves none. A run that is resumed at an iteration needs the file of the round that holds it, unless it begins there, and what was ahead of the round of the iteration
    before it. Of what was ahead nothing else is kept, but for checkpoints that are still being written: those after the newest. Rounds are the
    log of the run: the oldest go only where all files together have more than max_bytes (0: no limit).
    """
    newest = first if saved is None else max(saved, default=0)
    for file, begin in _files_before(folder, "ahead", first):
        if begin + steps < newest and not any(begin < one <= begin + steps for one in saved or ()):
            file.unlink(missing_ok=True)
    if not max_bytes:
        return ""
    oldest = [
        file
        for file, begin in _files_before(folder, "round", first)
        if begin + steps <= newest and not set(range(begin + 1, begin + steps)) & set(saved or ())
    ]
    size = _remove_down_to(max_bytes, oldest, sum(file.stat().st_size for file in folder.glob("*_*.jsonl.gz")))
    if size <= max_bytes:
        return ""
    return (
        f"the rollouts of {folder} have {size} bytes, more than --rl-rollout-bank-max-bytes {max_bytes}, and checkpoints need all of them; "
        "save more often, or keep fewer checkpoints"
    )


def _remove_down_to(limit: int, files: Sequence[Path], size: int) -> int:
    """Remove files in their order until `size`, the bytes of all, is within the limit; returns what it is then."""
    for file in files:
        if size > limit:
            size -= file.stat().st_size
            file.unlink(missing_ok=True)
    return size


def _files_before(folder: Path, kind: str, first: int) -> list[tuple[Path, int]]:
    """The files of a kind, with the iterations at which their rounds begin, of those that begin before an iteration, in their order."""
    files = ((file, int(file.name.split("_")[1].split(".")[0])) for file in sorted(folder.glob(f"{kind}_*.jsonl.gz")))
    return [(file, begin) for file, begin in files if begin < first]


def _rollout_from_json(values: dict[str, Any]) -> TrainingRollout:
    return TrainingRollout(**lists_to_tuples(values) | {"rollout": Rollout(**lists_to_tuples(values["rollout"]))})


def lists_to_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with tuples for lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
