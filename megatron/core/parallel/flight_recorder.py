"""Flight recorder: the last collectives of a rank and what it is doing, for messages about failures and hangs.

    flight_recorder.begin("training", 12)                   activity and iteration
    flight_recorder.enter(action)                           a part of it: an action of the schedule, "optimizer", ...
    flight_recorder.note("all_reduce", "tp", ranks, 4096)   a collective begins

A note costs about a microsecond; text is only formatted when it is asked for. The collectives of each group are counted: of the
ranks of a group, those that have begun fewer than the others are the ones that the others wait for.
"""

from __future__ import annotations

import sys
from types import FrameType

from megatron.core.parallel.device import Stopwatch

_KEPT = 16  # the last collectives
_OPERATIONS = {"F": "forward", "B": "backward", "W": "weights", "R": "reduce"}
# What began, its axis, ranks and bytes; file and line; activity, iteration and action.
Note = tuple[object, str, tuple[int, ...], int, str, int, str, int, object]
_UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB"), (1, "bytes"))


class FlightRecorder:
    """The notes of one rank. Written by the training thread; other threads may read, and may miss the newest note.

    iteration: the current one, from 1. moves: a counter of all notes. stopwatch: if set, times the work between `start` and `stop`
    without the waits between `pause` and `resume`.
    """

    def __init__(self) -> None:
        self.activity: str = "start-up"
        self.iteration = 0
        self.action: object = ""
        self.moves = 0
        self.stopwatch: Stopwatch | None = None
        self.counts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._ring: list[Note | None] = [None] * _KEPT
        self._noted = 0
        self._runs = self._pauses = False

    def begin(self, activity: str, iteration: int) -> None:
        """Start an activity, such as "training" or "save"."""
        self.activity, self.iteration, self.action = activity, iteration, ""
        self.moves += 1

    def enter(self, action: object) -> None:
        """Start a part of the activity; `str(action)` is evaluated only when a message needs it."""
        self.action = action
        self.moves += 1

    def note(self, what: object, axis: str, ranks: tuple[int, ...], size: int) -> None:
        """A collective over an axis, or a point-to-point message, begins. size: bytes on this rank. `str(what)` names it."""
        key = axis, ranks
        self.counts[key] = self.counts.get(key, 0) + 1
        file, line = _caller(sys._getframe(1))
        self._ring[self._noted % _KEPT] = (
            what,
            axis,
            ranks,
            size,
            file,
            line,
            self.activity,
            self.iteration,
            self.action,
        )
        self._noted += 1
        self.moves += 1

    def start(self) -> None:
        """Start timing work."""
        if self.stopwatch is not None:
            self._runs = True
            self.stopwatch.start()

    def stop(self) -> None:
        """Stop timing work."""
        if self._runs and self.stopwatch is not None:
            self._runs = False
            self.stopwatch.stop()

    def pause(self) -> None:
        """A wait for other ranks begins."""
        if self._runs and self.stopwatch is not None:
            self._runs, self._pauses = False, True
            self.stopwatch.stop()

    def resume(self) -> None:
        """The wait has ended."""
        if self._pauses and self.stopwatch is not None:
            self._runs, self._pauses = True, False
            self.stopwatch.start()

    def where(self) -> str:
        """The current activity, iteration and action as text."""
        return _place(self.activity, self.iteration, self.action)

    def last_group(self) -> tuple[str, tuple[int, ...]]:
        """Axis and ranks of the last collective."""
        note = self._ring[(self._noted - 1) % _KEPT]
        return (note[1], note[2]) if note is not None else ("", ())

    def last(self, count: int = 1) -> list[str]:
        """The last collectives as text, newest first."""
        notes = [self._ring[(self._noted - 1 - back) % _KEPT] for back in range(min(count, _KEPT, self._noted))]
        return [_words(note) for note in notes if note is not None]


def _caller(frame: FrameType | None) -> tuple[str, int]:
    """File and line that called a collective: the first frame outside of this package and of torch."""
    first = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if "/core/parallel/" not in file and "/torch/" not in file:
            return file, frame.f_lineno
        frame = frame.f_back
    return (first.f_code.co_filename, first.f_lineno) if first is not None else ("", 0)


def _place(activity: str, iteration: int, action: object) -> str:
    when = f"{activity}, iteration {iteration}" if iteration else activity
    return f"{when}, {action_words(action)}" if action else when


def _words(note: Note) -> str:
    what, axis, ranks, size, file, line, activity, iteration, action = note
    factor, unit = next(pair for pair in _UNITS if size >= pair[0] or pair[0] == 1)
    among = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} .. {ranks[-1]}, {len(ranks)} of them"
    return f"{what} over {axis} (ranks {among}) of {size / factor:.4g} {unit} at {short(file)}:{line}, in {_place(activity, iteration, action)}"


def action_words(action: object) -> str:
    """`forward of stage 0, microbatch 3` for F0.3; `str(action)` for anything else."""
    words = str(action)
    if words[:1] in _OPERATIONS and words[1:2].isdecimal():
        stage, _, microbatch = words[1:].partition(".")
        return f"{_OPERATIONS[words[0]]} of stage {stage}" + (f", microbatch {microbatch}" if microbatch else "")
    return words


def short(file: str) -> str:
    """The last three parts of a path: enough to find a file in a tree."""
    return "/".join(file.split("/")[-3:])
