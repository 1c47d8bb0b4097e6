"""What a rank that fails says of itself, and the file in which it leaves that.

    rank 5 on node gpu07, in training, iteration 120, forward of stage 1, microbatch 3, at transformer/moe.py:31 in route:
    ValueError: ...

The file, rank00005.txt in the folder of `failure_folder`, also holds the traceback, the last collectives and, if the rank
hung, the stacks of its threads. A run that starts again appends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from megatron.core.config.settings.run import RunConfig
from megatron.core.parallel.flight_recorder import FlightRecorder, short_path
from megatron.training.run import Run

_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen", os.path.dirname(os.__file__) + "/")


def failure_folder(config: RunConfig) -> Path | None:
    """Where a failing run leaves its evidence (`--error-dir`); None for nowhere."""
    if config.faults.error_dir:
        return Path(config.faults.error_dir)
    return Path(config.checkpoint.save) / "faults" if config.checkpoint.save else None


def name_of_rank(rank: int) -> str:
    """What messages call this process."""
    return f"rank {rank} on node {socket.gethostname()}"


def error_origin(error: BaseException) -> str:
    """File, line and function that raised: the innermost that belongs to no library; "" where that is not known."""
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_ours = [frame for frame in frames if not any(word in frame.filename for word in _LIBRARIES)] or frames
    return (
        f"{short_path(frames_of_ours[-1].filename)}:{frames_of_ours[-1].lineno} in {frames_of_ours[-1].name}"
        if frames_of_ours
        else ""
    )


def error_text(error: BaseException) -> str:
    """An error in words, with the notes that it carries."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def python_stacks() -> str:
    """The Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
    )


def append_failure_file(folder: Path | None, rank: int, text: str) -> None:
    """Append to this rank's file. A file that cannot be written changes nothing about the failure."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank{rank:05d}.txt", "a", encoding="utf-8") as file:
            file.write(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {text.rstrip()}\n\n")
    except OSError as error:
        sys.stderr.write(f"{folder} cannot be written: {error.strerror}\n")


def last_collectives(flight_recorder: FlightRecorder, count: int = 16) -> str:
    """The last collectives, one a line."""
    return "\n".join(
        ["last collectives, the newest first:", *(f"  {words}" for words in flight_recorder.last_collectives(count))]
    )


@contextmanager
def with_location(run: Run) -> Iterator[None]:
    """An error that leaves here carries where this rank was, and is in its file."""
    try:
        yield
    except Exception as error:
        rank, flight_recorder = run.mesh.world.rank, run.mesh.flight_recorder
        place = error_origin(error)
        error.add_note(
            f"on {name_of_rank(rank)}, in {flight_recorder.current_position()}{f', at {place}' if place else ''}"
        )
        append_failure_file(
            failure_folder(run.config),
            rank,
            f"{error_text(error)}\n{''.join(traceback.format_exception(error))}{last_collectives(flight_recorder)}",
        )
        raise
