"""States of layers that keep one instead of keys and values: Mamba-2, gated delta net. One of constant size for each text, whatever its length.

    slot 0        the state before any text; only read
    slot 1        written where nobody will read
    then          of each running text one, or with draft tokens one for each that a pass checks: the pass writes the state behind every one,
                  and the text goes on from that of the last accepted
    then          snapshots at the ends of blocks, for texts that begin alike

A pass is told for every text which slot it goes on from and which it writes, so that the ranks keep no books. A cached prefix is used as far as
there is a snapshot: keys and values alone would not do.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.transformer.context.cache import Mix, MixerState, StatefulMixer

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLANK, NOWHERE, _FIRST = 0, 1, 2
_INTERVAL = 512  # tokens between snapshots, beside the one at the end of the prompt


@dataclass(frozen=True, slots=True)
class StateReadWriteSlots:
    """State slots of a sequence in a pass: the one read, those written after its last tokens, the snapshot's."""

    read: int = BLANK
    write: tuple[int, ...] = ()
    snapshot: int = NOWHERE


def stateful_mixers(stages: Iterable[nn.Module]) -> list[StatefulMixer]:
    """Return the mixers of these stages that keep a recurrent state, in order."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, StatefulMixer)]


@dataclass(frozen=True, slots=True)
class RecurrentStateDtypes:
    """Dtypes in which convolution inputs and scan states are stored; None: those in which a mixer computes them."""

    conv: torch.dtype | None = None
    scan: torch.dtype | None = None

    @staticmethod
    def from_config(config: InferenceConfig) -> RecurrentStateDtypes:
        """Return the dtypes that the flags ask for."""
        return RecurrentStateDtypes(
            *(
                None if word is None else _FORMATS[word]
                for word in (config.mamba_inference_conv_states_dtype, config.mamba_inference_ssm_states_dtype)
            )
        )

    def new_zero_states(self, mixer: StatefulMixer, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` initial (zero) states: conv [count, width - 1, c/tp], scan [count, n/tp, ...]."""
        first = mixer.initial_state(1)
        conv, scan = first.conv.transpose(0, 1), first.scan
        return (
            conv.new_zeros((count, *conv.shape[1:]), dtype=self.conv or conv.dtype),
            scan.new_zeros((count, *scan.shape[1:]), dtype=self.scan or scan.dtype),
        )


def recurrent_state_bytes(stages: Iterable[nn.Module], formats: RecurrentStateDtypes = RecurrentStateDtypes()) -> int:
    """Return the bytes of one sequence's recurrent states on this rank."""
    return sum(part.nbytes for mixer in stateful_mixers(stages) for part in formats.new_zero_states(mixer, 1))


def num_recurrent_state_slots(texts: int, drafts: int, snapshots: int) -> int:
    """Return the number of slots for so many running sequences, draft tokens of each, and snapshots."""
    return _FIRST + texts * (1 + drafts) + snapshots


class StatePool:
    """The states of one rank: for each mixer conv [slots, width - 1, c/tp] and scan [slots, n/tp, ...]."""

    def __init__(
        self, stages: Iterable[nn.Module], slots: int, formats: RecurrentStateDtypes = RecurrentStateDtypes()
    ) -> None:
        self._states = {mixer: formats.new_zero_states(mixer, slots) for mixer in stateful_mixers(stages)}
        self._computed = {mixer: mixer.initial_state(0) for mixer in self._states}

    def read(self, mixer: StatefulMixer, slots: Tensor) -> MixerState:
        """Return the states in these slots, int64 [b], in the dtypes that the mixer computes in."""
        (conv, scan), computed = self._states[mixer], self._computed[mixer]
        return MixerState(
            conv.index_select(0, slots).transpose(0, 1).to(computed.conv.dtype),
            scan.index_select(0, slots).to(computed.scan.dtype),
        )

    def write(self, mixer: StatefulMixer, slots: Tensor, state: MixerState) -> None:
        """Write the states of b sequences into slots, int64 [b]."""
        conv, scan = self._states[mixer]
        conv.index_copy_(0, slots, state.conv.transpose(0, 1).to(conv.dtype))
        scan.index_copy_(0, slots, state.scan.to(scan.dtype))


