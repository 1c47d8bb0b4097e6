"""Records of what one rank does in a training step. The dry run writes them; cost model, collective matching and reports read them.

    StepEvent     one operation on tensors, one collective, one message, or the start of a phase
    EventList     events in order; repeated stretches are stored once
    MemoryByKind  bytes allocated at one moment, by kind
    Trace         one rank's step: its events in order, its peak memory and what was allocated then
    DryRunResult  the traces of all distinct kinds of rank, and which ranks each trace stands for

Sizes are bytes of storages: what tensors really occupy, each storage counted once however many views it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, overload

from megatron.core.config.settings.run import RunConfig
from megatron.core.pipeline_parallel.schedules import Plan

EventKind = Literal["op", "collective", "send", "receive", "action"]
# What the code of an operation does that a machine of the plan does otherwise, or that ranks do with shares of their own (source_lines.py).
SourceRole = Literal["", "attention", "attention in chunks", "blocks", "emulated product", "sum of shares"]
TOGETHER = " and "  # between the names of two actions that run with dual-batch overlap
KINDS = ("weights", "gradients", "optimizer", "activations", "communication", "temporaries")


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One thing that a rank did.

    kind: an operation, a collective, a message sent or received, or `action`: the start of an action of the pipeline schedule or of a
    phase, which does nothing itself. name: `aten.mm`, `all_reduce`, `F0.3` (forward pass of stage 0, microbatch 3), or `F0.3 and B0.1` under
    dual-batch overlap. where: file and line of the innermost frame of this project. action: the schedule's action under way (`F0.3`,
    `B0.3`, `R0`), for a receive the action that consumes the message, or the phase: `setup`, `begin`, `reduction`, `optimizer`, `end`.
    module: name of the innermost module of the stage in a forward pass; in a backward pass the module that is recomputed, or "".
    flops: of matrix products and attention, else 0. factors: the dtype that a product multiplies, which can be narrower than
    its accumulator. moved: bytes read and written, each tensor once.

    For collectives and messages: axis of the mesh. ranks: global ranks of the group, in its order. peer: global rank of the other end, or the
    source of a broadcast, else -1. shape, dtype: of the larger tensor (the result of an all-gather, the input of a reduce-scatter, what an
    all-to-all sends). received: shape of what an all-to-all receives, else equal to shape. live: bytes allocated afterwards.
    parts: the operations of a scan, with the number of times that they run. role: of its line.
    """

    kind: EventKind
    name: str
    where: str = ""
    action: str = ""
    module: str = ""
    flops: int = 0
    moved: int = 0
    axis: str = ""
    ranks: tuple[int, ...] = ()
    peer: int = -1
    shape: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    dtype: str = ""
    live: int = 0
    factors: str = ""
    parts: tuple[tuple[int, RecordedScanEvents], ...] = ()
    role: SourceRole = ""

    @property
    def is_communication(self) -> bool:
        """Whether other ranks take part."""
        return self.kind in ("collective", "send", "receive")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedScanEvents:
    """Operations that are recorded as part of one event. Two of them are the same only if they are one object."""

    events: tuple[StepEvent, ...]


@dataclass(slots=True)
class ConsecutiveEvents:
    """Consecutive events.

    again: the events were recorded earlier and are repeated here, under `action` and with `live` more bytes allocated than then.
    """

    events: list[StepEvent] | tuple[StepEvent, ...]
    again: bool = False
    action: str = ""
    live: int = 0

    def event_as_repeated(self, event: StepEvent) -> StepEvent:
        """Return an event of the span with the action and the allocated bytes that it has here."""
        return replace(event, action=self.action, live=event.live + self.live) if self.again else event

    def __iter__(self) -> Iterator[StepEvent]:
        return map(self.event_as_repeated, self.events) if self.again else iter(self.events)


