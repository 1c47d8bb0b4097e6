"""Buckets of weights that work in few bits (`--fp8-param-gather`): what is owned is kept in fp32, what is gathered in 8 bits.

    main weight  [ rank's own range, fp32 ]                                 a `Segment`, which the optimizer steps in place
    data    [ rank 0  |  rank 1  |  rank 2  |  rank 3 ]  1 byte each   values of all weights, which layers multiply
    sizes   [ a block, a block, ... ]                                  largest values of blocks, or of each weight as a whole

After a step, ranks agree on the largest values, each rounds its own range, and ranges are gathered. So a weight is rounded once,
from fp32, a quarter to half of the bytes travels, and no rank holds weights of 16 bits. An edge of a range may run through a block.
Each expert is a matrix of its own. Parameters stay as what gradients arrive at: their values are not there.

Where blocks are no squares, a weight is rounded twice, for sums over its rows and over its columns, and there are two of `data`:
as many bytes as in 16 bits, but nothing is left to round when a layer works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.distributed.buffers import Bucket, Segment
from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import Quantised
from megatron.core.kernels.low_precision.recipes import Recipe
from megatron.core.kernels.reference import wide
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


class Holder(Protocol):
    """What a layer takes its rounded weights from. (`tensor_parallel.low_precision.Scaling` is one.) cut: axis of the weights' pieces.

    held: the matrices of the weight, one, or one an expert. turned: the same transposed, for sums over the other dimension.
    """

    recipe: Recipe
    cut: Axis
    held: tuple[Quantised, ...]
    turned: tuple[Quantised, ...]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix [m, k] from element `start` of the bucket on, in one of its data. sizes: the place of its blocks' largest values
    among all.
    """

    data: Tensor
    start: int
    held: Quantised
    sizes: slice
    table: tuple[int, int]

    @property
    def rows(self) -> int:
        """How many rows are rounded together at least."""
        return self.held.block[0]

    def at(self, sizes: Tensor, first: int, rows: Tensor) -> Tensor:
        """Of the sizes of all, those of the blocks of some rows [r, k] from the first on: a view."""
        table = sizes[self.sizes].view(self.table)
        return table if self.held.blocks is None else table[first // self.rows : -(-(first + len(rows)) // self.rows)]

    def part(self, low: int, high: int) -> tuple[int, int]:
        """Its own elements among those of the bucket from low to high; an empty range where there are none."""
        size = self.held.values.numel()
        return max(low - self.start, 0), max(min(high - self.start, size), 0)


class LowPrecisionBucket(Bucket):
    """A bucket whose parameters have their values in `holders` alone, a holder each."""

    holds_values = False

    def __init__(
        self, params: list[nn.Parameter], axis: Axis, *, grad_dtype: torch.dtype, holders: dict[nn.Parameter, Holder]
    ) -> None:
        super().__init__(params, axis, grad_dtype=grad_dtype, sharded=True)
        self.dtype, first = params[0].dtype, holders[params[0]]
        self.recipe, self.cut = first.recipe, first.cut
        low, high = self.owned()
        self.main = self.data[low:high].to(wide(self.dtype), copy=True)
        self.data = torch.zeros(len(self.data), dtype=torch.uint8, device=self.data.device)
        self.turned = self.data if self.recipe.turns("weight") else torch.zeros_like(self.data)
        self.matrices: list[_Matrix] = []
        block = self.recipe.block_of("weight")
        for start, param, holder in zip(self.starts, params, (holders[param] for param in params), strict=False):
            holder.held = self._add(self.data, start, param.shape, block)
            turned = (
                holder.held if self.turned is self.data else self._add(self.turned, start, param.shape, block[::-1])
            )
            holder.turned = tuple(matrix.t() for matrix in turned)
            param.data = param.data.new_zeros(()).expand(param.shape)

    def _add(self, data: Tensor, start: int, shape: torch.Size, block: tuple[int, int]) -> tuple[Quantised, ...]:
        """Room for the matrices of a weight [.., m, k]."""
        parts, (rows, columns) = [], shape[-2:]
        if self.recipe.one_scale:
            block = (rows, columns)
        table = (-(-rows // block[0]), -(-columns // block[1]))
        nothing = self.main.new_ones(table)
        for place in range(start, start + shape.numel(), rows * columns):
            values = data[place : place + rows * columns].view(self.recipe.forward.dtype).view(rows, columns)
            scale, blocks = self.recipe.weight_scales(nothing.amax(), nothing)
            parts.append(Quantised(values, scale, blocks, (1, 1) if blocks is None else block))
            before = self.matrices[-1].sizes.stop if self.matrices else 0
            self.matrices.append(_Matrix(data, place, parts[-1], slice(before, before + table[0] * table[1]), table))
        return tuple(parts)

    @property
    def gathered(self) -> tuple[Tensor, ...]:
        """The values of all weights, once or in both directions."""
        return (self.data,) if self.turned is self.data else (self.data, self.turned)

    def segments(self) -> Iterator[Segment]:
        """What this rank owns of each parameter: its fp32 main weight."""
        low, _ = self.owned()
        for segment in super().segments():
            start = self.starts[self._place(segment)] + segment.low - low
            yield replace(
                segment,
                data=self.main[start : start + segment.high - segment.low],
                rounds_to=self.dtype if self.dtype != self.main.dtype else None,
            )

    def prepare(self) -> None:
        """Round this rank's range anew. All ranks that hold a piece of these weights call it together."""
        sizes = self.main.new_zeros(self.matrices[-1].sizes.stop)
        for matrix in self.matrices:
            if (own := self._own_rows(matrix)) is not None:
                # What is no number would be lost in a maximum.
                matrix.at(sizes, *own).copy_(
                    self._sizes(matrix, own[1]).nan_to_num(nan=float("inf"), posinf=float("inf"))
                )
        collectives.all_reduce(sizes, self.axis, "max")
        largest = torch.stack([sizes[matrix.sizes].amax() for matrix in self.matrices])
        if self.recipe.needs_largest:
            collectives.all_reduce(largest, self.cut, "max")
        for matrix, most in zip(self.matrices, largest, strict=True):
            self._round(matrix, most, sizes)

    def _round(self, matrix: _Matrix, largest: Tensor, sizes: Tensor) -> None:
        """Its scales anew, and the values of this rank's range. sizes: of all matrices."""
        scales = self.recipe.weight_scales(largest, sizes[matrix.sizes].view(matrix.table))
        for kept, scale in zip((matrix.held.scale, matrix.held.blocks), scales, strict=True):
            if kept is not None and scale is not None:
                kept.copy_(scale)
        if (own := self._own_rows(matrix)) is None:
            return
        first, rows = own
        rounded = self.recipe.quantise("weight", rows, largest, matrix.at(sizes, first, rows), matrix.held.block)
        (low, high), before = matrix.part(*self.owned()), first * rows.shape[1]
        matrix.data[matrix.start + low : matrix.start + high] = rounded.values.view(torch.uint8).view(-1)[
            low - before : high - before
        ]

    def _own_rows(self, matrix: _Matrix) -> tuple[int, Tensor] | None:
        """The first row, and the rows of whole blocks that hold this rank's range of a matrix, zero where others own them."""
        (low, high), (count, width) = matrix.part(*self.owned()), matrix.held.values.shape
        if low >= high:
            return None
        first = low // width // matrix.rows * matrix.rows
        last = min(-(-high // (width * matrix.rows)) * matrix.rows, count)
        begin = matrix.start + low - self.owned()[0]
        rows = self.main.new_zeros((last - first) * width)
        rows[low - first * width : high - first * width] = self.main[begin : begin + high - low]
        return first, rows.view(-1, width)

    def _sizes(self, matrix: _Matrix, rows: Tensor) -> Tensor:
        return (
            fp8.largest_of(rows).view(1, 1) if matrix.held.blocks is None else fp8.block_sizes(rows, matrix.held.block)
        )

    def _place(self, segment: Segment) -> int:
        return next(place for place, param in enumerate(self.params) if param.spec is segment.spec)  # type: ignore[attr-defined]


def holders_of(module: nn.Module) -> dict[nn.Parameter, Holder]:
    """The weights of a stage that are to be kept in few bits, with what holds them."""
    holders: dict[nn.Parameter, Holder] = {}
    for part in module.modules():
        holder, weight = getattr(part, "scaling", None), getattr(part, "weight", None)
        if holder is not None and holder.recipe.holds_weights and isinstance(weight, nn.Parameter):
            holders[weight] = holder
    return holders
