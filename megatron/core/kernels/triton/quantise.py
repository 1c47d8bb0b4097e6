"""fp8 quantization in Triton: absolute maxima in one kernel, and one that rounds a matrix and writes it in both orders.

    x [m, k]  --  read once  -->  values [m, k] and transposed values [k, m], each contiguous, as tensor cores take them

A tensor's absolute maximum comes as the maxima of its parts, whose maximum the second kernel takes itself: nothing has to be zeroed
and no kernel is launched for a scalar. Maxima are compared as integers, of which NaN is the largest.

This file needs the package triton, and is imported when the kernel is chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.low_precision.fp8 import NumberFormat, QuantizedMatrix, QuantizeTransposeKernels
from megatron.core.kernels.triton import cdiv, round_up_to_power_of_2

_STEP = 4096  # elements that a program reads at a time
_MOST_PARTS = 512
_TILE = 128  # rows and columns of a program, and the largest block
_SMALL_TILE, _INTERPRETED_TILE = 64, 512  # where a tensor has one scale; the interpreter is slow for each program
_TORCH_TO_TRITON = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def _amax_bits(x: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the bits (int32) of the largest absolute value of x along an axis; NaN counts as larger than all."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def _partial_amaxes_kernel(
    x: tl.tensor, parts: tl.tensor, size: tl.tensor, each: tl.tensor, STEP: tl.constexpr
) -> None:
    """Kernel: write the absolute maximum of `each` consecutive elements of x [size] to parts [programs], fp32."""
    start = tl.program_id(0).to(tl.int64) * each
    maximum = tl.zeros((STEP,), tl.int32)
    for first in range(0, each, STEP):
        places = start + first + tl.arange(0, STEP)
        values = tl.load(x + places, mask=places < size, other=0.0).to(tl.float32)
        maximum = tl.maximum(maximum, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(parts + tl.program_id(0), tl.max(maximum, 0).to(tl.float32, bitcast=True))


@triton.jit
def _scale_exponents(bits: tl.tensor, FRACTION: tl.constexpr, POWER: tl.constexpr) -> tl.tensor:
    """Return `fp8._scale_exponent` of absolute maxima that are given as fp32 bits: the exponents of the blocks' scales.
    The format's largest number is (1 + FRACTION / 2^23) 2^(POWER - 1).
    """
    bits = tl.where(bits >= 0x7F800000, 0x3F800000, bits)
    power = (bits >> 23) - 126 - POWER + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)
    return tl.where(bits == 0, -POWER, tl.minimum(tl.maximum(power, -127), 127))


@triton.jit
def _exp2_of_integer(power: tl.tensor) -> tl.tensor:
    """Return 2^power in fp32, for integer powers of -127 to 127."""
    return tl.where(power == -127, 0x00400000, (power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _saturating_cast_to_fp8(x: tl.tensor, LARGEST: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr) -> tl.tensor:
    """Round x to the fp8 format TYPE, to the nearest, ties to even; values beyond LARGEST, the largest number of the
    format, saturate; NaN stays NaN.

    BYTES: return the bits as uint8, computed by arithmetic, for Triton's interpreter, whose own conversion rounds
    wrongly.
    """
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if BYTES:
        return _fp8_bits(x, TYPE.fp_mantissa_width, 1 - TYPE.exponent_bias)
    else:
        return x.to(TYPE)


@triton.jit
def _fp8_bits(x: tl.tensor, MANTISSA: tl.constexpr, LOWEST: tl.constexpr) -> tl.tensor:
    """Return the bits (uint8) of x rounded to an fp8 format. MANTISSA: its number of fraction bits; LOWEST: exponent of
    its smallest normal number.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    power = tl.maximum((size >> 23) - 127, LOWEST)
    count = tl.abs(x) * _exp2_of_integer(MANTISSA - power)
    count = (count + 8388608.0) - 8388608.0  # which rounds to an integer
    result = ((power - LOWEST) << MANTISSA) + count.to(tl.int32)
    result = tl.where(size > 0x7F800000, 127, result) | ((bits >> 24) & 128)
    return result.to(tl.uint8)


