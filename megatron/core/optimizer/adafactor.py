"""Adafactor: of the second moments of a matrix, only the means of its rows and of its columns are kept.

    r <- b r + (1 - b) mean of g^2 over a row        c <- b c + (1 - b) mean of g^2 over a column        b = 1 - step^-decay
    u = g / root(r c^T / mean(r))        w <- w - lr decay w - min(lr, 1 / root(step)) max(least, rms(w)) u / max(1, rms(u) / clip)

The mathematics of `torch.optim.Adafactor` (Shazeer and Stern, 2018, arXiv 1804.04235; Zhai et al., 2022, arXiv 2106.04560): a
parameter's rate follows the size of its weights, and there is no momentum. A vector keeps its own second moments; each expert
is a parameter of its own.

A matrix may be cut over tensor ranks by its spec, and over data ranks by the distributed optimizer or FSDP2. Nothing but sums
travels: a rank adds up the squares of what it owns, by row, by column and in all, and sums are summed over the ranks that
share the matrix, twice a step: first those of gradients and weights, then those of the directions u.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import Ownership, Segment
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, scale_gradients
from megatron.core.parallel import collectives
from megatron.core.parallel.boxes import flat, intersect
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, is_shared_over_tensor, local_shards, tensor_axis

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import Parallel

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangle of a parameter that this rank owns: elements [start, stop) of the segment, of `shape`, at `inside`.

    where: its place in the whole parameter, of stacked ones among those of this rank. counts: no other tensor rank adds it up.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    inside: Index
    where: Index
    counts: bool

    def of(self, values: Tensor) -> Tensor:
        """The rectangle of what the segment has, flat: a view."""
        return values[self.start : self.stop].view(self.shape)[self.inside]


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank owns of a parameter. second: means of g^2, of rows [.., m] and columns [.., n]; of a vector all, flat."""

    segment: Segment
    main: Tensor
    blocks: tuple[_Block, ...]
    second: tuple[Tensor, ...]

    @property
    def gradient(self) -> Tensor:
        """The main weight's gradient, which is attached while a step lasts; then the direction."""
        assert self.main.grad is not None, "the gradients of all main weights are attached"
        return self.main.grad


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter. shape: without cuts, but of stacked ones those of this rank. axes: whose ranks hold different pieces of it."""

    spec: ParamSpec
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    held: _Held | None

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of one of those that are stacked."""
        return self.shape[1:] if self.spec.stacked else self.shape

    @property
    def stack(self) -> tuple[int, ...]:
        """How many are stacked: (e of this rank,) or ()."""
        return self.shape[:1] if self.spec.stacked else ()

    @property
    def is_factored(self) -> bool:
        """Whether rows and columns stand for the elements."""
        return len(self.one) > 1

    def numbers(self, values: Tensor, block: _Block) -> Tensor:
        """What each of the stacked has, one number, for the elements of a block. found: [e] or []."""
        return values[block.where[0]].view(-1, *(1 for _ in self.one)) if self.spec.stacked else values


