"""Activations in Triton, gated or with a bias: each tensor is read once and written once.

This file needs the package triton, and is imported when one of its kernels is first called.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.ops.reference import GatedActivationOptions
from megatron.core.kernels.triton import cdiv

_BLOCK = 1024
_BIAS_TILE = {"ROWS": 64, "BLOCK": 512, "num_warps": 2}  # of a program that sums the gradient of a bias
_NO_CLAMP = float("inf")


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activation_and_derivative(x: tl.tensor, NAME: tl.constexpr) -> tl.tensor:
    """Return the activation of x and its derivative. NAME: as in `reference.activation`."""
    if NAME == "silu":
        share = _sigmoid(x)
        return x * share, share * (1.0 + x * (1.0 - share))
    elif NAME == "quick_gelu":
        share = _sigmoid(1.702 * x)
        return x * share, share * (1.0 + 1.702 * x * (1.0 - share))
    elif NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        turned = 2.0 * _sigmoid(2.0 * inner) - 1.0
        change = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return 0.5 * x * (1.0 + turned), 0.5 * (1.0 + turned) + 0.5 * x * (1.0 - turned * turned) * change
    elif NAME == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    elif NAME == "squared_relu":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0), 2.0 * tl.maximum(x, 0.0)
    else:  # gelu
        below = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
        return x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _bias_activation_kernel(
    x: tl.tensor, bias: tl.tensor, ends: tl.tensor, y: tl.tensor, size: tl.tensor, experts: tl.tensor,
    NAME: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: y [rows, size] = activation of x + bias (None: of x) for one row; GATED: x is [rows, 2 size], gate before
    up: y = activation(gate) * (up + OFFSET), both clamped by CLAMP first.

    EXPERTS: 0 for one bias; else a power of two, at least `experts`: bias then has one row for each expert, rows are
    sorted by expert, and ends [experts] are the cumulative numbers of rows.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    if EXPERTS:
        every = tl.arange(0, EXPERTS)
        ended = (tl.load(ends + every, mask=every < experts, other=row + 1) <= row).to(tl.int32)
        bias += tl.sum(ended, 0).to(tl.int64) * (1 + GATED) * size
    first = x + (1 + GATED) * row * size
    gate = tl.load(first + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        gate += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(first + size + columns, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + size + columns, mask=inside, other=0.0).to(tl.float32)
        value, _ = _activation_and_derivative(tl.minimum(gate, CLAMP), NAME)
        value *= tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + OFFSET
    else:
        value, _ = _activation_and_derivative(gate, NAME)
    tl.store(y + row * size + columns, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _expert_row_and_part_ranges(
    ends: tl.tensor, experts: tl.tensor, EXPERTS: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the rows and row parts of each expert, where the rows of each expert are split into parts of at most
    ROWS rows: its first row, the row behind its last, its first part, and the part behind its last; [EXPERTS] each.
    ends: cumulative numbers of rows.
    """
    every = tl.arange(0, EXPERTS)
    end = tl.load(ends + every, mask=every < experts, other=0)
    start = tl.load(ends + every - 1, mask=(every > 0) & (every < experts), other=0)
    parts = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(parts, 0)
    return start, end, last - parts, last


