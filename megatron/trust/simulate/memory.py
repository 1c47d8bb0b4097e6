"""What lives when: every storage of a step from its birth to its end, by kind.

A storage is counted once, by its own size, however many tensors look into it; so the counts are those of an allocator
that never rounds. What allocators add (rounding, splitting) and what kernels take inside an operation is not seen.

    weights, gradients, optimizer   known by name, once the trainer is built; weights also as FSDP2 gathers them, while they are whole
    activations     made or received by a forward pass, and still there when it ended
    communication   of the rest, what a collective or message read or wrote
    temporaries     of the rest, everything: what an operation made and a later one of the same action let go

What happened before may happen once more (memoization.py): a `LifetimeDelta` says what came and went in it, and `Heap.again` counts it.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, UntypedStorage

from megatron.trust.simulate.trace import KINDS, TOGETHER, DryRun, HeldStorage, Trace

_FOREVER = 1 << 62
_POINTS = 1000  # of a thinned timeline


@dataclass(slots=True)
class StorageLifetime:
    """One storage. born, died: numbers of the heap's clock. forward: number of the forward pass that it belongs to, or -1.
    travels: a collective or message touched it; sent: it left. elsewhere: it lies in the host's memory, and takes nothing of this one.
    """

    size: int
    born: int
    forward: int
    died: int = _FOREVER
    kind: str = ""
    travels: bool = False
    sent: bool = False
    elsewhere: bool = False

    @property
    def lasts(self) -> bool:
        """Whether it has not ended."""
        return self.died == _FOREVER


@dataclass(frozen=True, slots=True)
class LifetimeDelta:
    """What a heap saw between two moments, told from the first: live bytes, ticks of the clock and events count from there.

    events: of every tick. sizes, born, died, kinds: of the storages that came and went in it (kinds: places in KINDS). births:
    (tick, size, kind, travels, sent) of those that stayed. deaths: ticks of those that were there before. live: bytes at its end.
    top: most bytes, and the tick and the event of it.
    """

    events: np.ndarray
    sizes: np.ndarray
    born: np.ndarray
    died: np.ndarray
    kinds: np.ndarray
    births: tuple[tuple[int, int, str, bool, bool], ...]
    deaths: tuple[int, ...]
    live: int
    top: tuple[int, int, int]

    def like(self, other: LifetimeDelta) -> bool:
        """Whether the same came and went at the same moments."""
        return (self.births, self.deaths, self.live, self.top) == (
            other.births,
            other.deaths,
            other.live,
            other.top,
        ) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("events", "sizes", "born", "died", "kinds")
        )


class Heap:
    """All storages that were seen. Its clock ticks at every birth and death."""

    def __init__(self) -> None:
        self.live = self.peak = self.clock = self.peak_clock = self.peak_event = 0
        self.event = 0  # index of the event under way
        self.lives: list[StorageLifetime] = []
        self.ticks = array("q")  # event at every tick of the clock
        self._moves: list[
            StorageLifetime | None
        ] = []  # who came or went at it; nobody's name is known in what is counted again
        self._again: list[tuple[int, LifetimeDelta]] = []  # (clock before it, what was counted again)
        self._open: dict[int, tuple[StorageLifetime, weakref.ref]] = {}
        self._forward = -1  # the number of the pass under way
        self._forward_ends: list[int] = []  # the clock at the end of each
        self._forwards: dict[str, int] = {}  # action -> number
        self._microbatches: list[str] = []  # of each forward pass

    def see(self, tensor: Tensor, *, elsewhere: bool = False) -> None:
        """Count the tensor's storage, if it is new. elsewhere: it lies in another memory, and takes nothing of this one."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._open:
            self._hold(self._begin(0 if elsewhere else storage.nbytes()), storage)
            if elsewhere:
                self._open[storage._cdata][0].elsewhere = True

    def resized(self, storage: UntypedStorage) -> None:
        """FSDP2 let go of what it had gathered, or takes the room for it again: weights that end, and weights that begin."""
        if storage._cdata not in self._open:
            return
        life, reference = self._open[storage._cdata]
        if life.size != storage.nbytes():
            life.kind = "weights"
            self._end(life)
            life = self._begin(storage.nbytes())
            life.kind = "weights"
            self._open[storage._cdata] = life, reference

    def of(self, tensor: Tensor) -> StorageLifetime:
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
        """Another action begins, or one goes on; what is born in a forward pass (F0.3) belongs to it."""
        if self._forward >= 0:
            self._forward_ends[self._forward] = self.clock
        self._forward = -1
        if action in self._forwards:
            self._forward = self._forwards[action]
        elif action.startswith("F") and TOGETHER not in action:
            self._forward = self._forwards[action] = len(self._forward_ends)
            self._forward_ends.append(_FOREVER)
            self._microbatches.append(action.partition(".")[2])

    def kind_of(self, life: StorageLifetime) -> str:
        """What a storage turned out to be."""
        if life.kind:
            return life.kind
        if life.forward >= 0 and life.died > self._forward_ends[life.forward] and not life.sent:
            return "activations"
        return "communication" if life.travels else "temporaries"

    def at(self, clock: int) -> HeldStorage:
        """What was alive right after this tick."""
        held = dict.fromkeys(KINDS, 0)
        for life in self.lives:
            if life.born <= clock < life.died:
                held[self.kind_of(life)] += life.size
        for began, stretch in self._again:
            if began <= clock < began + len(stretch.events):
                alive = (stretch.born <= clock - began) & (clock - began < stretch.died)
                for kind, size in zip(stretch.kinds[alive], stretch.sizes[alive], strict=True):
                    held[KINDS[kind]] += int(size)
        return HeldStorage(**held)

    def left_behind(self, clock: int) -> int:
        """Bytes that the forward passes of a microbatch made and that are still there at this tick: of the one that leaves least, as
        the first may leave what serves all, and the last what nobody has thrown away yet.
        """
        sizes = dict.fromkeys(self._microbatches, 0)
        for life in self.lives:
            if life.forward >= 0 and life.born < clock <= life.died:
                sizes[self._microbatches[life.forward]] += life.size
        return min(sizes.values(), default=0)

    def timeline(self, begin: int) -> tuple[tuple[int, HeldStorage], ...]:
        """(event, what was alive) from a tick on, the highest moment of every stretch."""
        places, held = {kind: place for place, kind in enumerate(KINDS)}, np.zeros(len(KINDS), np.int64)
        changes: list[tuple[int, int, int]] = []  # tick, kind, bytes
        for life in self.lives:
            kind = places[self.kind_of(life)]
            if life.born >= begin:
                changes.append((life.born, kind, life.size))
            elif life.died >= begin:
                held[kind] += life.size
            if begin <= life.died < _FOREVER:
                changes.append((life.died, kind, -life.size))
        parts = [np.array(changes, np.int64).reshape(-1, 3)]
        for began, one in self._again:
            parts += [
                np.stack((began + one.born, one.kinds, one.sizes), axis=1),
                np.stack((began + one.died, one.kinds, -one.sizes), axis=1),
            ]
        moves = np.concatenate(parts)
        moves = moves[np.argsort(moves[:, 0])]
        totals, stretch = held.sum() + np.cumsum(moves[:, 2]), max(1, len(moves) // _POINTS)
        best = [low + int(np.argmax(totals[low : low + stretch])) for low in range(0, len(moves), stretch)]
        by_kind = [
            held[place] + np.cumsum(np.where(moves[:, 1] == place, moves[:, 2], 0)) for place in range(len(KINDS))
        ]
        return tuple((self.ticks[moves[at, 0]], HeldStorage(*(int(one[at]) for one in by_kind))) for at in best)

    # What happened before, once more.

    def stretch(
        self, clock: int, event: int, live: int
    ) -> tuple[LifetimeDelta, list[StorageLifetime], list[StorageLifetime]]:
        """What came and went since this moment, when so much was alive and so many events were known; nothing of it was counted again.

        Also the lives that began since then and go on, and those from before that ended, as `births` and `deaths` tell of them.
        """
        births, began, deaths, ended, inner = [], [], [], [], []
        now, top = 0, (0, -1, -1)
        for tick, life in enumerate(self._moves[clock:]):
            assert life is not None, "what was counted again is not followed"
            comes = life.born == clock + tick
            now += life.size if comes else -life.size
            if now > top[0]:
                top = now, tick, self.ticks[clock + tick] - event
            if not comes and life.born < clock:
                deaths.append(tick)
                ended.append(life)
            elif comes and life.died < _FOREVER:
                inner.append((life.size, tick, life.died - clock, KINDS.index(self.kind_of(life))))
            elif comes:
                births.append((tick, life.size, life.kind, life.travels, life.sent))
                began.append(life)
        assert now == self.live - live, "every byte comes and goes at a tick"
        sizes, born, died, kinds = np.array(inner, np.int64).reshape(-1, 4).T
        events = np.array(self.ticks[clock:], np.int64) - event
        return LifetimeDelta(events, sizes, born, died, kinds, tuple(births), tuple(deaths), now, top), began, ended

    def again(self, stretch: LifetimeDelta, event: int, ending: Iterable[StorageLifetime]) -> list[StorageLifetime]:
        """Count a stretch once more, from the event of this number on. ending: the lives that end in it, as `deaths` tells of them.

        Returns the lives that begin in it and go on, as `births` tells of them: nobody holds a storage for these.
        """
        clock = self.clock
        for tick, life in zip(stretch.deaths, ending, strict=True):
            life.died = clock + tick
        lives = [
            StorageLifetime(size, clock + tick, self._forward, kind=kind, travels=travels, sent=sent)
            for tick, size, kind, travels, sent in stretch.births
        ]
        self.lives += lives
        if self.live + stretch.top[0] > self.peak:
            self.peak, self.peak_clock, self.peak_event = (
                self.live + stretch.top[0],
                clock + stretch.top[1],
                event + stretch.top[2],
            )
        self._again.append((clock, stretch))
        self.ticks.frombytes((stretch.events + event).tobytes())
        self._moves += [None] * len(stretch.events)
        self.clock += len(stretch.events)
        self.live += stretch.live
        return lives

    def known(self, tensor: Tensor) -> StorageLifetime | None:
        """The life of a tensor's storage, if it was seen."""
        return self._open.get(tensor.untyped_storage()._cdata, (None,))[0]

    def embody(self, life: StorageLifetime, tensor: Tensor) -> None:
        """This tensor's storage is what lives: it ends when the storage does."""
        self._hold(life, tensor.untyped_storage())

    def release(self, tensor: Tensor) -> StorageLifetime:
        """The life of a tensor's storage, which from now on ends when somebody says so."""
        return self._open.pop(tensor.untyped_storage()._cdata)[0]

    def end(self, lives: Iterable[StorageLifetime]) -> None:
        """These lives, of which nobody holds a storage, end now."""
        for life in lives:
            self._end(life)

    def _hold(self, life: StorageLifetime, storage: UntypedStorage) -> None:
        key = storage._cdata
        self._open[key] = life, weakref.ref(storage, lambda _: self._end(self._open.pop(key)[0]))

    def _tick(self, life: StorageLifetime) -> None:
        self.clock += 1
        self.ticks.append(self.event)
        self._moves.append(life)

    def _begin(self, size: int) -> StorageLifetime:
        life = StorageLifetime(size, self.clock, self._forward)
        self._tick(life)
        self.lives.append(life)
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_clock, self.peak_event = self.live, life.born, self.event
        return life

    def _end(self, life: StorageLifetime) -> None:
        life.died = self.clock
        self._tick(life)
        self.live -= life.size


def forwards_waiting(trace: Trace) -> int:
    """Forward passes at the peak whose backward pass had not ended."""
    passes = [
        name[0]
        for event in trace.events[: trace.peak_event + 1]
        if event.kind == "action"
        for name in event.name.split(TOGETHER)
        if name[0] in "FB"
    ]
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
    return (
        f"{name}, {(worst.peak - least.peak) / 2**30:.2f} GiB more than rank {least.rank} ({_place(least)}), which needs least: "
        f"{', '.join(parts)} more"
    )


def _place(trace: Trace) -> str:
    return ", ".join(f"{axis} {rank}" for axis, rank in trace.place.items() if axis in ("pp", "tp", "ep")) or "alone"
