"""Matrices in 4 bits, as in "Pretraining Large Language Models with NVFP4" (NVIDIA, 2025, arXiv 2509.25149), emulated.

    x [m, k]  ->  values in e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6), a scale in e4m3 for each 1 x 16 (weights: 16 x 16), one for all

Gradients are rounded up or down by chance, so that their mean stays; both operands of a weight's gradient are first rotated by a
Hadamard matrix along the sum, 16 at a time, which spreads outliers and cancels in the product.

The values lie in e4m3, which holds all of e2m1. They are multiplied as those of `fp8.py` are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.kernels.low_precision.fp8 import E4M3, Number, Quantised, block_sizes, tiled, untiled
from megatron.core.kernels.reference import wide

E2M1 = Number("e2m1", torch.float8_e4m3fn, 6.0)
BLOCK = 16
# Signs of the rotation, drawn once for all layers and steps, as the paper advises.
_SIGNS = (1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, 1, 1, -1, 1)


def by_small_blocks(
    x: Tensor, largest: Tensor, block: tuple[int, int], noise: Tensor | None = None, sizes: Tensor | None = None
) -> Quantised:
    """x [m, k] in e2m1. largest: [], of all of x. noise: like x, from 0 to 1, for rounding by chance; None: to the nearest.

    sizes: as in `fp8.by_blocks`.
    """
    enlarge, scales = small_scales(block_sizes(x, block) if sizes is None else sizes, largest)
    tiles = tiled(x.to(wide(x.dtype)), block) * enlarge
    inverse = scales.to(tiles.dtype).reciprocal()
    inverse = torch.where(
        inverse.isinf(), torch.zeros_like(inverse), inverse
    )  # a block too small for its scale is zero
    scaled = tiles * inverse[:, None, :, None]
    chance = None if noise is None else tiled(noise.to(tiles.dtype), block)
    return Quantised(untiled(to_e2m1(scaled, chance), x).to(E2M1.dtype), enlarge.reciprocal(), scales, block)


def small_scales(sizes: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """What all is multiplied by, [], and what takes the scales of blocks back, e4m3. sizes: of blocks; largest: [], of all.

    The scale of all lets a block's scale use the range of e4m3.
    """
    enlarge = torch.where(largest > 0, E2M1.largest * E4M3.largest / largest, torch.ones_like(largest))
    enlarge = enlarge.clamp(max=torch.finfo(torch.float32).max)
    return enlarge, (sizes * enlarge / E2M1.largest).clamp(max=E4M3.largest).to(torch.float8_e4m3fn)


def to_e2m1(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """The nearest number of e2m1, of two equally near ones the even; or with noise from 0 to 1, one of the two beside it by chance.

    What is too large saturates; not a number stays so.
    """
    size = x.abs().clamp(max=E2M1.largest)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0)).to(x.dtype)
    count = size / step
    count = count.round() if noise is None else (count + noise).floor()
    return torch.copysign((count * step).clamp(max=E2M1.largest), x)


def rotated(x: Tensor) -> Tensor:
    """x [m, k], each 16 of its columns times the same orthogonal matrix; columns are filled up to a multiple with zeros."""
    tiles = tiled(x.to(wide(x.dtype)), (1, BLOCK))
    return (tiles @ rotation(tiles.dtype, x.device)).flatten(2).flatten(0, 1)


def rotation(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix [16, 16] by Sylvester's construction, its rows with signs, over 4: its transpose is its inverse."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=dtype, device=device)
    whole = two
    while len(whole) < BLOCK:
        whole = torch.kron(whole, two)
    return torch.tensor(_SIGNS, dtype=dtype, device=device)[:, None] * whole / BLOCK**0.5
