"""Memory of a simulated training step: the lifetime of every storage, by kind.

A storage is counted once, by its own size, however many tensors view it. So the totals are those of an allocator that never rounds;
fragmentation, and workspace that a kernel allocates internally, are not included.

    weights, gradients, optimizer   known by name once the trainer is built; weights also while FSDP2 has them gathered
    activations     created or received by a forward pass, and still allocated when it ended
    communication   of the rest, inputs and outputs of collectives and messages
    temporaries     everything else: created and freed within one action

Repeated microbatches need not be simulated again (memoization.py): an `AllocationTrace` records the allocations of a stretch of the step, and
`StorageTracker.replay` counts it once more.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, UntypedStorage

from megatron.plan.simulate.torch_internals import storage_key
from megatron.plan.simulate.trace import KINDS, TOGETHER, MemoryByKind

_FOREVER = 1 << 62
_POINTS = 1000  # of a thinned timeline


@dataclass(slots=True)
class StorageLifetime:
    """One storage from its allocation to its release.

    born, died: ticks of the tracker's clock. forward: number of the forward pass that created it, or -1. travels: a collective or message used
    it; sent: it was sent to another rank. elsewhere: it is in host memory and takes no device memory.
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
    def is_allocated(self) -> bool:
        """Whether it is still allocated."""
        return self.died == _FOREVER


