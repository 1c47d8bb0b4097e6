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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from megatron.core.config.settings.run import RunConfig
from megatron.core.parallel.flight_recorder import FlightRecorder, path_tail
from megatron.training.state.run import RunContext

_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen", os.path.dirname(os.__file__) + "/")


def failure_folder(config: RunConfig) -> Path | None:
    """Return the folder of failure files (`--error-dir`, else `faults` in --save); None for neither."""
    if config.faults.error_dir:
        return Path(config.faults.error_dir)
    return Path(config.checkpoint.save) / "faults" if config.checkpoint.save else None


def rank_and_node_text(rank: int) -> str:
    """Return "rank 5 on node gpu07": the name of this process in messages."""
    return f"rank {rank} on node {socket.gethostname()}"


def ranks_text(ranks: Sequence[int], most: int | None = None) -> str:
    """Return "rank 5", or "ranks 1, 2 and 7 more" if at most 2 are named."""
    more = f" and {len(ranks[most:])} more" if most is not None and len(ranks) > most else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks[:most]))}{more}"


def error_location_text(error: BaseException) -> str:
    """Return file, line and function that raised, of the innermost frame outside of libraries; "" if it is unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_ours = [frame for frame in frames if not any(word in frame.filename for word in _LIBRARIES)] or frames
    if not frames_of_ours:
        return ""
    return f"{path_tail(frames_of_ours[-1].filename)}:{frames_of_ours[-1].lineno} in {frames_of_ours[-1].name}"


def error_text(error: BaseException) -> str:
    """Return an error's type, message and notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def python_stacks() -> str:
    """Return the Python stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
    )


def append_failure_file(folder: Path | None, rank: int, text: str) -> None:
    """Append to this rank's failure file; nothing without a folder. A failure to write is only reported."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank{rank:05d}.txt", "a", encoding="utf-8") as file:
            file.write(f"[{datetime.now():%Y-%m-%d %H:%M:%S}] {text.rstrip()}\n\n")
    except OSError as error:
        sys.stderr.write(f"{folder} cannot be written: {error.strerror}\n")


def own_last_collectives_text(flight_recorder: FlightRecorder, count: int = 16) -> str:
    """Return the last collectives, one a line, the newest first."""
    return "\n".join(
        ["last collectives, the newest first:", *(f"  {words}" for words in flight_recorder.last_collectives(count))]
    )


@contextmanager
def annotate_errors(run: RunContext) -> Iterator[None]:
    """Add where this rank was to an exception that leaves the block, and write it to the rank's failure file."""
    try:
        yield
    except Exception as error:
        rank, flight_recorder = run.mesh.world.rank, run.mesh.flight_recorder
        place = error_location_text(error)
        error.add_note(
            f"on {rank_and_node_text(rank)}, in {flight_recorder.current_position_text()}{f', at {place}' if place else ''}"
        )
        trace = "".join(traceback.format_exception(error))
        text = f"{error_text(error)}\n{trace}{own_last_collectives_text(flight_recorder)}"
        append_failure_file(failure_folder(run.config), rank, text)
        raise
