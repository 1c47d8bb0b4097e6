"""Buckets of parameters stored in 8 bits (`--fp8-param-gather`): each rank owns fp32 main weights, and gathers 8-bit
values.

    main weight  [ rank's own range, fp32 ]                             a `OwnedSegment`, which the optimizer updates in place
    data    [ rank 0  |  rank 1  |  rank 2  |  rank 3 ]  1 byte each    values of all weights, which layers multiply
    sizes   [ a block, a block, ... ]                                   absolute maxima of blocks, or of each whole weight

After a step, ranks all-reduce the maxima, each quantizes its own range, and ranges are gathered. A weight is rounded
once, from fp32, a quarter to half of the bytes is sent, and no rank stores 16-bit weights. The boundary of a range may
cross a block. Each expert is a separate matrix. Parameters remain as the targets of gradients, without values.

If blocks are not square, a weight is quantized twice, for products over its rows and over its columns, into two `data`
buffers: as many bytes as in 16 bits, but layers have nothing left to quantize.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.distributed.buffers import Bucket, OwnedSegment
from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import QuantizedMatrix
from megatron.core.kernels.low_precision.recipes import LowPrecisionRecipe
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.spec import param_spec_of


class Fp8GatheredWeight(Protocol):
    """The quantized weights of a layer, which `LowPrecisionBucket` fills (`LowPrecisionScaling` of
    tensor_parallel/low_precision.py implements it).

    recipe: the quantization recipe. cut: axis over which the weights are sharded. held: the matrices of the weight,
    one, or one for each expert. turned: the same transposed, for products over the other dimension.
    """

    recipe: LowPrecisionRecipe
    cut: Axis
    held: tuple[QuantizedMatrix, ...]
    turned: tuple[QuantizedMatrix, ...]


@dataclass(frozen=True, slots=True)
class _BucketMatrix:
    """A matrix [m, k] in a bucket.

    data: the buffer that holds it, from element `start` on. held: its quantized form. sizes: slice of its blocks'
    maxima among all; table: their shape.
    """

    data: Tensor
    start: int
    held: QuantizedMatrix
    sizes: slice
    table: tuple[int, int]

    @property
    def rows_per_block(self) -> int:
        """Number of rows of a block, which are quantized together."""
        return self.held.block[0]

    def block_row_maxima(self, block_maxima: Tensor, first_row: int, rows: Tensor) -> Tensor:
        """Return a view of the maxima of the blocks that cover `rows` [r, k], which start at row `first_row`."""
        table = block_maxima[self.sizes].view(self.table)
        return (
            table
            if self.held.blocks is None
            else table[first_row // self.rows_per_block : -(-(first_row + len(rows)) // self.rows_per_block)]
        )

    def range_within(self, low: int, high: int) -> tuple[int, int]:
        """Return which of this matrix's elements lie within [low, high) of the bucket; an empty range if none."""
        size = self.held.values.numel()
        return max(low - self.start, 0), max(min(high - self.start, size), 0)