@dataclass(slots=True)
class EventList(Sequence[StepEvent]):
    """Events in order; a repeated span refers to the events of its first occurrence. begins: index of the first event of each span."""

    parts: list[ConsecutiveEvents] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    _count: int = 0

    def append(self, event: StepEvent) -> None:
        """Add an event."""
        if not self.parts or self.parts[-1].again:
            self._add_consecutive_events(ConsecutiveEvents([]))
        events = self.parts[-1].events
        assert isinstance(events, list), "a span that is not repeated still grows"
        events.append(event)
        self._count += 1

    def append_repeated(self, events: tuple[StepEvent, ...], action: str, live: int) -> None:
        """Add recorded events once more, under another action. live: bytes allocated beyond what was allocated then."""
        self._add_consecutive_events(ConsecutiveEvents(events, True, action, live))
        self._count += len(events)

    def _add_consecutive_events(self, part: ConsecutiveEvents) -> None:
        self.begins.append(self._count)
        self.parts.append(part)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StepEvent]:
        for part in self.parts:
            yield from part

    @overload
    def __getitem__(self, place: int) -> StepEvent: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[StepEvent, ...]: ...

    def __getitem__(self, place: int | slice) -> StepEvent | tuple[StepEvent, ...]:
        if isinstance(place, slice):
            low, high, step = place.indices(self._count)
            assert step == 1, "events are taken in order"
            parts = zip(self.begins, self.parts, strict=True)
            inside = (
                (part, part.events[max(0, low - begin) : max(0, high - begin)]) for begin, part in parts if begin < high
            )
            return tuple(part.event_as_repeated(event) for part, events in inside for event in events)
        place = range(self._count)[place]
        at = bisect_right(self.begins, place) - 1
        return self.parts[at].event_as_repeated(self.parts[at].events[place - self.begins[at]])


def split_into_event_spans(events: Sequence[StepEvent]) -> Sequence[ConsecutiveEvents]:
    """Return the spans of a sequence of events."""
    return events.parts if isinstance(events, EventList) else (ConsecutiveEvents(tuple(events)),)


def communication_events_of(events: Sequence[StepEvent]) -> Iterator[StepEvent]:
    """Yield collectives, messages and the starts of actions."""
    for part in split_into_event_spans(events):
        yield from (part.event_as_repeated(event) for event in part.events if event.kind != "op")


@dataclass(frozen=True, slots=True)
class MemoryByKind:
    """Bytes allocated at one moment.

    weights: in the format of the forward pass, with module buffers and layers that FSDP2 has gathered. gradients: the buffers that autograd
    accumulates into. optimizer: moments and fp32 main weights. activations: results of forward passes that a later action still needs.
    communication: inputs and outputs of collectives and messages that are none of the above. temporaries: everything else.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    communication: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """The sum over all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's training step.

    place: axis -> this rank's index on it (tp, cp, dp, pp, ep). parameters: number of elements that it holds. peak: most bytes
    allocated at once; peak_event: index of the event at which; at_peak: by kind. steady: allocated between steps. timeline: (index of an event,
    bytes after it), subsampled. kept_per_microbatch: bytes that each microbatch leaves allocated until the end of the step. If the dry run was cut
    short, peak and at_peak are those of the whole step.
    """

    rank: int
    place: dict[str, int]
    parameters: int
    events: Sequence[StepEvent]
    peak: int
    peak_event: int
    at_peak: MemoryByKind
    steady: MemoryByKind
    timeline: tuple[tuple[int, MemoryByKind], ...] = ()
    kept_per_microbatch: int = 0

    @property
    def event_at_peak(self) -> StepEvent:
        """The event at the peak."""
        return self.events[self.peak_event]


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The training step of every distinct kind of rank.

    stands_for: for each trace, the ranks that do the same with the same sizes. num_microbatches: of each rank in the step that
    was run. whole_plan: the pipeline schedule of a full step of the run, with whole_microbatches; it differs where the dry run
    stopped after the pipeline had reached its steady state. If documents are divided by length, these are the microbatches of
    the busiest rank.
    """

    config: RunConfig
    world_size: int
    traces: tuple[Trace, ...]
    stands_for: tuple[tuple[int, ...], ...]
    num_microbatches: int
    whole_plan: Plan
    whole_microbatches: int

    @property
    def worst_trace(self) -> Trace:
        """The trace with the highest peak; the first one of several."""
        return max(self.traces, key=lambda trace: trace.peak)
