"""Flight recorder: the last collectives of a rank and what it is doing, for messages about failures and hangs.

    flight_recorder.begin_activity("training", 12)                          activity and iteration
    flight_recorder.enter_phase(action)                                     an action of the schedule, "optimizer", ...
    flight_recorder.record_collective("all_reduce", "tp", ranks, 4096)      a collective begins

Recording costs about a microsecond; text is formatted only when a message needs it. Collectives are counted for each group: the
ranks of a group that have begun fewer than the others are the ones that the others wait for.
"""

from __future__ import annotations

import sys
from types import FrameType

from megatron.core.parallel.device import Stopwatch

_CAPACITY = 16  # how many of the last collectives are recorded
_OPERATIONS = {"F": "forward", "B": "backward", "W": "weights", "R": "reduce"}
# The operation, its axis, ranks and bytes; file and line; activity, iteration and action.
Note = tuple[object, str, tuple[int, ...], int, str, int, str, int, object]
_UNITS = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB"), (1, "bytes"))


class FlightRecorder:
    """The last collectives of one rank. The training thread writes; other threads read, and may miss the newest.

    activity, iteration, action: what the rank is doing; iterations count from 1. num_events: a counter that every call
    below increases, so that a hang can be detected. counts: collectives begun, by axis and ranks. stopwatch: if set,
    times the work between `start_compute_timing` and `stop_compute_timing` without the waits between `pause_compute_timing` and `resume_compute_timing`.
    """

    def __init__(self) -> None:
        self.activity: str = "start-up"
        self.iteration = 0
        self.action: object = ""
        self.num_events = 0
        self.stopwatch: Stopwatch | None = None
        self.counts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._ring: list[Note | None] = [None] * _CAPACITY
        self._noted = 0
        self._runs = self._pauses = False

    def begin_activity(self, activity: str, iteration: int) -> None:
        """Start an activity, such as "training" or "save"."""
        self.activity, self.iteration, self.action = activity, iteration, ""
        self.num_events += 1

    def enter_phase(self, action: object) -> None:
        """Start a phase of the activity; `str(action)` is evaluated only when a message needs it."""
        self.action = action
        self.num_events += 1

    def record_collective(self, operation: object, axis: str, ranks: tuple[int, ...], size: int) -> None:
        """Record that a collective over an axis or a message, `str(operation)`, begins. size: bytes on this rank."""
        key = axis, ranks
        self.counts[key] = self.counts.get(key, 0) + 1
        file, line = _caller_file_and_line(sys._getframe(1))
        now = self.activity, self.iteration, self.action
        self._ring[self._noted % _CAPACITY] = (operation, axis, ranks, size, file, line, *now)
        self._noted += 1
        self.num_events += 1

    def start_compute_timing(self) -> None:
        """Start timing work."""
        if self.stopwatch is not None:
            self._runs = True
            self.stopwatch.start()

    def stop_compute_timing(self) -> None:
        """Stop timing work."""
        if self._runs and self.stopwatch is not None:
            self._runs = False
            self.stopwatch.stop()

    def pause_compute_timing(self) -> None:
        """Stop timing: a wait for other ranks begins."""
        if self._runs and self.stopwatch is not None:
            self._runs, self._pauses = False, True
            self.stopwatch.stop()

    def resume_compute_timing(self) -> None:
        """Continue timing: the wait has ended."""
        if self._pauses and self.stopwatch is not None:
            self._runs, self._pauses = True, False
            self.stopwatch.start()

    def current_position_text(self) -> str:
        """Return the current activity, iteration and action as text."""
        return _format_activity(self.activity, self.iteration, self.action)

    def last_collective_group(self) -> tuple[str, tuple[int, ...]]:
        """Return the axis name and the ranks of the last collective; ("", ()) if there was none."""
        note = self._ring[(self._noted - 1) % _CAPACITY]
        return (note[1], note[2]) if note is not None else ("", ())

    def last_collectives(self, count: int = 1) -> list[str]:
        """Return the last `count` collectives as text, newest first."""
        notes = [self._ring[(self._noted - 1 - back) % _CAPACITY] for back in range(min(count, _CAPACITY, self._noted))]
        return [_format_collective_record(note) for note in notes if note is not None]


def _caller_file_and_line(frame: FrameType | None) -> tuple[str, int]:
    """Return file and line that called a collective: the first frame outside of this package and of torch."""
    first = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if "/core/parallel/" not in file and "/torch/" not in file:
            return file, frame.f_lineno
        frame = frame.f_back
    return (first.f_code.co_filename, first.f_lineno) if first is not None else ("", 0)


def _format_activity(activity: str, iteration: int, action: object) -> str:
    """Return activity, iteration and action as text."""
    when = f"{activity}, iteration {iteration}" if iteration else activity
    return f"{when}, {describe_schedule_action(action)}" if action else when


def _format_collective_record(note: Note) -> str:
    """Return one recorded collective as text: operation, axis, ranks, bytes, caller and activity."""
    operation, axis, ranks, size, file, line, activity, iteration, action = note
    unit_bytes, unit = next(pair for pair in _UNITS if size >= pair[0] or pair[0] == 1)
    members = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} .. {ranks[-1]}, {len(ranks)} of them"
    return f"{operation} over {axis} (ranks {members}) of {size / unit_bytes:.4g} {unit} at {path_tail(file)}:{line}, in {_format_activity(activity, iteration, action)}"


def describe_schedule_action(action: object) -> str:
    """Return an action as text: `forward of stage 0, microbatch 3` for the schedule's F0.3, else `str(action)`."""
    text = str(action)
    if text[:1] in _OPERATIONS and text[1:2].isdecimal():
        stage, _, microbatch = text[1:].partition(".")
        return f"{_OPERATIONS[text[0]]} of stage {stage}" + (f", microbatch {microbatch}" if microbatch else "")
    return text


def path_tail(file: str) -> str:
    """Return the last three components of a path."""
    return "/".join(file.split("/")[-3:])
