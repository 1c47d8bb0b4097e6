"""fp8 and NVFP4 matrix products on the GPU's tensor cores; `fp8.emulated_quantized_matmul` defines them, up to the order of sums.

    one scale a tensor     Ada and newer        torch._scaled_mm
    1 x 128 and 128 x 128  Hopper               torch.nn.functional.scaled_mm
    1 x 32                 Blackwell and newer  torch.nn.functional.scaled_mm
    1 x 16, NVFP4          Blackwell and newer  the same, with two values in a byte; a block of 16 x 16 is 16 blocks of 1 x 16

The hardware requires rows of whole blocks with at least 16 elements, and a number of rows divisible by the block or by 16; operands are padded with
zeros here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.low_precision import fp4
from megatron.core.kernels.low_precision.fp8 import QuantizedMatrix

_ROW = 16  # elements of a row are a multiple of it
_SCALES = 4  # scales of 128 x 128 blocks, and of 1 x 32, come by so many along the sum


def scaled_mm_unsupported_reason(recipe: str, capability: tuple[int, int]) -> str:
    """Return why the tensor cores of a GPU of this compute capability (major, minor) cannot multiply matrices of this
    recipe; "" if they can.
    """
    if recipe == "blockwise" and capability[0] != 9:
        return "blocks of 128 are for Hopper (capability 9.0)"
    if recipe in ("mxfp8", "nvfp4") and capability < (10, 0):
        return (
            f"blocks of {32 if recipe == 'mxfp8' else '16 values of 4 bits'} need Blackwell (capability 10.0) or newer"
        )
    if capability < (8, 9):
        return "8 bits need Ada (capability 8.9) or newer"
    return "" if recipe in ("tensorwise", "delayed") or hasattr(F, "scaled_mm") else "blocks need torch 2.10 or newer"


def native_quantized_matmul(
    a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Return a b^T, [m, n], in `dtype`, by the GPU's tensor cores. a: [m, k]; b: [n, k]; quantized by the same recipe.
    fast: with one scale a tensor, sums may be accumulated at the tensor cores' lower precision.
    """
    if 0 in (*a.values.shape, *b.values.shape):
        return torch.zeros(a.values.shape[0], b.values.shape[0], dtype=dtype, device=a.values.device)
    if (rows := b.values.shape[0]) % max(b.block[0], _ROW):
        return native_quantized_matmul(a, _pad_rows_to_whole_blocks(b), dtype, fast=fast)[:, :rows]
    if (
        a.block == (1, 128) and (rows := a.values.shape[0]) % _SCALES
    ):  # whose scales stand column by column, in lines of 16 bytes
        return native_quantized_matmul(_pad_rows_to_whole_blocks(a), b, dtype, fast=fast)[:rows]
    if a.block[1] == fp4.BLOCK:
        return _nvfp4_matmul(a, b, dtype)
    along = max(a.block[1], b.block[1], _ROW)
    left, right = (_pad_columns(x.values, along) for x in (a, b))
    if a.blocks is None:
        return torch._scaled_mm(
            left,
            right.t(),
            scale_a=a.required_tensor_scale.float(),
            scale_b=b.required_tensor_scale.float(),
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    (scale_a, kind_a, order), (scale_b, kind_b, _) = _scales_in_hardware_layout(a), _scales_in_hardware_layout(b)
    return F.scaled_mm(
        left, right.t(), scale_a, kind_a, scale_b, kind_b, swizzle_a=order, swizzle_b=order, output_dtype=dtype
    )


def _nvfp4_matmul(a: QuantizedMatrix, b: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Return a b^T, [m, n], in `dtype`, for NVFP4 matrices a [m, k] and b [n, k]."""
    kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    orders = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    left, right = (pack_e2m1(_pad_columns(x.values, 2 * _ROW)) for x in (a, b))
    scales = [
        [
            swizzle_scales(x.required_block_scales.repeat_interleave(x.block[0], 0)[: len(x.values)]),
            x.required_tensor_scale.float().reshape(1),
        ]
        for x in (a, b)
    ]
    return F.scaled_mm(
        left, right.t(), scales[0], kinds, scales[1], kinds, swizzle_a=orders, swizzle_b=orders, output_dtype=dtype
    )


def pack_e2m1(values: Tensor) -> Tensor:
    """Pack e2m1 values that are stored in e4m3, [m, k], two to a byte, [m, k / 2], the first in the low four bits. A
    code is a sign bit and an index into (0, 0.5, 1, 1.5, 2, 3, 4, 6).

    NaN becomes 6; the scale of its block is NaN.
    """
    held = values.view(torch.uint8)
    size = (held & 127).short()  # e4m3 has 0.5 at 48, and from 1 at 56 on every fourth is one of e2m1
    place = torch.where(size == 0, 0, ((size - 48) // 4).clamp(1, 7)).to(torch.uint8) | (held >> 7 << 3)
    return (place[:, ::2] | place[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


def _pad_rows_to_whole_blocks(x: QuantizedMatrix) -> QuantizedMatrix:
    """Return x with rows of zeros added, up to a multiple of the rows of a block and of 16."""
    blocks = x.blocks
    if blocks is not None and x.block[0] == 1:
        blocks = _pad_with_zeros(blocks, 0, -x.values.shape[0] % _ROW)
    return replace(x, values=_pad_with_zeros(x.values, 0, -x.values.shape[0] % max(x.block[0], _ROW)), blocks=blocks)


def _pad_columns(values: Tensor, multiple: int) -> Tensor:
    """Return `values` with columns of zeros added up to a multiple of `multiple`, contiguous."""
    missing = -values.shape[1] % multiple
    return _pad_with_zeros(values, missing, 0) if missing else values.contiguous()


def _pad_with_zeros(x: Tensor, columns: int, rows: int) -> Tensor:
    """Return x with so many columns and rows of zeros added behind."""
    if x.dtype.itemsize > 1:
        return F.pad(x, (0, columns, 0, rows))
    return F.pad(x.contiguous().view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)  # a byte of zeros is a zero


def _scales_in_hardware_layout(x: QuantizedMatrix) -> tuple[Tensor, F.ScalingType, F.SwizzleType]:
    """Return the scales of x's blocks in the layout of the tensor cores, with torch's scaling type and swizzle type for
    them.
    """
    kinds, plain = F.ScalingType, F.SwizzleType.NO_SWIZZLE
    if x.block == (1, 128):
        return x.required_block_scales.float().t().contiguous().t(), kinds.BlockWise1x128, plain
    if x.block == (128, 128):
        scales, missing = x.required_block_scales.float(), -x.required_block_scales.shape[1] % _SCALES
        scales = F.pad(scales, (0, missing)) if missing else scales
        return scales.contiguous().t(), kinds.BlockWise128x128, plain  # may come turned
    assert x.block == (1, 32), f"no unit multiplies blocks of {x.block}"
    return swizzle_scales(x.required_block_scales), kinds.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Return block scales [m, blocks along k], one byte each, in the order that Blackwell's tensor cores read,
    flattened: tiles of 128 x 4, in which rows 32 apart are neighbours.
    """
    rows, columns = -(-scales.shape[0] // 128), -(-scales.shape[1] // _SCALES)
    filled = F.pad(
        scales.contiguous().view(torch.uint8), (0, columns * _SCALES - scales.shape[1], 0, rows * 128 - scales.shape[0])
    )
    tiles = filled.view(rows, 4, 32, columns, _SCALES).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)
