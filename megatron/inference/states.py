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
from megatron.core.transformer.cache import Mix, StatefulMixer
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mamba import MambaMixer
from megatron.core.transformer.state_space import MixerState

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLANK, NOWHERE, _FIRST = 0, 1, 2
_INTERVAL = 512  # tokens between snapshots, beside the one at the end of the prompt


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of a text in a pass: the one it goes on from; those written behind its last tokens; the snapshot written behind the last of all."""

    read: int = BLANK
    write: tuple[int, ...] = ()
    snapshot: int = NOWHERE


def stateful_mixers(stages: Iterable[nn.Module]) -> list[StatefulMixer]:
    """The mixers of these stages that keep a state, in order."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, (MambaMixer, GatedDeltaNet))]


@dataclass(frozen=True, slots=True)
class StateFormats:
    """Formats in which the last inputs of convolutions and the states of scans are kept; None: those in which a mixer computes them."""

    conv: torch.dtype | None = None
    scan: torch.dtype | None = None

    @staticmethod
    def from_config(config: InferenceConfig) -> StateFormats:
        """The formats that the flags ask for."""
        return StateFormats(
            *(
                None if word is None else _FORMATS[word]
                for word in (config.mamba_inference_conv_states_dtype, config.mamba_inference_ssm_states_dtype)
            )
        )

    def first_slots(self, mixer: StatefulMixer, count: int) -> tuple[Tensor, Tensor]:
        """So many states before a text: conv [count, width - 1, c/tp], scan [count, n/tp, ...]."""
        first = mixer.initial_state(1)
        conv, scan = first.conv.transpose(0, 1), first.scan
        return (
            conv.new_zeros((count, *conv.shape[1:]), dtype=self.conv or conv.dtype),
            scan.new_zeros((count, *scan.shape[1:]), dtype=self.scan or scan.dtype),
        )


def state_bytes(stages: Iterable[nn.Module], formats: StateFormats = StateFormats()) -> int:
    """Bytes of the states of one text on this rank."""
    return sum(part.nbytes for mixer in stateful_mixers(stages) for part in formats.first_slots(mixer, 1))


def slot_count(texts: int, drafts: int, snapshots: int) -> int:
    """Slots for so many running texts, draft tokens of each and snapshots."""
    return _FIRST + texts * (1 + drafts) + snapshots


class StatePool:
    """The states of one rank: for each mixer conv [slots, width - 1, c/tp] and scan [slots, n/tp, ...]."""

    def __init__(self, stages: Iterable[nn.Module], slots: int, formats: StateFormats = StateFormats()) -> None:
        self._states = {mixer: formats.first_slots(mixer, slots) for mixer in stateful_mixers(stages)}
        self._computed = {mixer: mixer.initial_state(0) for mixer in self._states}

    def read(self, mixer: StatefulMixer, slots: Tensor) -> MixerState:
        """The states in these slots, int64 [b], in the formats of computing."""
        (conv, scan), computed = self._states[mixer], self._computed[mixer]
        return MixerState(
            conv.index_select(0, slots).transpose(0, 1).to(computed.conv.dtype),
            scan.index_select(0, slots).to(computed.scan.dtype),
        )

    def write(self, mixer: StatefulMixer, slots: Tensor, state: MixerState) -> None:
        """Write the states of b texts into slots, int64 [b]."""
        conv, scan = self._states[mixer]
        conv.index_copy_(0, slots, state.conv.transpose(0, 1).to(conv.dtype))
        scan.index_copy_(0, slots, state.scan.to(scan.dtype))


def slot_columns(rows: Sequence[StateSlots], queries: int) -> list[list[int]]:
    """Of texts with equally many new tokens, the slots that each pass over a column of them needs: read, snapshot, and those written.

    There is one column written if only the states behind the last tokens are asked for, else one for every token.
    """
    width = queries if any(len(row.write) > 1 for row in rows) else 1
    written = [(NOWHERE,) * (width - len(row.write)) + row.write for row in rows]
    return [[row.read for row in rows], [row.snapshot for row in rows], *map(list, zip(*written, strict=True))]


@dataclass(frozen=True, slots=True)
class EqualLengthGroup:
    """Texts with equally many new tokens, end to end from place `first` on. columns: as `slot_columns` returns them, int64 [b] each;
    keeps: whether some are to be kept as snapshots.
    """

    first: int
    queries: int
    columns: Sequence[Tensor]
    keeps: bool

    def scan(self, pool: StatePool, mixer: StatefulMixer, parts: Sequence[Tensor], mix: Mix) -> Tensor:
        """What `mix` makes of this group's tokens. parts: each [t, 1, ...] of all groups; returns [b * queries, 1, ...]."""
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


