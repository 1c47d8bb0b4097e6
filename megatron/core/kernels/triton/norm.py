"""RMSNorm and LayerNorm in Triton: one program a row, which it reads once; sums in fp32.

    forward    y = (x - mean) * scale * weight + bias     scale = 1 / sqrt(mean((x - mean)^2) + epsilon), of RMSNorm without a mean
    backward   g = dy * weight, n = (x - mean) * scale    dx = scale * (g - mean(g) - n * mean(g * n)), of RMSNorm without mean(g)
               dweight = sum of dy * n over rows          dbias = sum of dy over rows

With an update, what is normed is x + update, rounded as the sum that is written; the gradient of the sum joins that of x.

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

from megatron.core.kernels.triton import cdiv, round_up_to_power_of_2

_ROWS, _COLUMNS = 64, 128  # what a program sums for the gradients of weight and bias


@triton.jit
def _norm_forward_kernel(
    x: tl.tensor,
    update: tl.tensor,
    y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stats: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Kernel: normalize one row; LayerNorm with a bias, RMSNorm without.

    x: [rows, SIZE]; update: [rows, SIZE], added first, or None. y: [1, rows, SIZE], the norm; with an update [2, rows,
    SIZE], the sum and its norm. stats: [rows, 2], receives mean (0 for RMSNorm) and scale, 1 / sqrt(variance +
    epsilon).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, triton.next_power_of_2(SIZE))
    inside = columns < SIZE
    target = y + row * SIZE + columns
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        values += tl.load(update + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        total = values.to(y.dtype.element_ty)
        tl.store(target, total, mask=inside)
        values = total.to(tl.float32)
        target += tl.num_programs(0).to(tl.int64) * SIZE
    mean = 0.0
    if bias is not None:
        mean = tl.sum(values) / SIZE
        values = tl.where(inside, values - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / SIZE + epsilon)
    normed_values = values * scale
    if weight is not None:
        normed_values = normed_values * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        normed_values = normed_values + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(stats + 2 * row, mean)
    tl.store(stats + 2 * row + 1, scale)
    tl.store(target, normed_values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward_kernel(
    dy: tl.tensor,
    more: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    stats: tl.tensor,
    dx: tl.tensor,
    CENTRED: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Kernel: compute the gradient dx of one row of x, of LayerNorm if CENTRED, else of RMSNorm. stats: from the
    forward pass. more: another gradient of x [rows, SIZE], which is added, or None.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, triton.next_power_of_2(SIZE))
    inside = columns < SIZE
    gradient = tl.load(dy + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    mean, scale = tl.load(stats + 2 * row), tl.load(stats + 2 * row + 1)
    normed = tl.where(inside, (values - mean) * scale, 0.0)
    if weight is not None:
        gradient = gradient * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    input_gradient = gradient - normed * (tl.sum(gradient * normed) / SIZE)
    if CENTRED:
        input_gradient = input_gradient - tl.sum(gradient) / SIZE
    input_gradient = input_gradient * scale
    if more is not None:
        input_gradient += tl.load(more + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + row * SIZE + columns, input_gradient.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _norm_weight_gradient_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Kernel: sum ROWS rows' contributions to the gradients of weight and bias. sums: [2, programs of rows, size],
    weight first.
    """
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


class _NormFunction(Function):
    """The autograd function of `rms_norm` (without bias), `layer_norm` (with bias) and, with an update, `residual_norm`."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, update: Tensor | None, weight: Tensor | None, bias: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, size = x.contiguous(), x.shape[-1]
        rows, update = x.numel() // max(1, size), None if update is None else update.contiguous()
        y = x.new_empty((1 if update is None else 2, *x.shape))
        stats = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
        if rows:
            _norm_forward_kernel[(rows,)](
                x, update, y, weight, bias, stats, epsilon, SIZE=size, num_warps=_num_warps_for_row(size)
            )
        context.centred = bias is not None
        context.save_for_backward(x if update is None else y[0], weight, stats)
        return y[0] if update is None else (y[0], y[1])

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = context.saved_tensors
        *more, gradient = (one.contiguous() for one in gradients)
        size, rows, dx, of_weight, of_bias = x.shape[-1], len(stats), torch.empty_like(x), None, None
        if rows:
            _norm_backward_kernel[(rows,)](
                gradient, more[0] if more else None, x, weight, stats, dx, CENTRED=context.centred, SIZE=size,
                num_warps=_num_warps_for_row(size),
            )  # fmt: skip
        if weight is not None:
            parts = cdiv(rows, _ROWS)
            sums = torch.empty((2, parts, size), dtype=torch.float32, device=x.device)
            if rows:
                _norm_weight_gradient_kernel[(cdiv(size, _COLUMNS), parts)](
                    gradient, x, stats, sums, rows, size, ROWS=_ROWS, COLUMNS=_COLUMNS
                )
            of_weight, of_bias = sums.sum(1).to(weight.dtype)
        return dx, dx if more else None, of_weight, of_bias if context.centred else None, None


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Compute `reference.rms_norm` by Triton. x: [..., size]; weight: [size] or None."""
    return _NormFunction.apply(x, None, weight, None, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Compute `reference.layer_norm` by Triton. x: [..., size]; weight, bias: [size]."""
    return _NormFunction.apply(x, None, weight, bias, epsilon)


def residual_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Compute `reference.residual_norm` by Triton: x + update, and its LayerNorm with a bias, its RMSNorm without.
    x, update: [..., size].
    """
    return _NormFunction.apply(x, update, weight, bias, epsilon)


def _num_warps_for_row(size: int) -> int:
    """Return the number of warps for a row of `size` elements: each thread of a wide row holds some 8 elements."""
    return min(16, max(4, round_up_to_power_of_2(size) // 256))