def state_slot_columns(rows: Sequence[StateReadWriteSlots], queries: int) -> list[list[int]]:
    """Return for sequences with equally many new tokens their slots by column: read, snapshot, and those written. One
    written column if only states after the last tokens are needed, else one for every token.
    """
    width = queries if any(len(row.write) > 1 for row in rows) else 1
    written = [(NOWHERE,) * (width - len(row.write)) + row.write for row in rows]
    return [[row.read for row in rows], [row.snapshot for row in rows], *map(list, zip(*written, strict=True))]


@dataclass(frozen=True, slots=True)
class EqualLengthGroup:
    """Sequences with equally many new tokens, end to end from token `first` on. queries: new tokens of each. columns:
    as `state_slot_columns` returns them, int64 [b] each; keeps: whether some are stored as snapshots.
    """

    first: int
    queries: int
    columns: Sequence[Tensor]
    keeps: bool

    def scan(self, pool: StatePool, mixer: StatefulMixer, parts: Sequence[Tensor], mix: Mix) -> Tensor:
        """Run `mix` on this group's tokens from their states, and write the new states. parts: each [t, 1, ...] of all
        groups; returns [b * queries, 1, ...].
        """
        read, snapshot, *written = self.columns
        rows = len(read)
        own = [
            part[self.first : self.first + rows * self.queries, 0].unflatten(0, (rows, self.queries)).transpose(0, 1)
            for part in parts
        ]
        state, outputs = pool.read(mixer, read), []
        step = self.queries // len(written)
        for column, slots in enumerate(written):
            output, state = mix([part[column * step : (column + 1) * step] for part in own], state)
            outputs.append(output)
            pool.write(mixer, slots, state)
        if self.keeps:
            pool.write(mixer, snapshot, state)
        return torch.cat(outputs).transpose(0, 1).flatten(0, 1)[:, None]


class StepStateSlots:
    """State slots of a pass: `rows` by group and sequence. queries: new tokens of each; pool: None without states."""

    def __init__(
        self, rows: Iterable[Sequence[StateReadWriteSlots]], queries: Iterable[int], pool: StatePool | None
    ) -> None:
        self._pool, self._queries = pool, list(queries)
        self._columns = [state_slot_columns(group, count) for group, count in zip(rows, self._queries, strict=True)]

    @property
    def arrays_to_upload(self) -> list[np.ndarray]:
        """The slots as int32 arrays [b], to be copied to the device."""
        if self._pool is None:
            return []
        return [np.array(column, np.int32) for group in self._columns for column in group]

    def pool_and_groups(self, uploaded: Iterable[Tensor]) -> tuple[StatePool, list[EqualLengthGroup]] | None:
        """Return the pool and the groups with slots, or None. uploaded: `arrays_to_upload` on the device, [b]."""
        if self._pool is None:
            return None
        groups, first, given = list[EqualLengthGroup](), 0, iter(uploaded)
        for queries, columns in zip(self._queries, self._columns, strict=True):
            slots = [next(given).to(torch.int64) for _ in columns]
            groups.append(EqualLengthGroup(first, queries, slots, any(slot != NOWHERE for slot in columns[1])))
            first += queries * len(columns[0])
        return self._pool, groups