class StepSlots:
    """The slots of all groups of a pass. rows: the slots of their texts; queries: new tokens of one; pool: None where no layer has a state."""

    def __init__(self, rows: Iterable[Sequence[StateSlots]], queries: Iterable[int], pool: StatePool | None) -> None:
        self._pool, self._queries = pool, list(queries)
        self._columns = [slot_columns(group, count) for group, count in zip(rows, self._queries, strict=True)]

    @property
    def arrays_to_upload(self) -> list[np.ndarray]:
        """What is to be uploaded, int32 [b] each."""
        if self._pool is None:
            return []
        return [np.array(column, np.int32) for group in self._columns for column in group]

    def groups(self, uploaded: Iterable[Tensor]) -> tuple[StatePool, list[EqualLengthGroup]] | None:
        """The pool and the groups. uploaded: the arrays in their order, [b] each."""
        if self._pool is None:
            return None
        groups, first, given = list[EqualLengthGroup](), 0, iter(uploaded)
        for queries, columns in zip(self._queries, self._columns, strict=True):
            slots = [next(given).to(torch.int64) for _ in columns]
            groups.append(EqualLengthGroup(first, queries, slots, any(slot != NOWHERE for slot in columns[1])))
            first += queries * len(columns[0])
        return self._pool, groups


class SlotAllocator:
    """The books of one data-parallel replica's slots. texts: that run at once; drafts: draft tokens of each; snapshots: how many are kept.

    Snapshots are known by the hash of all tokens before them. One that a text is about to go on from is pinned; of the others the one longest
    unused goes.
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
        """How many snapshots there are."""
        return len(self._snapshots)

    def allocate(self) -> tuple[int, ...]:
        """The slots of a text that begins to run."""
        return self._free.pop()

    def release(self, slots: tuple[int, ...]) -> None:
        """Give a text's slots back."""
        self._free.append(slots)

    def longest_snapshot(self, marks: Sequence[bytes]) -> int:
        """How many of these beginnings, each one block longer than the one before, there are up to the longest with a snapshot."""
        return next((count for count in range(len(marks), 0, -1) if marks[count - 1] in self._snapshots), 0)

    def pin_snapshot(self, mark: bytes) -> int:
        """The slot of a snapshot, which stays until it is unpinned."""
        self._snapshots.move_to_end(mark)
        self._pinned[mark] = self._pinned.get(mark, 0) + 1
        return self._snapshots[mark]

    def unpin_snapshot(self, mark: bytes) -> None:
        """The snapshot may go."""
        self._pinned[mark] -= 1
        if not self._pinned[mark]:
            del self._pinned[mark]

    def allocate_snapshot(self, mark: bytes) -> int:
        """A slot for a new snapshot; NOWHERE if there is one of these tokens, or no room."""
        if mark in self._snapshots:
            return NOWHERE
        if not self._blank:
            oldest = next((known for known in self._snapshots if known not in self._pinned), None)
            if oldest is None:
                return NOWHERE
            self._blank.append(self._snapshots.pop(oldest))
        return self._blank.pop()

    def store_snapshot(self, mark: bytes, slot: int) -> None:
        """A snapshot has been written."""
        if mark in self._snapshots:
            self._blank.append(slot)
        else:
            self._snapshots[mark] = slot

    def discard_slot(self, slot: int) -> None:
        """Give back a slot for a snapshot that was not written."""
        self._blank.append(slot)

    def clear_snapshots(self) -> None:
        """Forget all snapshots, as when the weights have changed."""
        for mark in [known for known in self._snapshots if known not in self._pinned]:
            self._blank.append(self._snapshots.pop(mark))


def next_snapshot_position(start: int, known: int, block: int) -> int:
    """Where, behind `start` tokens of a text of which `known` are known, a snapshot is to be taken: at the end of a block."""
    interval = max(block, _INTERVAL // block * block)
    regular, last = (start // interval + 1) * interval, (known - 1) // block * block
    return last if start < last < regular else regular


class TextStates:
    """The slots of one running text. beginning: the mark of the snapshot that it goes on from; None: it begins."""

    def __init__(self, slots: SlotAllocator, beginning: bytes | None) -> None:
        self._slots, self._own, self._pinned = slots, slots.allocate(), beginning
        self._read = BLANK if beginning is None else slots.pin_snapshot(beginning)
        self._pending = deque[tuple[bytes, int] | None]()  # snapshots of the steps that have not been taken

    @property
    def takes_snapshots(self) -> bool:
        """Whether snapshots are taken."""
        return self._slots.shares

    def slots_for_step(self, drafts: int, mark: bytes | None) -> StateSlots:
        """Slots for the next pass. mark: of the tokens behind which a snapshot is to be taken, if any."""
        slot = NOWHERE if mark is None else self._slots.allocate_snapshot(mark)
        self._pending.append(None if mark is None or slot == NOWHERE else (mark, slot))
        result = StateSlots(self._read, self._own[: 1 + drafts], slot)
        self._read = self._own[0]
        return result

    def after_pass(self, accepted: int) -> None:
        """A pass is done. accepted: of its draft tokens."""
        if accepted:
            self._read = self._own[accepted]
        self._unpin()
        if (snapshot := self._pending.popleft()) is not None:
            self._slots.store_snapshot(*snapshot)

    def release(self) -> None:
        """Give all slots back."""
        self._unpin()
        self._slots.release(self._own)
        for snapshot in self._pending:
            if snapshot is not None:
                self._slots.discard_slot(snapshot[1])
        self._pending.clear()

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._slots.unpin_snapshot(self._pinned)
            self._pinned = None
