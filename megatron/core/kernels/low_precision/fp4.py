"""NVFP4 matrices, as in "Pretraining Large Language Models with NVFP4" (NVIDIA, 2025, arXiv 2509.25149), emulated.

    x [m, k]  ->  values in e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), an e4m3 scale for each block of 1 x 16 (weights: 16 x 16), one fp32 scale for the tensor

Gradients are rounded stochastically, so that their mean stays. Both operands of a weight gradient are first rotated by a Hadamard matrix along the summed
dimension, 16 elements at a time, which spreads outliers and cancels in the product.

Values are stored in e4m3, which represents every e2m1 number exactly, and multiplied like those of `fp8.py`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron.core.kernels.low_precision.fp8 import (
    E4M3,
    NumberFormat,
    QuantizedMatrix,
    block_amax,
    join_blocks_into_matrix,
    split_matrix_into_blocks,
)
from megatron.core.kernels.ops.reference import accumulation_dtype_of

E2M1 = NumberFormat("e2m1", torch.float8_e4m3fn, 6.0)
BLOCK = 16
# Signs of the rotation, drawn once for all layers and steps, as the paper advises.
_SIGNS = (1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, 1, 1, -1, 1)


def quantize_nvfp4(
    x: Tensor, largest: Tensor, block: tuple[int, int], noise: Tensor | None = None, sizes: Tensor | None = None
) -> QuantizedMatrix:
    """Quantize x [m, k] to e2m1 values with an e4m3 scale for each block and one fp32 scale for the tensor.

    largest: [], absolute maximum of x. block: rows and columns that share a scale. noise: like x, uniform in [0, 1),
    for stochastic rounding; None: to the nearest. sizes: absolute maxima of the blocks, as in `fp8.quantize_per_block`.
    """
    enlarge, scales = nvfp4_scales(block_amax(x, block) if sizes is None else sizes, largest)
    tiles = split_matrix_into_blocks(x.to(accumulation_dtype_of(x.dtype)), block) * enlarge
    inverse = scales.to(tiles.dtype).reciprocal()
    inverse = inverse.masked_fill(inverse.isinf(), 0.0)  # a block too small for its scale is zero
    scaled = tiles * inverse[:, None, :, None]
    chance = None if noise is None else split_matrix_into_blocks(noise.to(tiles.dtype), block)
    return QuantizedMatrix(
        join_blocks_into_matrix(round_to_e2m1(scaled, chance), x).to(E2M1.dtype), enlarge.reciprocal(), scales, block
    )


def nvfp4_scales(sizes: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return NVFP4's two levels of scales: the factor by which the whole tensor is multiplied before it is quantized,
    [], and the e4m3 scale of each block, by which values are multiplied when dequantized.

    sizes: absolute maximum of each block; largest: [], of the tensor. The factor makes the scales of the blocks use the
    range of e4m3.
    """
    enlarge = torch.where(largest > 0, E2M1.largest * E4M3.largest / largest, torch.ones_like(largest))
    enlarge = enlarge.clamp(max=torch.finfo(torch.float32).max)
    return enlarge, (sizes * enlarge / E2M1.largest).clamp(max=E4M3.largest).to(torch.float8_e4m3fn)


def round_to_e2m1(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Round each element to the nearest e2m1 number, ties to even; with noise (uniform in [0, 1)) stochastically to one
    of its two neighbours. x, noise, result: [...], the result in the dtype of x.

    Too large values saturate; NaN stays NaN.
    """
    size = x.abs().clamp(max=E2M1.largest)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0)).to(x.dtype)
    count = size / step
    count = count.round() if noise is None else (count + noise).floor()
    return torch.copysign((count * step).clamp(max=E2M1.largest), x)


def hadamard_transform(x: Tensor) -> Tensor:
    """Return x [m, k] with each group of 16 columns multiplied by the Hadamard matrix; k is padded with zeros to a multiple of 16."""
    tiles = split_matrix_into_blocks(x.to(accumulation_dtype_of(x.dtype)), (1, BLOCK))
    return (tiles @ hadamard_matrix(tiles.dtype, x.device)).flatten(2).flatten(0, 1)


@cache  # a copy to a GPU is waited for
def hadamard_matrix(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the Hadamard matrix [16, 16] by Sylvester's construction, with random signs of rows, divided by 4: its transpose is its inverse."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype)
    whole = two
    while len(whole) < BLOCK:
        whole = torch.kron(whole, two)
    return (torch.tensor(_SIGNS, dtype=dtype)[:, None] * whole / BLOCK**0.5).to(device)