class LowPrecisionBucket(Bucket):
    """A bucket whose parameters have only quantized values, in the `Fp8GatheredWeight` of each layer."""

    holds_values = False

    def __init__(
        self,
        params: list[nn.Parameter],
        axis: Axis,
        *,
        grad_dtype: torch.dtype,
        quantized: dict[nn.Parameter, Fp8GatheredWeight],
    ) -> None:
        """Allocate fp32 main weights of the owned range, and 8-bit buffers. quantized: layer state of parameters."""
        super().__init__(params, axis, grad_dtype=grad_dtype, sharded=True)
        self.dtype, first = params[0].dtype, quantized[params[0]]
        self.recipe, self.cut = first.recipe, first.cut
        low, high = self.owned_range()
        self.main = self.data[low:high].to(accumulation_dtype_of(self.dtype), copy=True)
        self.data = torch.zeros(len(self.data), dtype=torch.uint8, device=self.data.device)
        self.turned = self.data if self.recipe.transpose_reuses_quantized("weight") else torch.zeros_like(self.data)
        self.matrices: list[_BucketMatrix] = []
        block = self.recipe.block_shape_of("weight")
        for start, param, weight in zip(self.starts, params, (quantized[param] for param in params), strict=False):
            weight.held = self._quantized_matrix_views(self.data, start, param.shape, block)
            transposed = (
                weight.held
                if self.turned is self.data
                else self._quantized_matrix_views(self.turned, start, param.shape, block[::-1])
            )
            weight.turned = tuple(matrix.t() for matrix in transposed)
            param.data = param.data.new_zeros(()).expand(param.shape)
        self.maxima: tuple[Tensor, Tensor | None] | None = (
            None  # of blocks, and of matrices where the recipe needs them
        )
        if self.recipe.is_4_bit:
            counts = torch.tensor([matrix.sizes.stop - matrix.sizes.start for matrix in self.matrices])
            self._matrix_of_block = torch.repeat_interleave(counts).to(self.main.device)

    def _quantized_matrix_views(
        self, data: Tensor, start: int, shape: torch.Size, block: tuple[int, int]
    ) -> tuple[QuantizedMatrix, ...]:
        """Return views into `data` for the matrices of a weight [.., m, k]."""
        parts, (rows, columns) = [], shape[-2:]
        if self.recipe.has_single_tensor_scale:
            block = (rows, columns)
        table = (-(-rows // block[0]), -(-columns // block[1]))
        ones = self.main.new_ones(table)
        for offset in range(start, start + shape.numel(), rows * columns):
            values = data[offset : offset + rows * columns].view(self.recipe.forward.dtype).view(rows, columns)
            scale, blocks = self.recipe.inverse_weight_scales(ones.amax(), ones)
            parts.append(QuantizedMatrix(values, scale, blocks, (1, 1) if blocks is None else block))
            before = self.matrices[-1].sizes.stop if self.matrices else 0
            self.matrices.append(
                _BucketMatrix(data, offset, parts[-1], slice(before, before + table[0] * table[1]), table)
            )
        return tuple(parts)

    @property
    def all_gather_outputs(self) -> tuple[Tensor, ...]:
        """The quantized values of all weights, uint8 [elements]; one buffer, or one for each orientation."""
        return (self.data,) if self.turned is self.data else (self.data, self.turned)

    def owned_segments(self) -> Iterator[OwnedSegment]:
        """Yield the fp32 main weights that this rank owns of each parameter."""
        low, _ = self.owned_range()
        for segment in super().owned_segments():
            index = next(place for place, param in enumerate(self.params) if param_spec_of(param) is segment.spec)
            start = self.starts[index] + segment.low - low
            yield replace(
                segment,
                data=self.main[start : start + segment.high - segment.low],
                rounds_to=self.dtype if self.dtype != self.main.dtype else None,
            )

    def local_block_maxima(self) -> Tensor:
        """Return the absolute maxima of the blocks of all matrices, [blocks], over the elements that this rank owns; 0
        for blocks of other ranks, infinity for NaN.
        """
        result = self.main.new_zeros(self.matrices[-1].sizes.stop)
        for matrix in self.matrices:
            if (owned := self._owned_block_row_values(matrix)) is not None:
                matrix.block_row_maxima(result, *owned).copy_(self._block_maxima(matrix, owned[1]))
        return result.nan_to_num_(nan=float("inf"), posinf=float("inf"))  # a maximum would drop NaN

    def matrix_maxima(self, block_maxima: Tensor) -> Tensor:
        """Return the absolute maximum of each matrix, [matrices]. block_maxima: of all blocks, [blocks]."""
        if self.recipe.has_single_tensor_scale:
            return block_maxima.clone()
        return block_maxima.new_zeros(len(self.matrices)).scatter_reduce_(
            0, self._matrix_of_block, block_maxima, "amax"
        )

    def convert_for_all_gather(self) -> None:
        """Quantize this rank's range again, by the maxima that `exchange_quantization_maxima` has set."""
        assert self.maxima is not None, "maxima are exchanged before weights are quantized"
        (block_maxima, matrix_maxima), self.maxima = self.maxima, None
        held = [matrix.held for matrix in self.matrices]
        if matrix_maxima is not None:
            whole, _ = self.recipe.inverse_weight_scales(matrix_maxima, matrix_maxima)
            assert whole is not None, "a recipe that needs the largest value has a scale for it"
            torch._foreach_copy_([matrix.required_tensor_scale for matrix in held], list(whole.unbind(0)))
        if not self.recipe.has_single_tensor_scale:
            largest = block_maxima if matrix_maxima is None else matrix_maxima[self._matrix_of_block]
            _, blocks = self.recipe.inverse_weight_scales(largest, block_maxima)
            assert blocks is not None, "a recipe without a scale of whole matrices has some of blocks"
            places = [blocks[matrix.sizes].view(matrix.table) for matrix in self.matrices]
            torch._foreach_copy_([matrix.required_block_scales for matrix in held], places)
        each = [None] * len(held) if matrix_maxima is None else matrix_maxima.unbind(0)
        for matrix, matrix_maximum in zip(self.matrices, each, strict=True):
            self._quantize_range(matrix, matrix_maximum, block_maxima)

    def _quantize_range(self, matrix: _BucketMatrix, matrix_maximum: Tensor | None, block_maxima: Tensor) -> None:
        """Quantize this rank's range of a matrix. block_maxima: of all matrices."""
        if (owned := self._owned_block_row_values(matrix)) is None:
            return
        first, rows = owned
        rounded = self.recipe.quantise(
            "weight", rows, matrix_maximum, matrix.block_row_maxima(block_maxima, first, rows), matrix.held.block
        )
        (low, high), before = matrix.range_within(*self.owned_range()), first * rows.shape[1]
        matrix.data[matrix.start + low : matrix.start + high] = rounded.values.view(torch.uint8).view(-1)[
            low - before : high - before
        ]

    def _owned_block_row_values(self, matrix: _BucketMatrix) -> tuple[int, Tensor] | None:
        """Return (first row, rows [r, k]) of blocks that cover this rank's range, zero where others own elements."""
        (low, high), (count, width) = matrix.range_within(*self.owned_range()), matrix.held.values.shape
        if low >= high:
            return None
        first = low // width // matrix.rows_per_block * matrix.rows_per_block
        last = min(-(-high // (width * matrix.rows_per_block)) * matrix.rows_per_block, count)
        begin = matrix.start + low - self.owned_range()[0]
        rows = self.main.new_zeros((last - first) * width)
        rows[low - first * width : high - first * width] = self.main[begin : begin + high - low]
        return first, rows.view(-1, width)

    def _block_maxima(self, matrix: _BucketMatrix, rows: Tensor) -> Tensor:
        """Return the absolute maxima of the blocks of `rows` [r, k]."""
        return (
            fp8.tensor_amax(rows).view(1, 1) if matrix.held.blocks is None else fp8.block_amax(rows, matrix.held.block)
        )


def exchange_quantization_maxima(buckets: Iterable[Bucket]) -> None:
    """Set the maxima by which buckets quantize weights, in one or two reductions for buckets that share their axes.

    Collective over the axis of the buckets and, for recipes that scale whole weights, over the ranks that shard them.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[LowPrecisionBucket]] = {}
    for bucket in buckets:
        if isinstance(bucket, LowPrecisionBucket):
            groups.setdefault((bucket.axis.ranks, bucket.cut.ranks), []).append(bucket)
    for together in groups.values():
        of_blocks = [bucket.local_block_maxima() for bucket in together]
        collectives.all_reduce_together(of_blocks, together[0].axis, op="max")
        for bucket, block_maxima in zip(together, of_blocks, strict=True):
            bucket.maxima = block_maxima, None
        if together[0].recipe.needs_tensor_amax:
            of_matrices = [bucket.matrix_maxima(maxima) for bucket, maxima in zip(together, of_blocks, strict=True)]
            collectives.all_reduce_together(of_matrices, together[0].cut, op="max")
            for bucket, *maxima in zip(together, of_blocks, of_matrices, strict=True):
                bucket.maxima = maxima[0], maxima[1]


def quantized_weights_by_param(module: nn.Module) -> dict[nn.Parameter, Fp8GatheredWeight]:
    """Return the weights of a stage that are stored quantized, with the layer state that uses them."""
    result: dict[nn.Parameter, Fp8GatheredWeight] = {}
    for submodule in module.modules():
        scaling, weight = getattr(submodule, "scaling", None), getattr(submodule, "weight", None)
        if scaling is not None and scaling.recipe.holds_weights and isinstance(weight, nn.Parameter):
            result[weight] = scaling
    return result
