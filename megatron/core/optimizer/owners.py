"""Assigns matrices to the data-parallel ranks that orthogonalize them, when each rank owns only a range of a matrix.

    rank 0 owns   [ fc2 . . . . . | q k v . . ]         to the owner      rank 0: all of fc2
    rank 1 owns   [ . . . q k v | fc1 . . . . . ]       ------------->    rank 1: all of q k v, all of fc1; and back

The assignment follows from shapes alone, so all ranks compute the same one without communication. The most expensive
matrix comes first, and each goes to the rank with the least work so far (Graham, 1969: at most 4/3 - 1/(3 ranks) of the
optimum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.core.distributed.buffers import ParamOwnership
from megatron.core.parallel.spec import ParamSpec, ShardedDim

_ROUND = 2**26  # elements that an owner receives in one round


@dataclass(frozen=True, slots=True)
class MuonTask:
    """One matrix to orthogonalize: flat elements [low, high) of a parameter's local tensor (all, or one expert).

    spec: of the matrix, without the expert dimension. shape: of this rank's local matrix. ranges: the elements that
    each data-parallel rank owns, relative to `low`. cost: multiplications of one Newton-Schulz step. owner:
    data-parallel rank that orthogonalizes it, in round `round_index`.
    """

    name: str
    spec: ParamSpec
    shape: tuple[int, int]
    low: int
    high: int
    ranges: tuple[tuple[int, int], ...]
    cost: float
    owner: int = 0
    round_index: int = 0

    @property
    def is_sharded(self) -> bool:
        """Whether some rank owns only part of it."""
        return any(held != (0, self.high - self.low) for held in self.ranges)


def muon_tasks_of_param(owned: ParamOwnership, is_split: Callable[[ParamSpec], bool]) -> list[MuonTask]:
    """Return the matrices of a parameter. is_split: whether the segments of a fused parameter are separate matrices."""
    spec = owned.spec
    if not spec.stacked:
        assert len(spec.shape) == 2, f"{spec.name} of shape {spec.shape} is no matrix"
        return [_muon_task(owned, spec, owned.local_shape, 0, is_split(spec))]
    shards = tuple(ShardedDim(shard.dim - 1, shard.axis, shard.segments) for shard in spec.shards if shard.dim > 0)
    one = replace(spec, shape=spec.shape[1:], shards=shards, stacked=False)
    return [
        _muon_task(owned, one, owned.local_shape[1:], expert, is_split(spec)) for expert in range(owned.local_shape[0])
    ]


def _muon_task(owned: ParamOwnership, spec: ParamSpec, shape: tuple[int, ...], number: int, is_split: bool) -> MuonTask:
    """Return the task of one matrix, without owner and round. number: its position in a stack, or 0."""
    size = math.prod(shape)
    low = number * size
    ranges = tuple((min(max(a - low, 0), size), min(max(b - low, 0), size)) for a, b in owned.ranges)
    rows, columns = spec.shape
    parts = spec.shards[0].segments if spec.shards and is_split else ()
    sizes = [(part.size, columns) if spec.shards[0].dim == 0 else (rows, part.size) for part in parts] or [
        (rows, columns)
    ]
    cost = sum(min(m, n) ** 2 * (2.0 * max(m, n) + min(m, n)) for m, n in sizes)
    return MuonTask(owned.spec.name, spec, (shape[0], shape[1]), low, low + size, ranges, cost)


def assign_muon_owners(tasks: Sequence[MuonTask], ranks: int) -> list[MuonTask]:
    """Return the tasks with owners and rounds set, in the same order.

    Each goes to the rank with the least work; among equals to the one that owns most of the matrix.
    """
    load, taken = [0.0] * ranks, [0] * ranks
    assigned: dict[int, MuonTask] = {}
    for place in sorted(range(len(tasks)), key=lambda place: (-tasks[place].cost, place)):
        task = tasks[place]
        held = [high - low for low, high in task.ranges]
        owner = min(range(ranks), key=lambda rank: (load[rank], -held[rank], rank))
        assigned[place] = replace(task, owner=owner, round_index=taken[owner] // _ROUND)
        load[owner] += task.cost
        taken[owner] += task.high - task.low
    return [assigned[place] for place in range(len(tasks))]
