"""WholeMatrixRule: the base of update rules that need the whole matrix for the update of any of its elements.

A matrix may be sharded over tensor ranks, and over data-parallel ranks by the distributed optimizer or FSDP2. Data-parallel
ranks send their parts of a direction (a gradient, a momentum) to one owner, which sends the update back:

    rank 0 owns   [ fc2 . . . . . | q k v . . ]         to the owner      rank 0: all of fc2
    rank 1 owns   [ . . . q k v | fc1 . . . . . ]       ------------->    rank 1: all of q k v, all of fc1; and back

Owners follow from shapes alone (`assign_matrix_owners`), so all ranks choose the same ones. What is sharded over tensor ranks
after that, a rule gathers itself (`_gather_tensor_shards`), or works on in shards. The segments of a fused matrix and experts
are separate matrices. A rule has four methods: `_cost`, `_direction`, `_updates` and `checkpoint_state`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import ParamOwnership
from megatron.core.optimizer.rule import Owned, UpdateRule, UpdateRuleContext, is_updated_as_matrix, scale_gradients
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.spec import ParamSpec, ShardedDim, local_shard_boxes

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


@dataclass(frozen=True, slots=True)
class _OwnedPart:
    """The part of a parameter that this rank owns, from element `low` of its local tensor on. main: its main weight, flat."""

    low: int
    main: Tensor


class WholeMatrixRule(UpdateRule):
    """Updates the matrices of this rank's stages.

    owned_parts: by parameter name. tasks: data-parallel axis -> matrices with their owners, equal on its ranks.
    owners_hold_state: an owner keeps state of the whole matrix, so it must own a segment, with which that is saved.
    """

    owners_hold_state: ClassVar[bool] = False

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        """Assign the matrices to owners."""
        super().__init__(owned, config, context)
        self.mesh = mesh = context.mesh
        self.nothing = torch.zeros(0, dtype=context.main_dtype, device=mesh.device)
        self.owned_parts = {segment.name: _OwnedPart(segment.low, main) for segment, main in owned}
        by_axis: dict[str, list[MatrixTask]] = {}
        for one in (
            one
            for parallel in context.parallels
            for one in parallel.param_ownership()
            if is_updated_as_matrix(one.spec, config)
        ):
            tasks = matrix_tasks_of_param(one, self._splits_fused_matrix, self._cost)
            by_axis.setdefault(one.spec.reduce_over, []).extend(tasks)
        self.tasks = {
            axis: assign_matrix_owners(tasks, mesh.axis(axis).size, of_holders=self.owners_hold_state)
            for axis, tasks in by_axis.items()
        }

    @property
    def lr(self) -> float:
        """The learning rate of the next step; all matrices are one group. Unused on a rank that owns none."""
        return self.param_groups[0]["lr"] if self.param_groups else 0.0

    @abstractmethod
    def _cost(self, rows: int, columns: int) -> float:
        """Return about how many multiplications the update of a matrix takes, by which owners are chosen."""

    @abstractmethod
    def _direction(self, name: str, main: Tensor) -> Tensor:
        """Return what the update of a matrix is computed from, of the elements that this rank owns.

        main: main weight [elements] of parameter `name`, with its gradient.
        """

    @abstractmethod
    def _updates(self, tasks: Sequence[MatrixTask], flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the updates of matrices of which this rank is the owner, or which every data-parallel rank updates.

        flats: this tensor rank's directions of the matrices, flat; the updates, before the learning rate, are like them.
        """

    def step(self, factor: float | Tensor) -> None:
        """Update the main weights by their gradients times `factor`, a scalar.

        Collective: all ranks that share matrices take part, also those that own none.
        """
        scale_gradients([owned_part.main for owned_part in self.owned_parts.values()], factor)
        directions = {name: self._direction(name, owned_part.main) for name, owned_part in self.owned_parts.items()}
        for settings in self.param_groups:
            torch._foreach_mul_(settings["params"], 1.0 - settings["lr"] * settings["weight_decay"])
        for name, tasks in self.tasks.items():
            for round_index in range(max(task.round_index for task in tasks) + 1):
                self._update_round(
                    [task for task in tasks if task.round_index == round_index], directions, self.mesh.axis(name)
                )

    def _update_round(self, tasks: Sequence[MatrixTask], directions: Mapping[str, Tensor], axis: Axis) -> None:
        """Update the matrices of one round: sharded ones by their owners, all others by every rank for itself."""
        whole = [task for task in tasks if not task.is_sharded]
        flats = [self._direction_slice(task, directions, 0, task.high - task.low) for task in whole]
        for task, update in zip(whole, self._updates(whole, flats), strict=True):
            self._apply_update(task, update, 0)
        if len(whole) < len(tasks):
            sharded = sorted((task for task in tasks if task.is_sharded), key=lambda task: task.owner)
            self._update_by_owners(sharded, directions, axis)

    def _update_by_owners(self, sharded: Sequence[MatrixTask], directions: Mapping[str, Tensor], axis: Axis) -> None:
        """Send the directions of sharded matrices, sorted by owner, to their owners, which send the updates back."""
        own_tasks = [task for task in sharded if task.owner == axis.rank]
        sent = [task.ranges[axis.rank] for task in sharded]
        sizes = [high - low for low, high in sent]
        out = [
            sum(size for task, size in zip(sharded, sizes, strict=True) if task.owner == rank)
            for rank in range(axis.size)
        ]
        back = [sum(task.ranges[rank][1] - task.ranges[rank][0] for task in own_tasks) for rank in range(axis.size)]
        outgoing = [
            self._direction_slice(task, directions, low, high)
            for task, (low, high) in zip(sharded, sent, strict=True)
            if low < high
        ]
        received, work = collectives.start_all_to_all(torch.cat([self.nothing, *outgoing]), out, back, axis)
        collectives.wait(work)
        updates = _pack_send_buffer(
            self._updates(own_tasks, _assemble_matrices(own_tasks, received, axis.size)),
            own_tasks,
            axis.size,
            self.nothing,
        )
        received, work = collectives.start_all_to_all(updates, back, out, axis)
        collectives.wait(work)
        for task, (low, _), update in zip(sharded, sent, received.split(sizes), strict=True):
            self._apply_update(task, update, low)

    def _direction_slice(self, task: MatrixTask, directions: Mapping[str, Tensor], low: int, high: int) -> Tensor:
        """Return elements [low, high) of a matrix's direction, which this rank owns. directions: by parameter name."""
        start = task.low - self.owned_parts[task.name].low
        return directions[task.name][start + low : start + high]

    def _apply_update(self, task: MatrixTask, update: Tensor, low: int) -> None:
        """Subtract an update from this rank's elements of a matrix, from element `low` on."""
        if update.numel():
            start = task.low - self.owned_parts[task.name].low + low
            self.owned_parts[task.name].main[start : start + update.numel()].add_(update, alpha=-self.lr)

    def _splits_fused_matrix(self, spec: ParamSpec) -> bool:
        """Return whether the segments of a fused matrix are matrices of their own."""
        return True

    def _gather_tensor_shards(self, x: Tensor, spec: ParamSpec) -> Tensor:
        """Return whole matrices [k, *spec.shape] of this tensor rank's shards of them, x: [k, rows, columns]. Collective."""
        if not spec.shards:
            return x
        tp_shard = spec.shards[0]
        axis = self.mesh.axis(tp_shard.axis)
        held = collectives.all_gather(x[None], axis)
        whole = x.new_empty((len(x), *spec.shape))
        for rank in range(axis.size):
            for shard in local_shard_boxes(spec, self.mesh.with_axes({tp_shard.axis: replace(axis, rank=rank)})):
                if shard.is_first_replica:
                    into = (slice(None), *shard.box.slices())
                    whole[into] = held[rank][(slice(None), *shard.local.slices())]
        return whole

    def _local_tensor_shard(self, whole: Tensor, spec: ParamSpec, shape: Sequence[int]) -> Tensor:
        """Return this tensor rank's shard of whole matrices. whole: [k, *spec.shape]; shape: of the shard of one."""
        if not spec.shards:
            return whole
        local = whole.new_zeros((len(whole), *shape))
        for shard in local_shard_boxes(spec, self.mesh):
            local[(slice(None), *shard.local.slices())] = whole[(slice(None), *shard.box.slices())]
        return local


