"""RMSNorm and LayerNorm in Triton: one program a row, which it reads once; sums in fp32.

    forward    y = (x - mean) * scale * weight + bias     scale = 1 / sqrt(mean((x - mean)^2) + epsilon), of RMSNorm without a mean
    backward   g = dy * weight, n = (x - mean) * scale    dx = scale * (g - mean(g) - n * mean(g * n)), of RMSNorm without mean(g)
               dweight = sum of dy * n over rows          dbias = sum of dy over rows

The sums over rows are made in two steps, since programs do not wait for each other: each of some rows, then of those by torch.
This file needs the package triton, and is imported when one of its kernels is first called.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

_ROWS, _COLUMNS = 64, 128  # what a program sums for the gradients of weight and bias


@triton.jit
def _forward(x: tl.tensor, y: tl.tensor, weight: tl.tensor, bias: tl.tensor, stats: tl.tensor, epsilon: tl.tensor,
             size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """stats: [rows, 2], mean and scale. Without a bias: RMSNorm, whose mean is 0."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    mean = 0.0
    if bias is not None:
        mean = tl.sum(values) / size
        values = tl.where(inside, values - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / size + epsilon)
    found = values * scale
    if weight is not None:
        found = found * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        found = found + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(stats + 2 * row, mean)
    tl.store(stats + 2 * row + 1, scale)
    tl.store(y + row * size + columns, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy: tl.tensor, x: tl.tensor, weight: tl.tensor, stats: tl.tensor, dx: tl.tensor, size: tl.tensor,
              CENTRED: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """The gradient of x; of LayerNorm if CENTRED."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    gradient = tl.load(dy + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    mean, scale = tl.load(stats + 2 * row), tl.load(stats + 2 * row + 1)
    normed = tl.where(inside, (values - mean) * scale, 0.0)
    if weight is not None:
        gradient = gradient * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    found = gradient - normed * (tl.sum(gradient * normed) / size)
    if CENTRED:
        found = found - tl.sum(gradient) / size
    tl.store(dx + row * size + columns, (found * scale).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _sums(dy: tl.tensor, x: tl.tensor, stats: tl.tensor, sums: tl.tensor, rows: tl.tensor, size: tl.tensor,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """Some rows' share in the gradients of weight and bias. sums: [2, programs of rows, size]."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    some = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, there = columns < size, some < rows
    places, both = some[:, None] * size + columns[None, :], there[:, None] & inside[None, :]
    gradient = tl.load(dy + places, mask=both, other=0.0).to(tl.float32)
    values = tl.load(x + places, mask=both, other=0.0).to(tl.float32)
    mean = tl.load(stats + 2 * some, mask=there, other=0.0)
    scale = tl.load(stats + 2 * some + 1, mask=there, other=0.0)
    place = tl.program_id(1).to(tl.int64) * size + columns
    tl.store(sums + place, tl.sum(gradient * (values - mean[:, None]) * scale[:, None], 0), mask=inside)
    tl.store(sums + tl.num_programs(1).to(tl.int64) * size + place, tl.sum(gradient, 0), mask=inside)


class _Norm(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
        x = x.contiguous()
        size = x.shape[-1]
        rows, block = x.numel() // max(1, size), triton.next_power_of_2(size)
        y, stats = torch.empty_like(x), torch.empty((rows, 2), dtype=torch.float32, device=x.device)
        if rows:
            _forward[(rows,)](x, y, weight, bias, stats, epsilon, size, BLOCK=block, num_warps=_warps(block))
        context.save_for_backward(x, weight, stats)
        context.centred = bias is not None
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = context.saved_tensors
        gradient, size, rows = gradient.contiguous(), x.shape[-1], len(stats)
        block, parts = triton.next_power_of_2(size), triton.cdiv(rows, _ROWS)
        dx = torch.empty_like(x)
        if rows:
            _backward[(rows,)](gradient, x, weight, stats, dx, size, CENTRED=context.centred, BLOCK=block, num_warps=_warps(block))
        if weight is None:
            return dx, None, None, None
        sums = torch.empty((2, parts, size), dtype=torch.float32, device=x.device)
        if rows:
            _sums[(triton.cdiv(size, _COLUMNS), parts)](gradient, x, stats, sums, rows, size, ROWS=_ROWS, COLUMNS=_COLUMNS)
        of_weight, of_bias = sums.sum(1).to(weight.dtype)
        return dx, of_weight, of_bias if context.centred else None, None


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """`reference.rms_norm`. x: [..., size]; weight: [size]."""
    return _Norm.apply(x, weight, None, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`reference.layer_norm`. x: [..., size]; weight, bias: [size]."""
    return _Norm.apply(x, weight, bias, epsilon)


def _warps(block: int) -> int:
    """Groups of 32 threads for a row: each thread holds some 8 numbers of a wide one."""
    return min(16, max(4, block // 256))