@triton.jit
def _quantize_per_tensor_kernel(
    x: tl.tensor, rows: tl.tensor, turned: tl.tensor, parts: tl.tensor, inverse: tl.tensor, seen: tl.tensor,
    m: tl.tensor, k: tl.tensor, count: tl.tensor, shrink: tl.tensor,
    LARGEST: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: quantize one tile of x [m, k] with a single scale for the whole tensor.

    parts: [count], partial absolute maxima of x, from whose maximum the scale is computed (PARTS: `count` rounded up to
    a power of two). shrink: factor of the scale, 2^-margin. rows: receives the values [m, k];
    turned: the transposed values [k, m]; either may be None. inverse: [], receives the factor by which values are
    dequantized. seen: [], raised to the absolute maximum of x, or None. LARGEST, TYPE, BYTES: as in `_saturating_cast_to_fp8`.
    """
    numbers = tl.arange(0, PARTS)
    bits = _amax_bits(tl.load(parts + numbers, mask=numbers < count, other=0.0), 0)
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(1.0, largest) * LARGEST * shrink  # as torch divides a number by a tensor
    scale = tl.where(scale > 3.4028234663852886e38, 3.4028234663852886e38, scale)
    scale = tl.where(bits == 0, 1.0, scale)
    if tl.program_id(0) == 0 and tl.program_id(1) == 0:
        tl.store(inverse, tl.div_rn(1.0, scale))
    down = tl.program_id(0) * TILE + tl.arange(0, TILE)
    along = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (down < m)[:, None] & (along < k)[None, :]
    values = tl.load(x + down.to(tl.int64)[:, None] * k + along[None, :], mask=inside, other=0.0).to(tl.float32)
    if seen is not None:
        tl.atomic_max(seen, tl.max(_amax_bits(values, 1), 0).to(tl.float32, bitcast=True))
    result = _saturating_cast_to_fp8(values * scale, LARGEST, TYPE, BYTES)
    if rows is not None:
        tl.store(rows + down.to(tl.int64)[:, None] * k + along[None, :], result, mask=inside)
    if turned is not None:
        place = turned + along.to(tl.int64)[:, None] * m + down[None, :]
        tl.store(place, tl.trans(result), mask=(along < k)[:, None] & (down < m)[None, :])


@triton.jit
def _quantize_row_blocks(
    values: tl.tensor,
    LARGEST: tl.constexpr,
    FRACTION: tl.constexpr,
    POWER: tl.constexpr,
    TYPE: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Quantize a tile [TILE, TILE] with a power of two for each BLOCK elements of a row. Return the values, and the
    fp32 bits of the absolute maxima of the blocks, [TILE, TILE / BLOCK].
    """
    blocks = tl.reshape(values, (TILE, TILE // BLOCK, BLOCK))
    bits = _amax_bits(blocks, 2)
    blocks = blocks * _exp2_of_integer(-_scale_exponents(bits, FRACTION, POWER))[:, :, None]
    return tl.reshape(_saturating_cast_to_fp8(blocks, LARGEST, TYPE, BYTES), (TILE, TILE)), bits


@triton.jit
def _store_block_scales(
    scales: tl.tensor, bits: tl.tensor, down: tl.tensor, along: tl.tensor, inside: tl.tensor, down_step: tl.tensor,
    along_step: tl.tensor,
    FRACTION: tl.constexpr, POWER: tl.constexpr,
) -> None:  # fmt: skip
    """Write the scales of blocks, in fp32 or as e8m0 bytes, according to the dtype of `scales`. bits: absolute maxima
    as fp32 bits; down, along: row and column of each block; inside: mask; FRACTION, POWER: as in `_scale_exponents`.
    """
    power = _scale_exponents(bits, FRACTION, POWER)
    place = scales + down * down_step + along * along_step
    if scales.dtype.element_ty == tl.float32:
        result = tl.where(bits >= 0x7F800000, float("nan"), _exp2_of_integer(power))
        tl.store(place, result, mask=inside)
    else:
        tl.store(place, tl.where(bits >= 0x7F800000, 255, power + 127).to(tl.uint8), mask=inside)


@triton.jit
def _quantize_per_block_kernel(
    x: tl.tensor, rows: tl.tensor, turned: tl.tensor, row_scales: tl.tensor, turned_scales: tl.tensor, m: tl.tensor,
    k: tl.tensor, row_steps: tl.tensor, row_step: tl.tensor, turned_steps: tl.tensor, turned_step: tl.tensor,
    LARGEST: tl.constexpr, FRACTION: tl.constexpr, POWER: tl.constexpr, TYPE: tl.constexpr, BYTES: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: quantize one tile of x [m, k] with a power of two as scale of each block.

    rows: receives the values [m, k], with blocks of 1 x BLOCK; turned: those of the transpose [k, m], with blocks along
    its own rows; either may be None. SQUARE: blocks of TILE x TILE serve both. row_scales: [m, k / BLOCK],
    turned_scales: [k, m / BLOCK] (SQUARE: one for each tile), with their strides.
    """
    down = tl.program_id(0) * TILE + tl.arange(0, TILE)
    along = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (down < m)[:, None] & (along < k)[None, :]
    values = tl.load(x + down.to(tl.int64)[:, None] * k + along[None, :], mask=inside, other=0.0).to(tl.float32)
    place = down.to(tl.int64)[:, None] * k + along[None, :]
    turned_place = along.to(tl.int64)[:, None] * m + down[None, :]
    turned_inside = (along < k)[:, None] & (down < m)[None, :]
    first_down, first_along = tl.program_id(0), tl.program_id(1)
    if SQUARE:
        bits = tl.max(_amax_bits(values, 1), 0)
        result = _saturating_cast_to_fp8(
            values * _exp2_of_integer(-_scale_exponents(bits, FRACTION, POWER)), LARGEST, TYPE, BYTES
        )
        if rows is not None:
            tl.store(rows + place, result, mask=inside)
            _store_block_scales(row_scales, bits, first_down, first_along, True, row_steps, row_step, FRACTION, POWER)
        if turned is not None:
            tl.store(turned + turned_place, tl.trans(result), mask=turned_inside)
            _store_block_scales(
                turned_scales, bits, first_along, first_down, True, turned_steps, turned_step, FRACTION, POWER
            )
    else:
        COUNT: tl.constexpr = TILE // BLOCK
        numbers = tl.arange(0, COUNT)
        if rows is not None:
            result, bits = _quantize_row_blocks(values, LARGEST, FRACTION, POWER, TYPE, BYTES, TILE, BLOCK)
            tl.store(rows + place, result, mask=inside)
            columns = first_along * COUNT + numbers
            real = (down < m)[:, None] & (columns < tl.cdiv(k, BLOCK))[None, :]
            _store_block_scales(
                row_scales, bits, down[:, None], columns[None, :], real, row_steps, row_step, FRACTION, POWER
            )
        if turned is not None:
            result, bits = _quantize_row_blocks(tl.trans(values), LARGEST, FRACTION, POWER, TYPE, BYTES, TILE, BLOCK)
            tl.store(turned + turned_place, result, mask=turned_inside)
            columns = first_down * COUNT + numbers
            real = (along < k)[:, None] & (columns < tl.cdiv(m, BLOCK))[None, :]
            _store_block_scales(
                turned_scales, bits, along[:, None], columns[None, :], real, turned_steps, turned_step, FRACTION, POWER
            )


_INTERPRETED = not isinstance(_partial_amaxes_kernel, triton.JITFunction)
_WHOLE_TILE = _INTERPRETED_TILE if _INTERPRETED else _SMALL_TILE


def partial_amaxes(x: Tensor) -> Tensor:
    """Return absolute maxima of parts of x (any shape), fp32 [parts]; the largest of them is that of x. [1] of zero for
    an empty tensor.
    """
    x = x.detach().contiguous()
    if not x.numel():
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    each = cdiv(cdiv(x.numel(), _MOST_PARTS), _STEP) * _STEP
    parts = torch.empty(cdiv(x.numel(), each), dtype=torch.float32, device=x.device)
    _partial_amaxes_kernel[(len(parts),)](x, parts, x.numel(), each, STEP=_STEP)
    return parts


def quantize_per_tensor(
    x: Tensor,
    number: NumberFormat,
    largest: Tensor,
    *,
    margin: int = 0,
    seen: Tensor | None = None,
    rows: bool = True,
    turned: bool = True,
) -> tuple[QuantizedMatrix | None, QuantizedMatrix | None]:
    """Quantize x [m, k] with a single scale. Return the quantized matrix (None unless `rows`) and the quantized
    transpose [k, m] (None unless `turned`).

    largest: [parts], whose maximum is the absolute maximum that the scale is made for. margin: powers of two left above
    it. seen: fp32 [], raised to the absolute maximum of x.
    """
    x, (m, k) = x.detach().contiguous(), x.shape
    straight, across = _allocate_values_and_transpose(x, rows=rows, turned=turned, dtype=number.dtype)
    inverse = torch.empty((), dtype=torch.float32, device=x.device)
    # An empty matrix has a scale, too, which the one program that is then launched writes.
    _quantize_per_tensor_kernel[(max(cdiv(m, _WHOLE_TILE), 1), max(cdiv(k, _WHOLE_TILE), 1))](
        x, straight, across, largest, inverse, seen, m, k, largest.numel(), 2.0**-margin,
        LARGEST=number.largest, TYPE=_TORCH_TO_TRITON[number.dtype], BYTES=_INTERPRETED,
        PARTS=round_up_to_power_of_2(largest.numel()), TILE=_WHOLE_TILE,
    )  # fmt: skip
    return (
        None if straight is None else QuantizedMatrix(straight.view(number.dtype), inverse),
        None if across is None else QuantizedMatrix(across.view(number.dtype), inverse),
    )


def quantize_per_block(
    x: Tensor, number: NumberFormat, block: tuple[int, int], *, rows: bool = True, turned: bool = True
) -> tuple[QuantizedMatrix | None, QuantizedMatrix | None]:
    """Quantize x [m, k] with a power of two for each block. Return the quantized matrix (None unless `rows`) and the
    quantized transpose [k, m] (None unless `turned`).

    block: (1, 32) or (1, 128), along the rows of each of the two, or (128, 128). Scales of blocks of 128 are fp32 in
    the layout of the tensor cores, others e8m0.
    """
    x, (m, k) = x.detach().contiguous(), x.shape
    straight, across = _allocate_values_and_transpose(x, rows=rows, turned=turned, dtype=number.dtype)
    square, size = block[0] > 1, block[1]
    scales, turned_scales = (
        _allocate_block_scales(x, cdiv(down, block[0]), cdiv(along, size), size, square=square)
        for down, along in ((m, k), (k, m))
    )
    fraction, power = _mantissa_exponent_of_largest(number)
    if x.numel():
        _quantize_per_block_kernel[(cdiv(m, _TILE), cdiv(k, _TILE))](
            x, straight, across, scales, turned_scales, m, k, *scales.stride(), *turned_scales.stride(),
            LARGEST=number.largest, FRACTION=fraction, POWER=power, TYPE=_TORCH_TO_TRITON[number.dtype],
            BYTES=_INTERPRETED, TILE=_TILE, BLOCK=size, SQUARE=square, num_warps=8,
        )  # fmt: skip
    return (
        None if straight is None else QuantizedMatrix(straight.view(number.dtype), None, _view_as_e8m0(scales), block),
        None
        if across is None
        else QuantizedMatrix(across.view(number.dtype), None, _view_as_e8m0(turned_scales), block),
    )


def _allocate_values_and_transpose(
    x: Tensor, *, rows: bool, turned: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the quantized x [m, k] and its quantized transpose [k, m]; None for one that is not asked for."""
    (m, k), dtype = x.shape, torch.uint8 if _INTERPRETED else dtype
    return (
        torch.empty((m, k), dtype=dtype, device=x.device) if rows else None,
        torch.empty((k, m), dtype=dtype, device=x.device) if turned else None,
    )


def _allocate_block_scales(x: Tensor, down: int, along: int, size: int, *, square: bool) -> Tensor:
    """Allocate scales of [down, along] blocks. size: columns of a block. 1 x 128: fp32, column-major; squares: fp32,
    row-major; 1 x 32: bytes.
    """
    if size < _TILE:
        return torch.empty((down, along), dtype=torch.uint8, device=x.device)
    if square:
        return torch.empty((down, along), dtype=torch.float32, device=x.device)
    return torch.empty((along, down), dtype=torch.float32, device=x.device).t()


def _view_as_e8m0(scales: Tensor) -> Tensor:
    """View scales that are stored as bytes as e8m0; return fp32 scales as they are."""
    return scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales


def _mantissa_exponent_of_largest(number: NumberFormat) -> tuple[int, int]:
    """Return FRACTION and POWER of a format for `_scale_exponents`, from the bits of its largest number."""
    bits = int(torch.tensor(number.largest, dtype=torch.float32, device="cpu").view(torch.int32))
    return bits & 0x7FFFFF, (bits >> 23) - 126


KERNELS = QuantizeTransposeKernels(partial_amaxes, quantize_per_tensor, quantize_per_block)
