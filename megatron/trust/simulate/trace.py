"""What one rank does in a training step, as records: the dry run writes them; cost, matching and reports read them.

    Event   one thing that happened: an operation on tensors, a collective, a message, the beginning of a phase
    Events  many of them, of which stretches may repeat earlier ones
    Held    bytes alive at one moment, by kind
    Trace   one rank's step: its events in order, the peak and what was alive then
    DryRun  the traces of all distinct kinds of rank, and which ranks each stands for

Sizes are bytes of storages: what tensors really occupy, each storage once however many views it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, overload

from megatron.core.config.settings.run import RunConfig
from megatron.core.pipeline_parallel.schedules import Plan

EventKind = Literal["op", "collective", "send", "receive", "action"]
TOGETHER = " and "  # between the names of two actions that are done in turns
KINDS = ("weights", "gradients", "optimizer", "activations", "communication", "temporaries")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a rank did.

    kind: `action` is the beginning of an action of the schedule or of a phase, and does nothing itself. name: `aten.mm`,
    `all_reduce`, `F0.3`; `F0.3 and B0.1` of two in turns. where: file and line of the innermost line of the framework that asked for it. action: what the
    schedule was at: `F0.3`, `B0.3`, `R0`; of a receive, what it is for; or the phase `setup`, `begin`, `reduction`, `optimizer`, `end`. module: the
    innermost module at work in a forward pass, by its name in the stage; in a backward pass, that which the
    recomputation runs, or nothing. flops: multiplications and additions of matrix products and attention, else 0. factors: the
    format of the numbers that these multiply, which the result may be summed in a wider one than. moved: bytes read and written, each
    tensor once.

    Of a collective or message: axis of the mesh; ranks: global ranks of the group, in its order; peer: the other end's
    global rank, or the source of a broadcast, else -1; shape, dtype: of the larger tensor (what an all-gather makes, what
    a reduce-scatter takes), of an all-to-all of what is sent; received: shape of what an all-to-all brings, else equal to
    shape. live: bytes alive when it was done.
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

    @property
    def talks(self) -> bool:
        """Whether other ranks take part."""
        return self.kind in ("collective", "send", "receive")


@dataclass(slots=True)
class EventSpan:
    """A stretch of events. again: these are of an earlier one, and happened once more in this action, with so many more bytes alive."""

    events: list[Event] | tuple[Event, ...]
    again: bool = False
    action: str = ""
    live: int = 0

    def as_happened(self, event: Event) -> Event:
        """One of the events, as it was here."""
        return replace(event, action=self.action, live=event.live + self.live) if self.again else event

    def __iter__(self) -> Iterator[Event]:
        return map(self.as_happened, self.events) if self.again else iter(self.events)


@dataclass(slots=True)
class Events(Sequence[Event]):
    """Events in order, told once where they repeat. begins: of each part, its first event's index."""

    parts: list[EventSpan] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    _count: int = 0

    def append(self, event: Event) -> None:
        """One more event."""
        if not self.parts or self.parts[-1].again:
            self._add(EventSpan([]))
        events = self.parts[-1].events
        assert isinstance(events, list), "a span that is not repeated still grows"
        events.append(event)
        self._count += 1

    def repeat(self, events: tuple[Event, ...], action: str, live: int) -> None:
        """These events once more, in this action. live: bytes that are alive more than were then."""
        self._add(EventSpan(events, True, action, live))
        self._count += len(events)

    def _add(self, part: EventSpan) -> None:
        self.begins.append(self._count)
        self.parts.append(part)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Event]:
        for part in self.parts:
            yield from part

    @overload
    def __getitem__(self, place: int) -> Event: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Event, ...]: ...

    def __getitem__(self, place: int | slice) -> Event | tuple[Event, ...]:
        if isinstance(place, slice):
            low, high, step = place.indices(self._count)
            assert step == 1, "events are taken in order"
            parts = zip(self.begins, self.parts, strict=True)
            inside = (
                (part, part.events[max(0, low - begin) : max(0, high - begin)]) for begin, part in parts if begin < high
            )
            return tuple(part.as_happened(event) for part, events in inside for event in events)
        place = range(self._count)[place]
        at = bisect_right(self.begins, place) - 1
        return self.parts[at].as_happened(self.parts[at].events[place - self.begins[at]])


def parts_of(events: Sequence[Event]) -> Sequence[EventSpan]:
    """The stretches that events come in."""
    return events.parts if isinstance(events, Events) else (EventSpan(tuple(events)),)


def talks_of(events: Sequence[Event]) -> Iterator[Event]:
    """Collectives, messages and the beginnings of actions alone."""
    for part in parts_of(events):
        yield from (part.as_happened(event) for event in part.events if event.kind != "op")


@dataclass(frozen=True, slots=True)
class HeldStorage:
    """Bytes alive at one moment.

    weights: in the format of the forward pass, with buffers of modules, and layers that FSDP2 has gathered. gradients: the buffers that autograd adds to.
    optimizer: moments and fp32 copies of weights. activations: what forward passes made and a later action still needs.
    communication: what collectives and messages read or wrote and that is neither of the above. temporaries: the rest.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    communication: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's training step.

    place: axis -> this rank's place on it (tp, cp, dp, pp, ep). parameters: numbers that it holds. peak: most bytes alive
    at once; peak_event: index of the event at which they were; at_peak: of what kinds. steady: what is alive between
    steps. timeline: (index of an event, what was alive after it), thinned. left_behind: bytes of a microbatch that stay
    until the end of the step. Of a dry run that was cut short, peak and at_peak are those of the whole step.
    """

    rank: int
    place: dict[str, int]
    parameters: int
    events: Sequence[Event]
    peak: int
    peak_event: int
    at_peak: HeldStorage
    steady: HeldStorage
    timeline: tuple[tuple[int, HeldStorage], ...] = ()
    left_behind: int = 0

    @property
    def summit(self) -> Event:
        """The event at the peak."""
        return self.events[self.peak_event]


@dataclass(frozen=True, slots=True)
class DryRun:
    """The step of every distinct kind of rank.

    stands_for: for each trace, the ranks that do the same with the same sizes. plan: the schedule that was run, of
    num_microbatches a rank; whole_plan: that of the run's own full step, of whole_microbatches, which differs where the
    dry run was cut short after the state of the pipeline began to repeat. Where documents are divided by their lengths, these are
    the microbatches of the rank that has most.
    """

    config: RunConfig
    world_size: int
    traces: tuple[Trace, ...]
    stands_for: tuple[tuple[int, ...], ...]
    plan: Plan
    num_microbatches: int
    whole_plan: Plan
    whole_microbatches: int

    @property
    def worst(self) -> Trace:
        """The trace with the highest peak, the first of equals."""
        return max(self.traces, key=lambda trace: trace.peak)

    def trace_of(self, rank: int) -> Trace:
        """The trace that stands for a global rank."""
        for trace, ranks in zip(self.traces, self.stands_for, strict=True):
            if rank in ranks:
                return trace
        raise KeyError(f"rank {rank} is not among the {self.world_size} ranks of this dry run, or was not run")
