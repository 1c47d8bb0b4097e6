"""What a rank is doing, noted as it goes, for whoever asks when it fails or no longer moves.

    trail.begin("training", 12)                   what the run is at, and in which iteration
    trail.enter(action)                           a part of that: an action of the schedule, "optimizer", ...
    trail.note("all_reduce", "tp", ranks, 4096)   a collective begins

A note costs about a microsecond, and no word of it is put together before someone asks. The collectives of a group are
counted: where ranks of one group have begun different numbers of them, those with fewer are the ones that the others
wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from megatron.core.parallel.device import Stopwatch

_KEPT = 16  # the last collectives
_OPERATIONS = {"F": "forward", "B": "backward", "W": "weights", "R": "reduce"}
# What began, its axis, ranks and bytes; file and line; activity, iteration and action.
Note = tuple[object, str, tuple[int, ...], int, str, int, str, int, object]
_UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB"), (1, "bytes"))


class Trail:
    """One rank's notes. Written by the thread that trains; any other may read, and at worst reads a note too few.

    iteration: the one that is being done, 1 for the first. moves: grows with everything that is noted. stopwatch: times the
    work of `start` .. `stop` without the waits between `pause` and `resume`, if somebody wants to know. idle: called when others
    are about to be waited for in the midst of work; what else there is to do meanwhile is done there. travels: called when tokens
    are on their way to experts or back; what takes turns with this work goes on then.
    """

    def __init__(self) -> None:
        self.activity: str = "start-up"
        self.iteration = 0
        self.action: object = ""
        self.moves = 0
        self.stopwatch: Stopwatch | None = None
        self.idle: Callable[[], None] = _nothing
        self.travels: Callable[[], None] = _nothing
        self.counts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._ring: list[Note | None] = [None] * _KEPT
        self._noted = 0
        self._runs = self._pauses = False

    def begin(self, activity: str, iteration: int) -> None:
        """Something else begins."""
        self.activity, self.iteration, self.action = activity, iteration, ""
        self.moves += 1

    def enter(self, action: object) -> None:
        """A part of it begins; `str(action)` is asked for when someone wants to know."""
        self.action = action
        self.moves += 1

    def note(self, what: object, axis: str, ranks: tuple[int, ...], size: int) -> None:
        """A collective over an axis begins, or a message between two ranks; size: bytes on this rank. What it is, it says when asked."""
        key = axis, ranks
        self.counts[key] = self.counts.get(key, 0) + 1
        file, line = _caller(sys._getframe(1))
        self._ring[self._noted % _KEPT] = (what, axis, ranks, size, file, line, self.activity, self.iteration, self.action)
        self._noted += 1
        self.moves += 1

    def start(self) -> None:
        """Work that is timed begins."""
        if self.stopwatch is not None:
            self._runs = True
            self.stopwatch.start()

    def stop(self) -> None:
        """Work that is timed ends."""
        if self._runs and self.stopwatch is not None:
            self._runs = False
            self.stopwatch.stop()

    def pause(self) -> None:
        """Others are waited for."""
        if self._runs and self.stopwatch is not None:
            self._runs, self._pauses = False, True
            self.stopwatch.stop()

    def resume(self) -> None:
        """The wait is over."""
        if self._pauses and self.stopwatch is not None:
            self._runs, self._pauses = True, False
            self.stopwatch.start()

    def where(self) -> str:
        """What is being done now, in words."""
        return _place(self.activity, self.iteration, self.action)

    def last_group(self) -> tuple[str, tuple[int, ...]]:
        """Axis and ranks of the last collective."""
        note = self._ring[(self._noted - 1) % _KEPT]
        return (note[1], note[2]) if note is not None else ("", ())

    def last(self, count: int = 1) -> list[str]:
        """The last collectives in words, the newest first."""
        notes = [self._ring[(self._noted - 1 - back) % _KEPT] for back in range(min(count, _KEPT, self._noted))]
        return [_words(note) for note in notes if note is not None]


def _nothing() -> None:
    """There is nothing else to do."""


def _caller(frame: FrameType | None) -> tuple[str, int]:
    """File and line of who asked for a collective: the first frame above this room's and torch's own."""
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
    """`forward of stage 0, microbatch 3` for F0.3; anything else as it says itself."""
    words = str(action)
    if words[:1] in _OPERATIONS and words[1:2].isdecimal():
        stage, _, microbatch = words[1:].partition(".")
        return f"{_OPERATIONS[words[0]]} of stage {stage}" + (f", microbatch {microbatch}" if microbatch else "")
    return words


def short(file: str) -> str:
    """The last three parts of a path: enough to find a file in a tree."""
    return "/".join(file.split("/")[-3:])
