"""What lives when: every storage of a step from its birth to its end, by kind.

A storage is counted once, by its own size, however many tensors look into it; so the counts are those of an allocator
that never rounds. What allocators add (rounding, splitting) and what kernels take inside an operation is not seen.

    weights, gradients, optimizer   known by name, once the trainer is built; weights also as FSDP2 gathers them, while they are whole
    activations     made or received by a forward pass, and still there when it ended
    communication   of the rest, what a collective or message read or wrote
    temporaries     of the rest, everything: what an operation made and a later one of the same action let go
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage

from megatron.trust.trace import KINDS, DryRun, Held, Trace

_FOREVER = 1 << 62
_POINTS = 1000  # of a thinned timeline


@dataclass(slots=True)
class Life:
    """One storage. born, died: numbers of the heap's clock. forward: number of the forward pass that it belongs to, or -1.
    travels: a collective or message touched it; sent: it left.
    """

    size: int
    born: int
    forward: int
    died: int = _FOREVER
    kind: str = ""
    travels: bool = False
    sent: bool = False


class Heap:
    """All storages that were seen. Its clock ticks at every birth and death."""

    def __init__(self) -> None:
        self.live = self.peak = self.clock = self.peak_clock = self.peak_event = 0
        self.event = 0  # index of the event under way
        self.lives: list[Life] = []
        self.ticks = array("q")  # event at every tick of the clock
        self._open: dict[int, tuple[Life, weakref.ref]] = {}
        self._forward, self._forward_ends = -1, []
        self._microbatches: list[str] = []  # of each forward pass

    def see(self, tensor: Tensor) -> int:
        """Count the tensor's storage, if it is new. Returns its size if so, else 0."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._open:
            return 0
        self._open[key] = self._begin(storage.nbytes()), weakref.ref(storage, lambda _: self._end(self._open.pop(key)[0]))
        return storage.nbytes()

    def resized(self, storage: UntypedStorage) -> None:
        """FSDP2 let go of what it had gathered, or takes the room for it again: weights that end, and weights that begin."""
        life, reference = self._open.get(storage._cdata, (None, None))
        if life is not None and life.size != storage.nbytes():
            life.kind = "weights"
            self._end(life)
            life = self._begin(storage.nbytes())
            life.kind = "weights"
            self._open[storage._cdata] = life, reference

    def of(self, tensor: Tensor) -> Life:
        """The life of a tensor's storage."""
        self.see(tensor)
        return self._open[tensor.untyped_storage()._cdata][0]

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """These are of this kind; what has a kind keeps it."""
        for tensor in tensors:
            life = self.of(tensor)
            life.kind = life.kind or kind

    def begin_step(self) -> None:
        """From here on the peak counts."""
        self.peak, self.peak_clock, self.peak_event = self.live, self.clock, self.event

    def enter(self, action: str) -> None:
        """Another action begins; what is born in a forward pass (F0.3) belongs to it."""
        if self._forward >= 0:
            self._forward_ends[self._forward] = self.clock
        self._forward = -1
        if action.startswith("F"):
            self._forward = len(self._forward_ends)
            self._forward_ends.append(_FOREVER)
            self._microbatches.append(action.partition(".")[2])

    def kind_of(self, life: Life) -> str:
        """What a storage turned out to be."""
        if life.kind:
            return life.kind
        if life.forward >= 0 and life.died > self._forward_ends[life.forward] and not life.sent:
            return "activations"
        return "communication" if life.travels else "temporaries"

    def at(self, clock: int) -> Held:
        """What was alive right after this tick."""
        held = dict.fromkeys(KINDS, 0)
        for life in self.lives:
            if life.born <= clock < life.died:
                held[self.kind_of(life)] += life.size
        return Held(**held)

    def left_behind(self, clock: int) -> int:
        """Bytes that the forward passes of a microbatch made and that are still there at this tick: of the one that leaves least, as
        the first may leave what serves all, and the last what nobody has thrown away yet.
        """
        found = dict.fromkeys(self._microbatches, 0)
        for life in self.lives:
            if life.forward >= 0 and life.born < clock <= life.died:
                found[self._microbatches[life.forward]] += life.size
        return min(found.values(), default=0)

    def timeline(self, begin: int) -> tuple[tuple[int, Held], ...]:
        """(event, what was alive) from a tick on, the highest moment of every stretch."""
        changes: list[tuple[int, str, int]] = []
        held = dict.fromkeys(KINDS, 0)
        for life in self.lives:
            kind = self.kind_of(life)
            if life.born >= begin:
                changes.append((life.born, kind, life.size))
            elif life.died >= begin:
                held[kind] += life.size
            if begin <= life.died < _FOREVER:
                changes.append((life.died, kind, -life.size))
        changes.sort()
        stretch = max(1, len(changes) // _POINTS)
        found, total, best = [], sum(held.values()), (-1, 0, Held())
        for place, (clock, kind, size) in enumerate(changes):
            held[kind] += size
            total += size
            if total > best[0]:
                best = total, self.ticks[clock], Held(**held)
            if (place + 1) % stretch == 0 or place + 1 == len(changes):
                found.append(best[1:])
                best = (-1, 0, Held())
        return tuple(found)

    def _tick(self) -> None:
        self.clock += 1
        self.ticks.append(self.event)

    def _begin(self, size: int) -> Life:
        life = Life(size, self.clock, self._forward)
        self._tick()
        self.lives.append(life)
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_clock, self.peak_event = self.live, life.born, self.event
        return life

    def _end(self, life: Life) -> None:
        life.died = self.clock
        self._tick()
        self.live -= life.size


def forwards_waiting(trace: Trace) -> int:
    """Forward passes at the peak whose backward pass had not ended."""
    passes = [event.name[0] for event in trace.events[:trace.peak_event + 1] if event.kind == "action" and event.name[0] in "FB"]
    return passes.count("F") - passes.count("B") + (passes[-1:] == ["B"])


def why_worst(run: DryRun) -> str:
    """What the rank with the highest peak holds more of than the one with the lowest, in words."""
    worst, least = run.worst, min(run.traces, key=lambda trace: trace.peak)
    name = f"rank {worst.rank} ({_place(worst)}) needs {worst.peak / 2**30:.2f} GiB"
    if worst.peak == least.peak:
        return f"{name}, as all others do"
    more = sorted(((getattr(worst.at_peak, kind) - getattr(least.at_peak, kind), kind) for kind in KINDS), reverse=True)
    parts = []
    for difference, kind in more:
        if difference > 0 and difference >= 0.01 * (worst.peak - least.peak):
            waiting = f" ({forwards_waiting(worst)} forward passes wait for their backward pass, there {forwards_waiting(least)})"
            parts.append(f"{difference / 2**30:.2f} GiB of {kind}{waiting if kind == 'activations' else ''}")
    return (f"{name}, {(worst.peak - least.peak) / 2**30:.2f} GiB more than rank {least.rank} ({_place(least)}), which needs least: "
            f"{', '.join(parts)} more")


def _place(trace: Trace) -> str:
    return ", ".join(f"{axis} {rank}" for axis, rank in trace.place.items() if axis in ("pp", "tp", "ep")) or "alone"
