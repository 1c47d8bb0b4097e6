"""fp8 matrices: which elements share a scale, how values are rounded, and how two such matrices are multiplied.

    x [m, k]  -- times the scale of its block, rounded -->  values [m, k], and one inverse scale for each block

    tensorwise, delayed   one block: the tensor                       any scale
    blockwise             1 x 128 along the sum; weights 128 x 128    powers of two (DeepSeek-V3, 2024, section 3.3)
    mxfp8                 1 x 32 along the sum                        powers of two (OCP microscaling formats, 2023)

The emulation dequantizes and multiplies in fp32. Products of two fp8 values are exact there, and powers of two cost no bits: only the sum is rounded. The
scale of a whole tensor is applied after the sum, as on a GPU. So the result is the product of the rounded values, up to the order of an fp32 sum; fp64
for fp64 operands.

Micikevicius et al., 2022, "FP8 Formats for Deep Learning". A block's power of two is rounded up, so that nothing saturates (Mishra et al., 2025, "Recipes for
Pre-training LLMs with MXFP8").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.reference import accumulation_dtype

_SMALLEST_POWER, _LARGEST_POWER = -127, 127  # of e8m0


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A low-precision number format. dtype: the torch dtype that stores its values. largest: its largest number."""

    name: str
    dtype: torch.dtype
    largest: float


E4M3 = NumberFormat("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = NumberFormat("e5m2", torch.float8_e5m2, 57344.0)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantized matrix: values * the scale of their block * the scale of the tensor.

    values: [m, k]. block: rows and columns that share one of `blocks`, [m / rows, k / columns] rounded up. scale: [], of the whole matrix. None: 1.
    """

    values: Tensor
    scale: Tensor | None = None
    blocks: Tensor | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def whole_scale(self) -> Tensor:
        """The scale of the whole matrix, []."""
        assert self.scale is not None, "this recipe scales whole matrices"
        return self.scale

    @property
    def block_scales(self) -> Tensor:
        """Return the scales of its blocks, [row blocks, column blocks]; the recipe must scale blocks."""
        assert self.blocks is not None, "this recipe scales blocks"
        return self.blocks

    def t(self) -> Quantised:
        """Return the transposed matrix."""
        blocks = None if self.blocks is None else self.blocks.t()
        return replace(self, values=self.values.t(), blocks=blocks, block=self.block[::-1])

    def without_tensor_scale(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [m, k] without the scale of the tensor; exact in fp32 and fp64."""
        values = self.values.to(dtype)
        if self.blocks is None:
            return values
        rows, columns = self.block
        scales = self.blocks.to(dtype).repeat_interleave(rows, 0)[: values.shape[0]].repeat_interleave(columns, 1)
        return values * scales[:, : values.shape[1]]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized matrix [m, k]."""
        return self.without_tensor_scale(dtype) if self.scale is None else self.without_tensor_scale(dtype) * self.scale


@dataclass(frozen=True, slots=True)
class FusedRounding:
    """Kernels that quantize a matrix and its transposed at once (`triton/quantise.py`); None for what is not asked for.

    largest_of(x): absolute maxima of parts of x, [parts]. quantize_per_tensor(x, number, largest, margin=, seen=, rows=, turned=);
    quantize_per_block(x, number, block, rows=, turned=).
    """

    largest_of: Callable[[Tensor], Tensor]
    quantize_per_tensor: Callable[..., tuple[Quantised | None, Quantised | None]]
    quantize_per_block: Callable[..., tuple[Quantised | None, Quantised | None]]


def largest_of(x: Tensor) -> Tensor:
    """Return the absolute maximum of x, [], in accumulator precision; 0 for an empty tensor."""
    return (
        x.detach().abs().amax().to(accumulation_dtype(x.dtype))
        if x.numel()
        else x.new_zeros((), dtype=accumulation_dtype(x.dtype))
    )


def tensor_scale(largest: Tensor, number: NumberFormat, margin: int = 0) -> Tensor:
    """Return the scale [] that maps a tensor's absolute maximum `largest` [] to the format's largest number, or `margin` powers of two below; 1 for zeros.

    A maximum that is not finite gives 0 or NaN, and so a matrix of NaN, which later checks find.
    """
    scale = number.largest / largest / 2.0**margin
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def quantize_per_tensor(x: Tensor, number: NumberFormat, scale: Tensor) -> Quantised:
    """Quantize x [m, k] with one scale [], by which it is multiplied before rounding. Too large values saturate."""
    return Quantised(_round_to_format(x.to(accumulation_dtype(x.dtype)) * scale, number), scale.reciprocal())


def quantize_per_block(
    x: Tensor, number: NumberFormat, block: tuple[int, int], sizes: Tensor | None = None
) -> Quantised:
    """Quantize x [m, k] with a power of two for each block: the smallest with which none of its values saturates.

    sizes: absolute maxima as `block_amax` returns them, for blocks of which x holds only a part; None: of x.
    """
    tiles = split_blocks(x.to(accumulation_dtype(x.dtype)), block)
    sizes = block_amax(x, block) if sizes is None else sizes
    scaled = torch.ldexp(tiles, -_power_above(sizes, number.largest)[:, None, :, None])
    return Quantised(merge_blocks(_round_to_format(scaled, number), x), None, block_scales(sizes, number), block)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the absolute maximum of each block of x [m, k], in accumulator precision: [m / rows, k / columns], rounded up."""
    return split_blocks(x.to(accumulation_dtype(x.dtype)), block).abs().amax(dim=(1, 3))


def block_scales(sizes: Tensor, number: NumberFormat) -> Tensor:
    """Return the e8m0 scales by which blocks are multiplied when dequantized; NaN where a block had NaN.

    sizes: absolute maxima of blocks, any shape; the result has the same.
    """
    scales = torch.ldexp(torch.ones_like(sizes), _power_above(sizes, number.largest))
    return scales.masked_fill(~sizes.isfinite(), float("nan")).to(torch.float8_e8m0fnu)


def _power_above(value: Tensor, number: float) -> Tensor:
    """Return the smallest n with value <= number * 2^n, int32; computed without a division, hence exact."""
    fraction, power = torch.frexp(torch.where(value.isfinite(), value, torch.ones_like(value)))
    own_fraction, own_power = math.frexp(number)
    return (power - own_power + (fraction > own_fraction)).clamp(_SMALLEST_POWER, _LARGEST_POWER)


def _round_to_format(x: Tensor, number: NumberFormat) -> Tensor:
    """Round to the nearest number, ties to even; too large values saturate; NaN stays NaN."""
    return x.clamp(-number.largest, number.largest).to(number.dtype)


def split_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return x [m, k] as [m / rows, rows, k / columns, columns], padded with zeros."""
    rows, columns = block
    filled = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return filled.view(filled.shape[0] // rows, rows, filled.shape[1] // columns, columns)


def merge_blocks(tiles: Tensor, like: Tensor) -> Tensor:
    """Undo `split_blocks`: the matrix [rows, columns] of the shape of `like` from its blocks."""
    return tiles.flatten(2).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def product(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """Return a b^T, [m, n], in `dtype`, emulated; this defines the product of two quantized matrices. a: [m, k]; b: [n, k]."""
    result = a.without_tensor_scale(accumulation_dtype(dtype)) @ b.without_tensor_scale(accumulation_dtype(dtype)).t()
    if a.scale is not None and b.scale is not None:
        result = result * (a.scale * b.scale)
    return result.to(dtype)