class Adafactor(UpdateRule):
    """All parameters of this rank's stages."""

    def __init__(
        self, parallels: Sequence[Parallel], owned: Owned, mesh: Mesh, config: OptimizerConfig, *, dtype: torch.dtype
    ) -> None:
        """dtype: of main weights, also where this rank has none.

        All ranks that share a parameter step together, also those that own none of it.
        """
        super().__init__(owned, config)
        self.mesh = mesh
        self.nothing, left = torch.zeros(0, dtype=dtype, device=mesh.device), iter(owned)
        self.wholes = [self._whole(one, left) for parallel in parallels for one in parallel.ownership()]
        self.by_main = {whole.held.main: whole for whole in self.wholes if whole.held is not None}

    def _whole(self, one: Ownership, left: Iterator[tuple[Segment, Tensor]]) -> _Whole:
        spec, axis, size = one.spec, self.mesh.axis(one.spec.reduce_over), max(high for _, high in one.ranges)
        shape = (one.local_shape[0], *spec.shape[1:]) if spec.stacked else spec.shape
        axes = (
            *((spec.reduce_over,) if any(owned != (0, size) for owned in one.ranges) else ()),
            *(() if is_shared_over_tensor(spec) else (tensor_axis(spec),)),
        )
        whole = _Whole(spec, shape, axes, None)
        low, high = one.ranges[axis.rank]
        if low == high:
            return whole
        segment, main = next(left)
        assert (segment.name, segment.low, segment.high) == (spec.name, low, high), (
            f"{segment.name} is not the next that is owned"
        )
        sizes = _factors(shape) if whole.is_factored else (tuple(main.shape),)
        return replace(
            whole,
            held=_Held(segment, main, tuple(_blocks(segment, self.mesh)), tuple(main.new_zeros(of) for of in sizes)),
        )

    @torch.no_grad()
    def step(self, factor: float | Tensor) -> None:
        """Update the main weights."""
        scale_gradients(list(self.by_main), factor)
        self.steps += 1
        rates = {main: group for group in self.param_groups for main in group["params"]}
        squares = [self._squares(whole) for whole in self.wholes]
        self._sum([(whole, share) for whole, shares in zip(self.wholes, squares, strict=True) for share in shares])
        for whole, (_, *sums) in zip(self.wholes, squares, strict=True):
            if whole.held is not None:
                self._direct(whole, whole.held, sums)
        lengths = [self._squared_norm_share(whole) for whole in self.wholes]
        self._sum(list(zip(self.wholes, lengths, strict=True)))
        for whole, (weights, *_), length in zip(self.wholes, squares, lengths, strict=True):
            if whole.held is not None:
                self._move(whole, whole.held, (weights, length), rates[whole.held.main])

    def slots(self, segment: Segment, main: Tensor) -> Iterator[Slot]:
        """The second moments of a vector; of a matrix, means of rows and of columns, which are segments of tensors of their own."""
        whole = self.by_main[main]
        held = whole.held
        assert held is not None, "by_main holds what this rank owns"
        if not whole.is_factored:
            yield "exp_avg_sq", held.segment, held.second[0]
            return
        shards = tuple(cut for cut in whole.spec.shards if whole.spec.stacked and cut.dim == 0)
        for slot, second, shape in zip(
            ("exp_avg_sq_row", "exp_avg_sq_col"), held.second, _factors(whole.spec.shape), strict=True
        ):
            values = second.view(-1)
            spec = replace(whole.spec, shape=shape, shards=shards)
            yield slot, Segment(spec, tuple(second.shape), 0, len(values), values, values), values

    def _squares(self, whole: _Whole) -> tuple[Tensor, ...]:
        """This rank's shares of the sums of squares: of weights [e] or [], and of a matrix's gradients by row and by column."""
        weights = self.nothing.new_zeros(whole.stack)
        sums = tuple(self.nothing.new_zeros(shape) for shape in _factors(whole.shape)) if whole.is_factored else ()
        held = whole.held
        if held is None:
            return weights, *sums
        for block in (block for block in held.blocks if block.counts):
            _add_squares(weights, whole, block, block.of(held.main))
            if whole.is_factored:
                squares, (rows, columns) = block.of(held.gradient).square(), sums
                rows[block.where[:-1]] += squares.sum(-1)
                columns[(*block.where[:-2], block.where[-1])] += squares.sum(-2)
        return weights, *sums

    def _direct(self, whole: _Whole, held: _Held, sums: Sequence[Tensor]) -> None:
        """Take the newest squares into the second moments, and make gradients directions."""
        newest, gradient = self.steps**-self.config.adafactor_decay_rate, held.gradient
        least = torch.finfo(held.main.dtype).eps
        if not whole.is_factored:
            (second,) = held.second
            second.lerp_(gradient.square(), newest)
            gradient.mul_(second.clamp(min=least**2).rsqrt_())
            return
        for second, total, count in zip(held.second, sums, (whole.shape[-1], whole.shape[-2]), strict=True):
            second.lerp_(total / count, newest)
        rows, columns = held.second
        rows = rows / rows.mean(-1, keepdim=True).clamp(min=least)
        for block in held.blocks:
            size = rows[block.where[:-1]].unsqueeze(-1) * columns[(*block.where[:-2], block.where[-1])].unsqueeze(-2)
            block.of(gradient).mul_(size.clamp_(min=least**2).rsqrt_())

    def _squared_norm_share(self, whole: _Whole) -> Tensor:
        """This rank's share of the sum of squares of directions, [e] or []."""
        share = self.nothing.new_zeros(whole.stack)
        held = whole.held
        for block in held.blocks if held is not None else ():
            if held is not None and block.counts:
                _add_squares(share, whole, block, block.of(held.gradient))
        return share

    def _move(self, whole: _Whole, held: _Held, sums: tuple[Tensor, Tensor], group: dict[str, Any]) -> None:
        """Update what is owned. sums: of squares of the weights and of the directions."""
        weights, directions = ((total / math.prod(whole.one)).sqrt_() for total in sums)
        rate = weights.clamp_(min=self.config.adafactor_min_rms) * min(group["lr"], self.steps**-0.5)
        factor = rate / (directions / self.config.adafactor_clip_threshold).clamp_(min=1.0)
        held.main.mul_(1.0 - group["lr"] * group["weight_decay"])
        for block in held.blocks:
            block.of(held.main).addcmul_(block.of(held.gradient), whole.numbers(factor, block), value=-1.0)

    def _sum(self, shares: Sequence[tuple[_Whole, Tensor]]) -> None:
        """Make every share the sum over the ranks that hold pieces of its parameter, in place."""
        together: dict[tuple[str, ...], list[Tensor]] = {}
        for whole, share in shares:
            together.setdefault(whole.axes, []).append(share)
        for axes, summands in together.items():
            if all(self.mesh.axis(axis).group is None for axis in axes):
                continue
            summed = torch.cat([share.view(-1) for share in summands])
            for axis in axes:
                collectives.all_reduce(summed, self.mesh.axis(axis))
            for share, value in zip(summands, summed.split([share.numel() for share in summands]), strict=True):
                share.copy_(value.view_as(share))


def _factors(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of what rows have in common, and columns. shape: [.., m, n]."""
    return shape[:-1], (*shape[:-2], shape[-1])


def _add_squares(sums: Tensor, whole: _Whole, block: _Block, values: Tensor) -> None:
    if whole.spec.stacked:
        sums[block.where[0]] += values.square().flatten(1).sum(1)
    else:
        sums += values.square().sum()


def _blocks(segment: Segment, mesh: Mesh) -> Iterator[_Block]:
    """The rectangles of a segment. Padding is in none."""
    for box, start, stop in flat(segment.local_shape, segment.low, segment.high):
        for piece in local_shards(segment.spec, mesh):
            common = intersect(box, piece.local)
            if common is None:
                continue
            inside = common.shifted(tuple(-at for at in box.offset))
            where = common.shifted(tuple(to - at for to, at in zip(piece.box.offset, piece.local.offset, strict=True)))
            index = where.slices()
            if segment.spec.stacked:
                index = (common.slices()[0], *index[1:])
            yield _Block(
                start - segment.low, stop - segment.low, box.shape, inside.slices(), index, piece.is_first_replica
            )
