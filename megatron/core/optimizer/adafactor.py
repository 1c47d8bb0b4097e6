"""Adafactor: of the second moments of a matrix, only the means over its rows and over its columns are stored.

    r <- b r + (1 - b) mean of g^2 over a row        c <- b c + (1 - b) mean of g^2 over a column        b = 1 - step^-decay
    u = g / root(r c^T / mean(r))        w <- w - lr decay w - min(lr, 1 / root(step)) max(least, rms(w)) u / max(1, rms(u) / clip)

The mathematics of `torch.optim.Adafactor` (Shazeer and Stern, 2018, arXiv 1804.04235; Zhai et al., 2022, arXiv
2106.04560): the learning rate of a parameter is proportional to the RMS of its weights, and there is no momentum.
Vectors store all second moments. Each expert is a separate parameter.

A matrix may be sharded over tensor ranks, and over data-parallel ranks by the distributed optimizer or FSDP2. Only sums
are communicated: each rank sums the squares of the elements it owns by row, by column and in total, and these sums are
all-reduced over the ranks that share the matrix, twice a step: those of gradients and weights, then those of u.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.distributed.buffers import OwnedSegment, ParamOwnership
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, UpdateRuleContext, scale_gradients
from megatron.core.parallel import collectives
from megatron.core.parallel.boxes import boxes_of_flat_range, intersect
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import (
    ParamSpec,
    is_replicated_over_tensor,
    local_shard_boxes,
    tensor_parallel_axis_name,
)

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _OwnedRectangle:
    """A rectangle of a parameter that this rank owns.

    It lies within the flat elements [start, stop) of the segment, viewed as `shape`, at `local_index`. global_index:
    its index in the whole parameter; for stacked parameters, dimension 0 counts those of this rank. is_counted: this
    tensor rank, not a replica, adds it to sums.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    local_index: Index
    global_index: Index
    is_counted: bool

    def view_of(self, values: Tensor) -> Tensor:
        """Return the rectangle of the segment's flat `values` as a view."""
        return values[self.start : self.stop].view(self.shape)[self.local_index]


@dataclass(frozen=True, slots=True)
class _OwnedAdafactorState:
    """The part of a parameter that this rank owns.

    second: second moments: means of g^2 over rows [.., m] and over columns [.., n]; for a vector all, flat.
    """

    segment: OwnedSegment
    main: Tensor
    blocks: tuple[_OwnedRectangle, ...]
    second: tuple[Tensor, ...]

    @property
    def gradient(self) -> Tensor:
        """The main weight's gradient during a step; `_compute_direction` turns it into the direction in place."""
        assert self.main.grad is not None, "the gradients of all main weights are attached"
        return self.main.grad


