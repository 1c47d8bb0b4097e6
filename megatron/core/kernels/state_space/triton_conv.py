"""The short causal convolution of state-space layers in Triton: each input is read once for all taps; sums in fp32.

    forward     p_t = sum over j of w_j x_t-j + bias        y = SiLU(p)         w_0 is the weight of the token itself
    backward    dp = dy SiLU'(p), with p computed again     dx_t = sum over j of w_j dp_t+j;  dw_j = sum over t of dp_t x_t-j

Taps that reach into another segment are left out. This file needs the package triton, and is imported when its kernel is first called.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.triton import cdiv

_TOKENS, _CHANNELS = 32, 64


@triton.jit
def _load_conv_tap(
    values: tl.tensor,
    segments: tl.tensor,
    rows: tl.tensor,
    other: tl.tensor,
    columns: tl.tensor,
    length: tl.tensor,
    batch: tl.tensor,
    channels: tl.tensor,
) -> tl.tensor:
    """Load rows `other` of values [length, batch, channels] in fp32 (one tap of the convolution); 0 where a row does
    not exist, or is of another segment than the row of `rows` that it is for.
    """
    one = tl.program_id(1)
    there = (other >= 0) & (other < length) & (rows < length)
    if segments is not None:
        mine = tl.load(segments + one * length + rows, mask=there, other=0)
        there = there & (tl.load(segments + one * length + other, mask=there, other=-1) == mine)
    place = (other.to(tl.int64) * batch + one)[:, None] * channels + columns[None, :]
    return tl.load(values + place, mask=there[:, None] & (columns < channels)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _causal_conv_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, dy: tl.tensor, segments: tl.tensor, y: tl.tensor,
    sums: tl.tensor, length: tl.tensor, batch: tl.tensor, channels: tl.tensor,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: the convolution p of x [length, batch, channels] with `weight` and `bias`.

    dy None: write y = SiLU(p). dy given: write to y the gradient dp of p, and to sums [programs of tokens, batch, WIDTH
    + 1, channels] each program's part of the gradients of weight (the token's own first) and bias.
    """
    one = tl.program_id(1)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inner = columns < channels
    total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, mask=inner, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        factor = tl.load(weight + columns * WIDTH + (WIDTH - 1 - back), mask=inner, other=0.0).to(tl.float32)
        total += factor[None, :] * _load_conv_tap(x, segments, rows, rows - back, columns, length, batch, channels)
    place = (rows.to(tl.int64) * batch + one)[:, None] * channels + columns[None, :]
    both = (rows < length)[:, None] & inner[None, :]
    gate = 1.0 / (1.0 + tl.exp(-total))
    if dy is None:
        tl.store(y + place, (total * gate).to(y.dtype.element_ty), mask=both)
    else:
        gradient = tl.load(dy + place, mask=both, other=0.0).to(tl.float32) * gate * (1.0 + total * (1.0 - gate))
        tl.store(y + place, gradient, mask=both)
        share = (tl.program_id(0).to(tl.int64) * batch + one) * (WIDTH + 1) * channels + columns
        for back in tl.static_range(WIDTH):
            values = _load_conv_tap(x, segments, rows, rows - back, columns, length, batch, channels)
            tl.store(sums + share + back * channels, tl.sum(gradient * values, 0), mask=inner)
        tl.store(sums + share + WIDTH * channels, tl.sum(gradient, 0), mask=inner)


@triton.jit
def _conv_input_gradient_kernel(
    dp: tl.tensor, weight: tl.tensor, segments: tl.tensor, dx: tl.tensor, length: tl.tensor, batch: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: compute the gradient dx of the input from the gradient dp of the convolution, both [length, batch,
    channels].
    """
    one = tl.program_id(1)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inner = columns < channels
    total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for ahead in tl.static_range(WIDTH):
        factor = tl.load(weight + columns * WIDTH + (WIDTH - 1 - ahead), mask=inner, other=0.0).to(tl.float32)
        total += factor[None, :] * _load_conv_tap(dp, segments, rows, rows + ahead, columns, length, batch, channels)
    place = (rows.to(tl.int64) * batch + one)[:, None] * channels + columns[None, :]
    tl.store(dx + place, total.to(dx.dtype.element_ty), mask=(rows < length)[:, None] & inner[None, :])


class _CausalConv(Function):
    """The autograd function of `causal_conv` without earlier inputs."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        segments = None if segments is None else segments.contiguous()
        y = torch.empty_like(x)
        context.save_for_backward(x, weight, bias, segments)
        sizes = {"WIDTH": weight.shape[1], "TOKENS": _TOKENS, "CHANNELS": _CHANNELS}
        _causal_conv_kernel[_conv_grid(x)](x, weight, bias, None, segments, y, None, *x.shape, **sizes)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, segments = context.saved_tensors
        width, grid = weight.shape[1], _conv_grid(x)
        sizes = {"WIDTH": width, "TOKENS": _TOKENS, "CHANNELS": _CHANNELS}
        of_sums, dx = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x)
        sums = x.new_empty((grid[0], x.shape[1], width + 1, x.shape[2]), dtype=torch.float32)
        _causal_conv_kernel[grid](x, weight, bias, gradient.contiguous(), segments, of_sums, sums, *x.shape, **sizes)
        _conv_input_gradient_kernel[grid](of_sums, weight, segments, dx, *x.shape, **sizes)
        *taps, of_bias = sums.sum((0, 1))
        of_weight = torch.stack(taps[::-1], dim=1).to(weight.dtype)
        return dx, of_weight, None if bias is None else of_bias.to(bias.dtype), None


def _conv_grid(x: Tensor) -> tuple[int, int, int]:
    """Return the grid of programs for x [s, b, c]: blocks of tokens, b, blocks of channels."""
    return cdiv(x.shape[0], _TOKENS), x.shape[1], cdiv(x.shape[2], _CHANNELS)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """Compute `kernels.scans.causal_conv` by Triton: SiLU of the causal depthwise convolution, [s, b, c].

    x: [s, b, c]; weight: [c, width]; bias: [c] or None; segments: [b, s], taps into another segment count as 0;
    before: [width - 1, b, c], inputs before the first token, None: zeros.
    """
    if before is None:
        return _CausalConv.apply(x, weight, bias, segments)
    known = None if segments is None else torch.cat((segments[:, :1].expand(-1, len(before)), segments), dim=1)
    return _CausalConv.apply(torch.cat((before.to(x.dtype), x)), weight, bias, known)[len(before) :]