@triton.jit
def _bias_activation_backward(
    dy: tl.tensor, x: tl.tensor, bias: tl.tensor, ends: tl.tensor, dx: tl.tensor, sums: tl.tensor, rows: tl.tensor,
    size: tl.tensor, experts: tl.tensor,
    NAME: tl.constexpr, GATED: tl.constexpr, CLAMP: tl.constexpr, OFFSET: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: for one part of at most ROWS rows, compute the gradient dx like x, 0 where it was clamped, and with a bias
    in fp32 its sum over these rows.

    sums: [parts, columns of x]; the gradient of the bias is their sum over parts. No part has rows of two experts, so
    that the order of the sum is always the same. Other arguments as in `_bias_activation_kernel`.
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    part = tl.program_id(0).to(tl.int64)
    if EXPERTS:
        every = tl.arange(0, EXPERTS)
        starts, stops, firsts, lasts = _expert_row_and_part_ranges(ends, experts, EXPERTS, ROWS)
        expert = tl.minimum(tl.sum(((lasts <= part) & (every < experts)).to(tl.int32), 0), experts - 1)
        mine = every == expert
        start = tl.sum(tl.where(mine, starts, 0), 0) + (part - tl.sum(tl.where(mine, firsts, 0), 0)) * ROWS
        stop = tl.minimum(start + ROWS, tl.sum(tl.where(mine, stops, 0), 0))
        bias += expert.to(tl.int64) * (1 + GATED) * size
    else:
        start = part * ROWS
        stop = tl.minimum(start + ROWS, rows)
    first_sum, up_sum = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    first_bias, up_bias = 0.0, 0.0
    if bias is not None:
        first_bias = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias + size + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(start, stop):
        gradient = tl.load(dy + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        places = (1 + GATED) * row * size + columns
        gate = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) + first_bias
        if GATED:
            up = tl.load(x + places + size, mask=inside, other=0.0).to(tl.float32) + up_bias
            value, slope = _activation_and_derivative(tl.minimum(gate, CLAMP), NAME)
            linear = tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + OFFSET
            of_up = tl.where((up <= CLAMP) & (up >= -CLAMP), gradient * value, 0.0)
            gradient = tl.where(gate <= CLAMP, gradient * linear * slope, 0.0)
            up_sum += of_up
            tl.store(dx + places + size, of_up.to(dx.dtype.element_ty), mask=inside)
        else:
            _, slope = _activation_and_derivative(gate, NAME)
            gradient *= slope
        first_sum += gradient
        tl.store(dx + places, gradient.to(dx.dtype.element_ty), mask=inside)
    if bias is not None:
        own = sums + part * (1 + GATED) * size + columns
        tl.store(own, first_sum, mask=inside)
        if GATED:
            tl.store(own + size, up_sum, mask=inside)


@triton.jit
def _sum_expert_bias_gradients(
    sums: tl.tensor,
    ends: tl.tensor,
    dbias: tl.tensor,
    width: tl.tensor,
    experts: tl.tensor,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Kernel: dbias [experts, width] = for one expert the sum over its parts in sums [parts, width], in order."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    mine = tl.arange(0, EXPERTS) == tl.program_id(0)
    _, _, firsts, lasts = _expert_row_and_part_ranges(ends, experts, EXPERTS, ROWS)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(tl.sum(tl.where(mine, firsts, 0), 0), tl.sum(tl.where(mine, lasts, 0), 0)):
        total += tl.load(sums + part * width + columns, mask=inside, other=0.0)
    place = tl.program_id(0).to(tl.int64) * width + columns
    tl.store(dbias + place, total.to(dbias.dtype.element_ty), mask=inside)


class _BiasActivation(Function):
    """The autograd function of `bias_activation`, and without a bias of `gated_activation`."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        bias: Tensor | None,
        name: str,
        gating: GatedActivationOptions | None,
        counts: Tensor | None,
    ) -> Tensor:
        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        size = x.shape[-1] // (1 if gating is None else 2)
        context.experts = 0 if counts is None else len(counts)
        context.how = {
            "NAME": name,
            "GATED": gating is not None,
            "CLAMP": _NO_CLAMP if gating is None or gating.clamp is None else gating.clamp,
            "OFFSET": 0.0 if gating is None else gating.offset,
            "EXPERTS": triton.next_power_of_2(context.experts) if context.experts else 0,
        }
        y, ends = x.new_empty((*x.shape[:-1], size)), x if counts is None else counts.cumsum(0)
        if y.numel():
            grid = (y.numel() // size, cdiv(size, _BLOCK))
            _bias_activation_kernel[grid](x, bias, ends, y, size, context.experts, **context.how, BLOCK=_BLOCK)
        context.save_for_backward(x, bias, ends)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, bias, ends = context.saved_tensors
        gradient, dx, size, experts = gradient.contiguous(), torch.empty_like(x), gradient.shape[-1], context.experts
        rows, width = gradient.numel() // max(size, 1), x.shape[-1]
        tile = {"ROWS": 1, "BLOCK": _BLOCK} if bias is None else _BIAS_TILE
        parts = cdiv(rows, tile["ROWS"]) + experts
        sums = None if bias is None else torch.empty((parts, width), dtype=torch.float32, device=x.device)
        if rows:
            _bias_activation_backward[(parts, cdiv(size, tile["BLOCK"]))](
                gradient, x, bias, ends, dx, sums, rows, size, experts, **context.how, **tile
            )
        if sums is None or not experts:
            return dx, None if sums is None else sums.sum(0, dtype=bias.dtype), None, None, None
        dbias, how = torch.empty_like(bias), {"EXPERTS": context.how["EXPERTS"], "ROWS": tile["ROWS"], "BLOCK": _BLOCK}
        _sum_expert_bias_gradients[(experts, cdiv(width, _BLOCK))](sums, ends, dbias, width, experts, **how)
        return dx, dbias, None, None, None


def gated_activation(x: Tensor, name: str, gating: GatedActivationOptions = GatedActivationOptions()) -> Tensor:
    """Compute `reference.gated_activation` by Triton, for silu, quick_gelu, gelu and gelu_tanh. x: [..., 2 f], gate
    before up; returns [..., f].
    """
    assert name in ("silu", "quick_gelu", "gelu", "gelu_tanh"), f"no gated activation is called {name}"
    return _BiasActivation.apply(x, None, name, gating, None)


def bias_activation(
    x: Tensor, bias: Tensor, name: str, gating: GatedActivationOptions | None = None, counts: Tensor | None = None
) -> Tensor:
    """Compute `reference.bias_activation` by Triton. x: [..., f], or gated [..., 2 f]; bias: [f] or [2 f], or with
    counts [e] of rows one for each expert, [e, ..]; returns [..., f].
    """
    return _BiasActivation.apply(x, bias, name, gating, counts)