@dataclass(frozen=True, slots=True)
class _AdafactorParam:
    """A parameter of this rank's stages.

    shape: unsharded, except that dimension 0 of stacked ones counts those of this rank. axes: mesh axes whose ranks
    hold different shards of it. owned: the part that this rank owns, if any.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    owned: _OwnedAdafactorState | None

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of one parameter of a stack, or of the parameter itself."""
        return self.shape[1:] if self.spec.stacked else self.shape

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape of the stack: (experts of this rank,), or () if it is not stacked."""
        return self.shape[:1] if self.spec.stacked else ()

    @property
    def is_factored(self) -> bool:
        """Whether second moments are stored by rows and columns."""
        return len(self.matrix_shape) > 1

    def broadcast_stack_to_block(self, values: Tensor, block: _OwnedRectangle) -> Tensor:
        """Broadcast one number for each stacked parameter (values: [e] or []) to the elements of a block."""
        return values[block.global_index[0]].view(-1, *(1 for _ in self.matrix_shape)) if self.spec.stacked else values


class Adafactor(UpdateRule):
    """Adafactor for all parameters of this rank's stages."""

    slots = ("exp_avg_sq",)
    matrix_slots = ("exp_avg_sq_row", "exp_avg_sq_col")

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        """Collect the parameters. All ranks that share one take part in its step, also those that own none of it."""
        super().__init__(owned, config, context)
        self.mesh = context.mesh
        self.nothing, remaining = torch.zeros(0, dtype=context.main_dtype, device=self.mesh.device), iter(owned)
        self.parameters = [
            self._build_parameter(one, remaining)
            for parallel in context.parallels
            for one in parallel.param_ownership()
        ]
        self.by_main = {parameter.owned.main: parameter for parameter in self.parameters if parameter.owned is not None}

    def _build_parameter(
        self, one: ParamOwnership, remaining: Iterator[tuple[OwnedSegment, Tensor]]
    ) -> _AdafactorParam:
        """Describe a parameter and allocate the second moments of the part that this rank owns.

        one: which data-parallel ranks own it. remaining: owned segments not yet assigned, in order.
        """
        spec, axis, size = one.spec, self.mesh.axis(one.spec.reduce_over), max(high for _, high in one.ranges)
        shape = (one.local_shape[0], *spec.shape[1:]) if spec.stacked else spec.shape
        axes = (
            *((spec.reduce_over,) if any(owned != (0, size) for owned in one.ranges) else ()),
            *(() if is_replicated_over_tensor(spec) else (tensor_parallel_axis_name(spec),)),
        )
        parameter = _AdafactorParam(spec, shape, axes, None)
        low, high = one.ranges[axis.rank]
        if low == high:
            return parameter
        segment, main = next(remaining)
        assert (segment.name, segment.low, segment.high) == (spec.name, low, high), (
            f"{segment.name} is not the next that is owned"
        )
        sizes = _factored_shapes(shape) if parameter.is_factored else (tuple(main.shape),)
        return replace(
            parameter,
            owned=_OwnedAdafactorState(
                segment, main, tuple(_owned_rectangles(segment, self.mesh)), tuple(main.new_zeros(of) for of in sizes)
            ),
        )

    @classmethod
    def state_bytes_per_element(cls, config: RunConfig, sides: float, tensor_ranks: int) -> float:
        """See the base class. A number for each row and each column is next to nothing."""
        return 0.0

    @torch.no_grad()
    def step(self, factor: float | Tensor) -> None:
        """Update the main weights by their gradients times `factor`, a scalar."""
        scale_gradients(list(self.by_main), factor)
        self.steps += 1
        rates = {main: group for group in self.param_groups for main in group["params"]}
        squares = [self._partial_sums_of_squares(parameter) for parameter in self.parameters]
        self._all_reduce_sums(
            [(parameter, share) for parameter, shares in zip(self.parameters, squares, strict=True) for share in shares]
        )
        for parameter, (_, *sums) in zip(self.parameters, squares, strict=True):
            if parameter.owned is not None:
                self._compute_direction(parameter, parameter.owned, sums)
        lengths = [self._partial_squared_norm(parameter) for parameter in self.parameters]
        self._all_reduce_sums(list(zip(self.parameters, lengths, strict=True)))
        for parameter, (weights, *_), length in zip(self.parameters, squares, lengths, strict=True):
            if parameter.owned is not None:
                self._apply_update(parameter, parameter.owned, (weights, length), rates[parameter.owned.main])

    def checkpoint_state(self, segment: OwnedSegment, main: Tensor) -> Iterator[Slot]:
        """Yield the state of a segment: the second moments [elements] of a vector, or the row means [rows] and column
        means [columns] of a matrix, each as a segment of a tensor of its own shape.
        """
        parameter = self.by_main[main]
        owned_part = parameter.owned
        assert owned_part is not None, "by_main holds what this rank owns"
        if not parameter.is_factored:
            yield "exp_avg_sq", owned_part.segment, owned_part.second[0]
            return
        shards = tuple(shard for shard in parameter.spec.shards if parameter.spec.stacked and shard.dim == 0)
        for slot, second, shape in zip(
            self.matrix_slots, owned_part.second, _factored_shapes(parameter.spec.shape), strict=True
        ):
            values = second.view(-1)
            spec = replace(parameter.spec, shape=shape, shards=shards)
            yield (
                slot,
                OwnedSegment(spec, tuple(second.shape), 0, len(values), values, values, owned_part.segment.sharded),
                values,
            )

    def _partial_sums_of_squares(self, parameter: _AdafactorParam) -> tuple[Tensor, ...]:
        """Return this rank's sums of squares: of weights, [e] or [], and of a matrix's gradients by row and column."""
        weights = self.nothing.new_zeros(parameter.stack_shape)
        sums = (
            tuple(self.nothing.new_zeros(shape) for shape in _factored_shapes(parameter.shape))
            if parameter.is_factored
            else ()
        )
        owned_part = parameter.owned
        if owned_part is None:
            return weights, *sums
        for block in (block for block in owned_part.blocks if block.is_counted):
            _add_squares(weights, parameter, block, block.view_of(owned_part.main))
            if parameter.is_factored:
                squares, (rows, columns) = block.view_of(owned_part.gradient).square(), sums
                rows[block.global_index[:-1]] += squares.sum(-1)
                columns[(*block.global_index[:-2], block.global_index[-1])] += squares.sum(-2)
        return weights, *sums

    def _compute_direction(
        self, parameter: _AdafactorParam, owned_part: _OwnedAdafactorState, sums: Sequence[Tensor]
    ) -> None:
        """Update the second moments by the new squares, and turn gradients into directions in place."""
        weight, gradient = self.steps**-self.config.adafactor_decay_rate, owned_part.gradient
        least = torch.finfo(owned_part.main.dtype).eps
        if not parameter.is_factored:
            (second,) = owned_part.second
            second.lerp_(gradient.square(), weight)
            gradient.mul_(second.clamp(min=least**2).rsqrt_())
            return
        for second, total, count in zip(
            owned_part.second, sums, (parameter.shape[-1], parameter.shape[-2]), strict=True
        ):
            second.lerp_(total / count, weight)
        rows, columns = owned_part.second
        rows = rows / rows.mean(-1, keepdim=True).clamp(min=least)
        for block in owned_part.blocks:
            size = rows[block.global_index[:-1]].unsqueeze(-1) * columns[
                (*block.global_index[:-2], block.global_index[-1])
            ].unsqueeze(-2)
            block.view_of(gradient).mul_(size.clamp_(min=least**2).rsqrt_())

    def _partial_squared_norm(self, parameter: _AdafactorParam) -> Tensor:
        """Return this rank's partial sum of the squares of directions, [e] or []."""
        share = self.nothing.new_zeros(parameter.stack_shape)
        owned_part = parameter.owned
        for block in owned_part.blocks if owned_part is not None else ():
            if owned_part is not None and block.is_counted:
                _add_squares(share, parameter, block, block.view_of(owned_part.gradient))
        return share

    def _apply_update(
        self,
        parameter: _AdafactorParam,
        owned_part: _OwnedAdafactorState,
        sums: tuple[Tensor, Tensor],
        group: dict[str, Any],
    ) -> None:
        """Update the owned weights. sums: sums of squares of the weights and of the directions, [e] or []."""
        weights, directions = ((total / math.prod(parameter.matrix_shape)).sqrt_() for total in sums)
        rate = weights.clamp_(min=self.config.adafactor_min_rms) * min(group["lr"], self.steps**-0.5)
        factor = rate / (directions / self.config.adafactor_clip_threshold).clamp_(min=1.0)
        owned_part.main.mul_(1.0 - group["lr"] * group["weight_decay"])
        for block in owned_part.blocks:
            block.view_of(owned_part.main).addcmul_(
                block.view_of(owned_part.gradient), parameter.broadcast_stack_to_block(factor, block), value=-1.0
            )

    def _all_reduce_sums(self, shares: Sequence[tuple[_AdafactorParam, Tensor]]) -> None:
        """All-reduce every partial sum in place over the ranks that hold shards of its parameter."""
        together: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter, share in shares:
            together.setdefault(parameter.axes, []).append(share)
        for axes, summands in together.items():
            collectives.all_reduce_together(summands, *(self.mesh.axis(axis) for axis in axes))


