"""The bank: a file of JSON lines for each round of rollouts, written before the round's first optimizer step.

It is the log of what was sampled, and what a run that is resumed within a round goes on with, to the last bit.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed import DataError
from megatron.rl.batches import TrainedRollout
from megatron.rl.rollouts import Rollout


def bank_file(folder: Path, first: int) -> Path:
    """The file of the round that begins at an iteration."""
    return folder / f"round_{first:07d}.jsonl.gz"


def write_bank(file: Path, trained: Sequence[TrainedRollout]) -> None:
    """Write a round, complete or not at all."""
    write_lines(file, map(dataclasses.asdict, trained))


def read_bank(file: str | Path) -> list[TrainedRollout]:
    """Read the rollouts of a round. Raises `DataError` for a file that is damaged."""
    try:
        return [_rollout_from_json(values) for values in read_lines(file)]
    except (KeyError, TypeError) as error:
        raise DataError(f"the rollouts of {file} cannot be read: {type(error).__name__}: {error}") from None


def write_lines(file: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write a compressed file of JSON lines, complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(f".{os.getpid()}.tmp")
    with gzip.open(made, "wt", encoding="utf-8", compresslevel=1) as lines:
        for one in values:
            lines.write(json.dumps(one) + "\n")
    os.replace(made, file)


def read_lines(file: str | Path) -> list[dict[str, Any]]:
    """Read a file of `write_lines`. Raises `DataError` for a file that is damaged."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return [dict(json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise DataError(f"the rollouts of {file} cannot be read: {type(error).__name__}: {error}") from None


def _rollout_from_json(values: dict[str, Any]) -> TrainedRollout:
    return TrainedRollout(**tuples(values) | {"rollout": Rollout(**tuples(values["rollout"]))})


def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with tuples for lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