def _assemble_matrices(tasks: Sequence[MatrixTask], received: Tensor, ranks: int) -> list[Tensor]:
    """Return whole matrices, flat, from the received parts, which are ordered by sender and then by task."""
    whole = [received.new_empty(task.high - task.low) for task in tasks]
    start = 0
    for rank in range(ranks):
        for task, flat in zip(tasks, whole, strict=True):
            low, high = task.ranges[rank]
            flat[low:high] = received[start : start + high - low]
            start += high - low
    return whole


def _pack_send_buffer(updates: Sequence[Tensor], tasks: Sequence[MatrixTask], ranks: int, nothing: Tensor) -> Tensor:
    """Concatenate what goes to each rank of the updates of whole matrices, ordered by receiver and then by task: the
    send buffer of an all-to-all. nothing: an empty tensor of the dtype.
    """
    return torch.cat(
        [
            nothing,
            *(
                update[task.ranges[rank][0] : task.ranges[rank][1]]
                for rank in range(ranks)
                for task, update in zip(tasks, updates, strict=True)
            ),
        ]
    )


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

    The most expensive comes first, and each goes to the rank with the least work (Graham, 1969: at most 4/3 of the
    optimum); among equals to the one that owns most of the matrix. of_holders: only ranks that own some of a matrix may
    become its owner, so that state of the whole is saved with a segment of it.
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
