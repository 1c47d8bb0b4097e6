"""Assigns matrices to the data-parallel ranks that compute their updates, when each rank owns only a range of a matrix.

    rank 0 owns   [ fc2 . . . . . | q k v . . ]         to the owner      rank 0: all of fc2
    rank 1 owns   [ . . . q k v | fc1 . . . . . ]       ------------->    rank 1: all of q k v, all of fc1; and back

The assignment follows from shapes alone, so all ranks compute the same one without communication. The most expensive
matrix comes first, and each goes to the rank with the least work so far (Graham, 1969: at most 4/3 - 1/(3 ranks) of the
optimum).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.core.distributed.buffers import ParamOwnership
from megatron.core.parallel.spec import ParamSpec, ShardedDim

_ROUND = 2**26  # elements that an owner receives in one round


@dataclass(frozen=True, slots=True)
class MatrixTask:
    """One matrix to update as a whole: flat elements [low, high) of a parameter's local tensor (all, or one expert).

    spec: of the matrix, without the expert dimension. shape: of this rank's local matrix. ranges: the elements that
    each data-parallel rank owns, relative to `low`. cost: multiplications of an update. owner: data-parallel rank that
    computes the update, in round `round_index`.
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


def matrix_tasks_of_param(
    owned: ParamOwnership, is_split: Callable[[ParamSpec], bool], cost: Callable[[int, int], float]
) -> list[MatrixTask]:
    """Return the matrices of a parameter: one, or those of its experts.

    is_split: whether the segments of a fused parameter are separate matrices. cost: multiplications of an update of
    rows x columns.
    """
    name, spec, shape, count = owned.spec.name, owned.spec, owned.local_shape, 1
    if spec.stacked:
        shards = tuple(ShardedDim(shard.dim - 1, shard.axis, shard.segments) for shard in spec.shards if shard.dim > 0)
        spec, count, shape = replace(spec, shape=spec.shape[1:], shards=shards, stacked=False), shape[0], shape[1:]
    assert len(spec.shape) == 2, f"{name} of shape {spec.shape} is no matrix"
    rows, columns = shape
    size, total = rows * columns, sum(cost(m, n) for m, n in part_shapes(spec, is_split=is_split(spec)))
    tasks = []
    for low in range(0, count * size, size):
        ranges = tuple((min(max(a - low, 0), size), min(max(b - low, 0), size)) for a, b in owned.ranges)
        tasks.append(MatrixTask(name, spec, (rows, columns), low, low + size, ranges, total))
    return tasks


def part_shapes(spec: ParamSpec, *, is_split: bool = True) -> list[tuple[int, int]]:
    """Return the shapes of the segments of a fused matrix, or if it is none, or not `is_split`, that of the matrix."""
    rows, columns = spec.shape
    if not spec.shards or not is_split:
        return [(rows, columns)]
    return [(part.size, columns) if spec.shards[0].dim == 0 else (rows, part.size) for part in spec.shards[0].segments]


def assign_matrix_owners(tasks: Sequence[MatrixTask], ranks: int, *, of_holders: bool = False) -> list[MatrixTask]:
    """Return the tasks with owners and rounds set, in the same order.

    Each goes to the rank with the least work; among equals to the one that owns most of the matrix. of_holders: only
    ranks that own some of a matrix may become its owner, so that state of the whole is saved with a segment of it.
    """
    load, taken = [0.0] * ranks, [0] * ranks
    assigned: dict[int, MatrixTask] = {}
    for place in sorted(range(len(tasks)), key=lambda place: (-tasks[place].cost, place)):
        task = tasks[place]
        held = [high - low for low, high in task.ranges]
        candidates = [rank for rank in range(ranks) if held[rank] or not of_holders]
        owner = min(candidates, key=lambda rank: (load[rank], -held[rank], rank))
        assigned[place] = replace(task, owner=owner, round_index=taken[owner] // _ROUND)
        load[owner] += task.cost
        taken[owner] += task.high - task.low
    return [assigned[place] for place in range(len(tasks))]