class StateSlotAllocator:
    """Allocates the state slots of one data-parallel replica. texts: sequences that run at once; drafts: draft tokens
    of each; snapshots: number kept. A snapshot's key is the hash of all tokens before it. One that a sequence is about
    to read is pinned; of the others the least recently used is evicted.
    """

    def __init__(self, texts: int, drafts: int, snapshots: int) -> None:
        size = 1 + drafts
        self._free = [tuple(range(_FIRST + n * size, _FIRST + (n + 1) * size)) for n in reversed(range(texts))]
        first = _FIRST + texts * size
        self._blank = list(range(first, first + snapshots))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: dict[bytes, int] = {}
        self.shares = snapshots > 0

    @property
    def num_snapshots(self) -> int:
        """Number of stored snapshots."""
        return len(self._snapshots)

    def allocate(self) -> tuple[int, ...]:
        """Allocate the slots of a sequence that begins to run."""
        return self._free.pop()

    def release(self, slots: tuple[int, ...]) -> None:
        """Give a text's slots back."""
        self._free.append(slots)

    def num_blocks_with_snapshot(self, marks: Sequence[bytes]) -> int:
        """Return the blocks of the longest prefix with a snapshot, or 0. marks: prefix hashes, block by block."""
        return next((count for count in range(len(marks), 0, -1) if marks[count - 1] in self._snapshots), 0)

    def pin_snapshot(self, mark: bytes) -> int:
        """Pin a snapshot so that it is not evicted; return its slot."""
        self._snapshots.move_to_end(mark)
        self._pinned[mark] = self._pinned.get(mark, 0) + 1
        return self._snapshots[mark]

    def unpin_snapshot(self, mark: bytes) -> None:
        """Undo one `pin_snapshot`."""
        self._pinned[mark] -= 1
        if not self._pinned[mark]:
            del self._pinned[mark]

    def allocate_snapshot(self, mark: bytes) -> int:
        """Allocate a slot for a new snapshot, evicting if needed; NOWHERE if there is one with this hash, or no room."""
        if mark in self._snapshots:
            return NOWHERE
        if not self._blank:
            oldest = next((known for known in self._snapshots if known not in self._pinned), None)
            if oldest is None:
                return NOWHERE
            self._blank.append(self._snapshots.pop(oldest))
        return self._blank.pop()

    def record_snapshot(self, mark: bytes, slot: int) -> None:
        """Record that a snapshot has been written to a slot."""
        if mark in self._snapshots:
            self._blank.append(slot)
        else:
            self._snapshots[mark] = slot

    def return_unused_snapshot_slot(self, slot: int) -> None:
        """Give back a slot for a snapshot that was not written."""
        self._blank.append(slot)

    def clear_snapshots(self) -> None:
        """Forget all snapshots that are not pinned, as when the weights have changed."""
        for mark in [known for known in self._snapshots if known not in self._pinned]:
            self._blank.append(self._snapshots.pop(mark))


def next_snapshot_position(start: int, known: int, block: int) -> int:
    """Return the block end above `start` where the next snapshot is taken. known: length of the known text."""
    interval = max(block, _INTERVAL // block * block)
    regular, last = (start // interval + 1) * interval, (known - 1) // block * block
    return last if start < last < regular else regular


class StateSlotsOfSequence:
    """Slots of a running sequence. beginning: hash of the prefix whose snapshot it starts from, or None."""

    def __init__(self, slots: StateSlotAllocator, beginning: bytes | None) -> None:
        self._slots, self._own, self._pinned = slots, slots.allocate(), beginning
        self._read = BLANK if beginning is None else slots.pin_snapshot(beginning)
        self._pending = deque[tuple[bytes, int] | None]()  # snapshots of the steps that have not been taken

    @property
    def takes_snapshots(self) -> bool:
        """Whether snapshots are stored."""
        return self._slots.shares

    def slots_for_step(self, drafts: int, mark: bytes | None) -> StateReadWriteSlots:
        """Return the slots for the next pass. mark: hash of the prefix after which a snapshot is to be stored, or None."""
        slot = NOWHERE if mark is None else self._slots.allocate_snapshot(mark)
        self._pending.append(None if mark is None or slot == NOWHERE else (mark, slot))
        result = StateReadWriteSlots(self._read, self._own[: 1 + drafts], slot)
        self._read = self._own[0]
        return result

    def finish_pass(self, accepted: int) -> None:
        """Record that a pass is done, and store its snapshot. accepted: number of its accepted draft tokens."""
        if accepted:
            self._read = self._own[accepted]
        self._unpin_start_snapshot()
        if (snapshot := self._pending.popleft()) is not None:
            self._slots.record_snapshot(*snapshot)

    def release(self) -> None:
        """Give all slots back."""
        self._unpin_start_snapshot()
        self._slots.release(self._own)
        for snapshot in self._pending:
            if snapshot is not None:
                self._slots.return_unused_snapshot_slot(snapshot[1])
        self._pending.clear()

    def _unpin_start_snapshot(self) -> None:
        if self._pinned is not None:
            self._slots.unpin_snapshot(self._pinned)
            self._pinned = None
