"""The unfinished work of a run: locked while it runs, written down at intervals, found again after a crash.

Beside the unfinished pairs stand two files of their own:

    PREFIX.lock.partial      held by the process that works on PREFIX; it dies with that process, however it dies
    PREFIX.journal.partial   the command, the place in the input, and how much of each pair belongs to it

The journal names only what has reached the disk before it. The next run of the same command cuts the pairs to what the
journal names, and goes on from its place; so it ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed import BuilderResumePoint, DataError
from megatron.core.datasets.ingest.input_spans import InputPosition
from megatron.core.datasets.storage import atomic_file

VERSION = 1
PARTIAL = "partial"  # ending of everything that is unfinished
RESTART = "throw the unfinished work away with --restart, or choose another --output-prefix"


@dataclass(slots=True)
class DroppedRecords:
    """Records left out for one reason: how many, and the first by file and number."""

    count: int = 0
    places: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PreprocessTotals:
    """What was read and written so far. empty: documents without a token, for each key. consumed: bytes on disk."""

    documents: int = 0
    tokens: int = 0
    num_bytes: int = 0
    consumed: int = 0
    empty: list[int] = field(default_factory=list)
    dropped: dict[str, DroppedRecords] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreprocessResumePoint:
    """A point from which a run can go on. marks: of each pair. done: all input is behind it."""

    place: InputPosition
    marks: list[BuilderResumePoint]
    totals: PreprocessTotals
    done: bool = False


@contextmanager
def lock_output_prefix(prefix: str) -> Iterator[None]:
    """Hold the lock of an output prefix inside the block. `DataError` if another process holds it."""
    path = Path(f"{prefix}.lock.{PARTIAL}")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"another process is writing to --output-prefix {prefix}; wait for its end, or choose "
                    "another prefix"
                ) from error
            # The one who had it may have removed the name between our two calls.
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def journal_path(prefix: str) -> Path:
    """Return the path of the journal of an output prefix."""
    return Path(f"{prefix}.journal.{PARTIAL}")


def save_preprocess_progress(prefix: str, command: Mapping[str, Any], state: PreprocessResumePoint) -> None:
    """Write how far a run has come to its journal. What `state` names must be on disk already."""
    content = {"version": VERSION, "command": command, **dataclasses.asdict(state)}
    with atomic_file(journal_path(prefix)) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def load_preprocess_progress(prefix: str, command: Mapping[str, Any]) -> PreprocessResumePoint | None:
    """Return where the previous run stopped, or None if nothing is unfinished. `DataError` if it ran another command."""
    path = journal_path(prefix)
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise DataError(
                f"{path} has version {content['version']!r}; this programme knows version {VERSION}: {RESTART}"
            )
        before, totals = content["command"], content["totals"]
        dropped = {reason: DroppedRecords(**drop) for reason, drop in totals.pop("dropped").items()}
        state = PreprocessResumePoint(
            InputPosition(**content["place"]),
            [BuilderResumePoint(**marks) for marks in content["marks"]],
            PreprocessTotals(**totals, dropped=dropped),
            content["done"],
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {RESTART}") from error
    _require_unchanged_command(path, before, json.loads(json.dumps(command)))
    return state


def _require_unchanged_command(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `DataError` listing the differences if the interrupted run had other options or inputs."""
    differences = []
    for name in now:
        if before.get(name) == now[name]:
            continue
        if name == "input":
            differences += _changed_inputs(before.get(name) or [], now[name])
        else:
            differences.append(f"{name}: {json.dumps(before.get(name))} then, {json.dumps(now[name])} now")
    if differences:
        raise DataError(
            "\n".join(
                [
                    f"{path} is of a run that was stopped, and that was not the same:",
                    *(f"  {line}" for line in differences),
                    f"  give the same command to go on; or {RESTART}",
                ]
            )
        )


def _changed_inputs(before: list, now: list) -> list[str]:
    """Return a sentence for each difference between the inputs then and now."""
    if [entry[0] for entry in before] != [entry[0] for entry in now]:
        return [
            f"input: {len(before)} files then, {len(now)} files now, or others"
            if len(before) != len(now)
            else "input: other files, or in another order"
        ]
    return [f"input: {new[0]} has changed since then" for old, new in zip(before, now) if old != new]