@dataclass(frozen=True, slots=True)
class AllocationTrace:
    """Allocations and releases between two moments. Bytes, ticks and event numbers count from the first moment.

    events: the event of every tick. sizes, born, died, kinds: of storages allocated and released within (kinds are indices into KINDS). births:
    (tick, size, kind, travels, sent) of storages that stay allocated. deaths: ticks at which earlier storages were released. live:
    change in allocated bytes. top: (highest change in bytes, its tick, its event).
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

    def same_as(self, other: AllocationTrace) -> bool:
        """Whether both traces have the same allocations and releases at the same ticks."""
        return (self.births, self.deaths, self.live, self.top) == (
            other.births,
            other.deaths,
            other.live,
            other.top,
        ) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("events", "sizes", "born", "died", "kinds")
        )


class StorageTracker:
    """All storages of a simulated step. Its clock ticks at every allocation and every release."""

    def __init__(self) -> None:
        self.live = self.peak = self.clock = self.peak_clock = self.peak_event = 0
        self.event = 0  # index of the event under way
        self.lives: list[StorageLifetime] = []
        self.ticks = array("q")  # event at every tick of the clock
        # The storage that came or went at each tick; None in what is counted again.
        self._moves: list[StorageLifetime | None] = []
        self._again: list[tuple[int, AllocationTrace]] = []  # (clock before it, what was counted again)
        self._open: dict[int, tuple[StorageLifetime, weakref.ref]] = {}
        self._forward = -1  # the number of the pass under way
        self._forward_ends: list[int] = []  # the clock at the end of each
        self._forwards: dict[str, int] = {}  # action -> number
        self._microbatches: list[str] = []  # of each forward pass

    def track(self, tensor: Tensor, *, elsewhere: bool = False) -> None:
        """Count the storage of a tensor (any shape), if it is new.

        elsewhere: it is in host memory, and counts as 0 bytes.
        """
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._open:
            self._end_lifetime_when_freed(self._begin_lifetime(0 if elsewhere else storage.nbytes()), storage)
            if elsewhere:
                self._open[storage_key(storage)][0].elsewhere = True

    def track_resize(self, storage: UntypedStorage) -> None:
        """Note that FSDP2 has freed or reallocated a storage of gathered weights."""
        if storage_key(storage) not in self._open:
            return
        life, reference = self._open[storage_key(storage)]
        if life.size != storage.nbytes():
            life.kind = "weights"
            self._end_lifetime(life)
            life = self._begin_lifetime(storage.nbytes())
            life.kind = "weights"
            self._open[storage_key(storage)] = life, reference

    def lifetime_of(self, tensor: Tensor) -> StorageLifetime:
        """Return the lifetime of the storage of a tensor (any shape)."""
        self.track(tensor)
        return self._open[storage_key(tensor.untyped_storage())][0]

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of the storages of these tensors (any shape), unless they have one."""
        for tensor in tensors:
            life = self.lifetime_of(tensor)
            life.kind = life.kind or kind

    def count_as_zero(self, tensor: Tensor) -> None:
        """Count the storage of a tensor (any shape) as 0 bytes from now on: of a parameter that is on the meta device."""
        life, storage = self.lifetime_of(tensor), tensor.untyped_storage()
        self._end_lifetime(life)
        self._open[storage_key(storage)] = self._begin_lifetime(0), self._open[storage_key(storage)][1]

    def begin_peak_measurement(self) -> None:
        """Start to measure the peak."""
        self.peak, self.peak_clock, self.peak_event = self.live, self.clock, self.event

    def begin_action(self, action: str) -> None:
        """Start or resume an action of the schedule. Storages allocated in a forward pass (such as F0.3) belong to it."""
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
        """Return the kind of a storage, which for unlabelled ones follows from its lifetime."""
        if life.kind:
            return life.kind
        if life.forward >= 0 and life.died > self._forward_ends[life.forward] and not life.sent:
            return "activations"
        return "communication" if life.travels else "temporaries"

    def memory_at(self, clock: int) -> MemoryByKind:
        """Return the bytes allocated right after a tick, by kind."""
        held = dict.fromkeys(KINDS, 0)
        for life in self.lives:
            if life.born <= clock < life.died:
                held[self.kind_of(life)] += life.size
        for began, trace in self._again:
            if began <= clock < began + len(trace.events):
                alive = (trace.born <= clock - began) & (clock - began < trace.died)
                for kind, size in zip(trace.kinds[alive], trace.sizes[alive], strict=True):
                    held[KINDS[kind]] += int(size)
        return MemoryByKind(**held)

    def bytes_kept_per_microbatch(self, clock: int) -> int:
        """Return the bytes that the forward passes of a microbatch leave allocated at a tick.

        That of the microbatch with the least: the first one can leave what serves all, and the last one what is still to be freed.
        """
        sizes = dict.fromkeys(self._microbatches, 0)
        for life in self.lives:
            if life.forward >= 0 and life.born < clock <= life.died:
                sizes[self._microbatches[life.forward]] += life.size
        return min(sizes.values(), default=0)

    def timeline(self, begin: int) -> tuple[tuple[int, MemoryByKind], ...]:
        """Return (event, bytes by kind) from a tick on, subsampled: the highest moment of every stretch."""
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
        totals, trace = held.sum() + np.cumsum(moves[:, 2]), max(1, len(moves) // _POINTS)
        best = [low + int(np.argmax(totals[low : low + trace])) for low in range(0, len(moves), trace)]
        by_kind = [
            held[place] + np.cumsum(np.where(moves[:, 1] == place, moves[:, 2], 0)) for place in range(len(KINDS))
        ]
        return tuple((self.ticks[moves[at, 0]], MemoryByKind(*(int(one[at]) for one in by_kind))) for at in best)

    # What happened before, once more.

    def trace_since(
        self, clock: int, event: int, live: int
    ) -> tuple[AllocationTrace, list[StorageLifetime], list[StorageLifetime]]:
        """Return the allocations since a moment (clock, number of events and allocated bytes then), none of which were
        replayed. Also the lifetimes that began since then and continue, and the earlier ones that ended, in the order
        of `births` and `deaths`.
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
        return AllocationTrace(events, sizes, born, died, kinds, tuple(births), tuple(deaths), now, top), began, ended

    def replay(self, trace: AllocationTrace, event: int, ending: Iterable[StorageLifetime]) -> list[StorageLifetime]:
        """Count a recorded trace once more, from an event number on. ending: the earlier storages that end in it, in the order of `deaths`.

        Returns the lifetimes of the storages that stay allocated, in the order of `births`; no tensor has them yet (see `attach_lifetime`).
        """
        clock = self.clock
        for tick, life in zip(trace.deaths, ending, strict=True):
            life.died = clock + tick
        lives = [
            StorageLifetime(size, clock + tick, self._forward, kind=kind, travels=travels, sent=sent)
            for tick, size, kind, travels, sent in trace.births
        ]
        self.lives += lives
        if self.live + trace.top[0] > self.peak:
            self.peak, self.peak_clock, self.peak_event = (
                self.live + trace.top[0],
                clock + trace.top[1],
                event + trace.top[2],
            )
        self._again.append((clock, trace))
        self.ticks.frombytes((trace.events + event).tobytes())
        self._moves += [None] * len(trace.events)
        self.clock += len(trace.events)
        self.live += trace.live
        return lives

    def find_lifetime(self, tensor: Tensor) -> StorageLifetime | None:
        """Return the lifetime of the storage of a tensor (any shape); None if it was never counted."""
        return self._open.get(storage_key(tensor.untyped_storage()), (None,))[0]

    def attach_lifetime(self, life: StorageLifetime, tensor: Tensor) -> None:
        """Let a replayed lifetime end when the storage of this tensor (any shape) is freed."""
        self._end_lifetime_when_freed(life, tensor.untyped_storage())

    def detach_lifetime(self, tensor: Tensor) -> StorageLifetime:
        """Stop following the reference count of a tensor's storage (any shape);

        the caller ends the returned lifetime explicitly.
        """
        return self._open.pop(storage_key(tensor.untyped_storage()))[0]

    def end_lifetimes(self, lives: Iterable[StorageLifetime]) -> None:
        """End lifetimes that no storage is attached to."""
        for life in lives:
            self._end_lifetime(life)

    def _end_lifetime_when_freed(self, life: StorageLifetime, storage: UntypedStorage) -> None:
        """Let a lifetime end when this storage is freed."""
        key = storage_key(storage)
        self._open[key] = life, weakref.ref(storage, lambda _: self._end_lifetime(self._open.pop(key)[0]))

    def _log_clock_tick(self, life: StorageLifetime) -> None:
        """Advance the clock by one tick, for an allocation or release of this lifetime."""
        self.clock += 1
        self.ticks.append(self.event)
        self._moves.append(life)

    def _begin_lifetime(self, size: int) -> StorageLifetime:
        life = StorageLifetime(size, self.clock, self._forward)
        self._log_clock_tick(life)
        self.lives.append(life)
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_clock, self.peak_event = self.live, life.born, self.event
        return life

    def _end_lifetime(self, life: StorageLifetime) -> None:
        life.died = self.clock
        self._log_clock_tick(life)
        self.live -= life.size