def _factored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the row means and the column means of a tensor [.., m, n]."""
    return shape[:-1], (*shape[:-2], shape[-1])


def _add_squares(sums: Tensor, parameter: _AdafactorParam, block: _OwnedRectangle, values: Tensor) -> None:
    """Add the sums of squares of a rectangle's values to `sums`, [e] of stacked parameters or []."""
    if parameter.spec.stacked:
        sums[block.global_index[0]] += values.square().flatten(1).sum(1)
    else:
        sums += values.square().sum()


def _owned_rectangles(segment: OwnedSegment, mesh: Mesh) -> Iterator[_OwnedRectangle]:
    """Yield the rectangles of a segment, without padding."""
    for box, start, stop in boxes_of_flat_range(segment.local_shape, segment.low, segment.high):
        for shard in local_shard_boxes(segment.spec, mesh):
            common = intersect(box, shard.local)
            if common is None:
                continue
            local_index = common.shifted(tuple(-at for at in box.offset))
            global_index = common.shifted(
                tuple(to - at for to, at in zip(shard.box.offset, shard.local.offset, strict=True))
            )
            index = global_index.slices()
            if segment.spec.stacked:
                index = (common.slices()[0], *index[1:])
            yield _OwnedRectangle(
                start - segment.low, stop - segment.low, box.shape, local_index.slices(), index, shard.is_first_replica
            )
