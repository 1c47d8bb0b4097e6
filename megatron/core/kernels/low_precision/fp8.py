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

from megatron.core.kernels.ops.reference import accumulation_dtype_of

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
class QuantizedMatrix:
    """A quantized matrix: each value is multiplied by the scale of its block and by the scale of the tensor.

    values: [m, k], in a low-precision dtype. scale: [], of the whole matrix; None: 1. blocks: scales of the blocks, [m
    / rows, k / columns] rounded up; None: 1. block: (rows, columns) of a block.
    """

    values: Tensor
    scale: Tensor | None = None
    blocks: Tensor | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def required_tensor_scale(self) -> Tensor:
        """Return the scale of the whole matrix, []; it must have one."""
        assert self.scale is not None, "this recipe scales whole matrices"
        return self.scale

    @property
    def required_block_scales(self) -> Tensor:
        """Return the scales of the blocks, [row blocks, column blocks]; the matrix must have them."""
        assert self.blocks is not None, "this recipe scales blocks"
        return self.blocks

    def t(self) -> QuantizedMatrix:
        """Return the transposed matrix."""
        blocks = None if self.blocks is None else self.blocks.t()
        return replace(self, values=self.values.t(), blocks=blocks, block=self.block[::-1])

    def apply_block_scales(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [m, k] in this dtype, multiplied by the scales of its blocks but not by that of the tensor;
        exact in fp32 and fp64.
        """
        values = self.values.to(dtype)
        if self.blocks is None:
            return values
        rows, columns = self.block
        scales = self.blocks.to(dtype).repeat_interleave(rows, 0)[: values.shape[0]].repeat_interleave(columns, 1)
        return values * scales[:, : values.shape[1]]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized matrix [m, k] in this dtype."""
        return self.apply_block_scales(dtype) if self.scale is None else self.apply_block_scales(dtype) * self.scale


@dataclass(frozen=True, slots=True)
class QuantizeTransposeKernels:
    """Kernels that quantize a matrix and its transpose in one pass (`triton/quantise.py`).

    largest_of(x): absolute maxima of parts of x, [parts], fp32. quantize_per_tensor(x, number, largest, margin=, seen=,
    rows=, turned=) and quantize_per_block(x, number, block, rows=, turned=): return the quantized x (None unless
    `rows`) and the quantized transpose (None unless `turned`).
    """

    largest_of: Callable[[Tensor], Tensor]
    quantize_per_tensor: Callable[..., tuple[QuantizedMatrix | None, QuantizedMatrix | None]]
    quantize_per_block: Callable[..., tuple[QuantizedMatrix | None, QuantizedMatrix | None]]


def tensor_amax(x: Tensor) -> Tensor:
    """Return the absolute maximum of x (any shape), [], in accumulation dtype; 0 for an empty tensor."""
    return (
        x.detach().abs().amax().to(accumulation_dtype_of(x.dtype))
        if x.numel()
        else x.new_zeros((), dtype=accumulation_dtype_of(x.dtype))
    )


def quantization_scale(largest: Tensor, number: NumberFormat, margin: int = 0) -> Tensor:
    """Return the factor [] by which a tensor is multiplied before rounding, so that its absolute maximum `largest` []
    becomes the largest number of the format, or that divided by 2^margin; 1 if the maximum is 0.

    A maximum that is not finite gives 0 or NaN, and so a matrix of NaN, which later checks find.
    """
    scale = number.largest / largest / 2.0**margin
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def quantize_per_tensor(x: Tensor, number: NumberFormat, scale: Tensor) -> QuantizedMatrix:
    """Quantize x [m, k] with one factor `scale` [], by which it is multiplied before rounding; its reciprocal becomes
    the scale of the result. Too large values saturate.
    """
    return QuantizedMatrix(_saturating_cast(x.to(accumulation_dtype_of(x.dtype)) * scale, number), scale.reciprocal())


def quantize_per_block(
    x: Tensor, number: NumberFormat, block: tuple[int, int], sizes: Tensor | None = None
) -> QuantizedMatrix:
    """Quantize x [m, k] with a power of two as scale of each block: the smallest with which none of its values
    saturates.

    block: (rows, columns) of a block. sizes: absolute maxima as `block_amax` returns them, for blocks of which x holds
    only a part; None: computed from x.
    """
    tiles = split_matrix_into_blocks(x.to(accumulation_dtype_of(x.dtype)), block)
    sizes = block_amax(x, block) if sizes is None else sizes
    scaled = torch.ldexp(tiles, -_scale_exponent(sizes, number.largest)[:, None, :, None])
    return QuantizedMatrix(
        join_blocks_into_matrix(_saturating_cast(scaled, number), x), None, e8m0_block_scales(sizes, number), block
    )


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the absolute maximum of each block of x [m, k], [m / rows, k / columns] rounded up, in accumulation dtype.
    block: (rows, columns).
    """
    return split_matrix_into_blocks(x.to(accumulation_dtype_of(x.dtype)), block).abs().amax(dim=(1, 3))


def e8m0_block_scales(sizes: Tensor, number: NumberFormat) -> Tensor:
    """Return the power-of-two scales of blocks as e8m0, by which values are multiplied when dequantized; NaN where the
    maximum is not finite.

    sizes: absolute maxima of blocks, of any shape, which the result has, too.
    """
    scales = torch.ldexp(torch.ones_like(sizes), _scale_exponent(sizes, number.largest))
    return scales.masked_fill(~sizes.isfinite(), float("nan")).to(torch.float8_e8m0fnu)


def _scale_exponent(value: Tensor, number: float) -> Tensor:
    """Return the smallest n with value <= number * 2^n, int32, within the range of e8m0; exact, since nothing is
    divided. Values that are not finite count as 1.
    """
    fraction, power = torch.frexp(torch.where(value.isfinite(), value, torch.ones_like(value)))
    own_fraction, own_power = math.frexp(number)
    return (power - own_power + (fraction > own_fraction)).clamp(_SMALLEST_POWER, _LARGEST_POWER)


def _saturating_cast(x: Tensor, number: NumberFormat) -> Tensor:
    """Round to the nearest number of a format, ties to even, in its dtype; too large values saturate; NaN stays NaN."""
    return x.clamp(-number.largest, number.largest).to(number.dtype)


def split_matrix_into_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Reshape x [m, k], padded with zeros, to blocks: [m / rows, rows, k / columns, columns]. block: (rows, columns)."""
    rows, columns = block
    filled = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return filled.view(filled.shape[0] // rows, rows, filled.shape[1] // columns, columns)


def join_blocks_into_matrix(tiles: Tensor, like: Tensor) -> Tensor:
    """Undo `split_matrix_into_blocks`: return the matrix [rows, columns] from its blocks, without padding. like: a
    matrix of the shape to return.
    """
    return tiles.flatten(2).flatten(0, 1)[: like.shape[0], : like.shape[1]]


def emulated_quantized_matmul(a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Return a b^T, [m, n], in `dtype`, by dequantizing both and multiplying in fp32 (fp64 for fp64); this defines the
    product of quantized matrices. a: [m, k]; b: [n, k].
    """
    result = a.apply_block_scales(accumulation_dtype_of(dtype)) @ b.apply_block_scales(accumulation_dtype_of(dtype)).t()
    if a.scale is not None and b.scale is not None:
        result = result * (a.scale * b.scale)
    return result.to(dtype)
