"""Scans over a state in Triton: a program walks along a sequence with a head's state in its registers, a chunk of tokens at a time.

    selective_scan     a program: a head and some of its channels
    delta_rule_scan    first the inverse of every chunk's triangular system, all chunks at once; then as above

Decays multiply along any way from a token to a later one, so that they are left out of the system and multiplied into its inverse.

The kernels write the state before every few chunks, from where the backward pass (`scan_gradients`) computes those again.
All sums are in fp32. This file needs the package triton, and is imported when one of its kernels is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.triton import cdiv
from megatron.core.kernels.triton.scan_chunks import (
    chunk_decays,
    dot_precision,
    invert_delta_rule_systems,
    padded_block_width,
)
from megatron.core.kernels.triton.scan_gradients import delta_rule_gradients, selective_scan_gradients

_CHUNK, _SPAN, _COLUMNS = 64, 4, 32  # tokens of a chunk; chunks between states that are kept; channels of a program


@triton.jit
def _selective_scan_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    segments: tl.tensor,
    first: tl.tensor,
    y: tl.tensor,
    states: tl.tensor,
    length: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    SIZE: tl.constexpr,
    STATE: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Kernel: Mamba-2's scan along one sequence for one head and COLUMNS of its channels.

    x, y: [length, batch, heads, SIZE]. first: state before the first token, or None. states: [spans + 1, batch, heads,
    SIZE, STATE], receives the state before every SPAN chunks, and the last state.
    """
    one, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group = head // per_group
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, WIDE)
    inner, inside = columns < SIZE, deep < STATE
    places = tl.arange(0, CHUNK)
    corner = (one.to(tl.int64) * heads + head) * SIZE * STATE
    square = corner + columns[None, :] * STATE + deep[:, None]
    held = inside[:, None] & inner[None, :]
    step = tl.num_programs(0).to(tl.int64) * SIZE * STATE
    state = tl.zeros((WIDE, COLUMNS), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + square, mask=held, other=0.0).to(tl.float32)
    decay = tl.load(a + head).to(tl.float32)
    for start in range(0, length, CHUNK):
        if start % (SPAN * CHUNK) == 0:
            tl.store(states + (start // (SPAN * CHUNK)) * step + square, state, mask=held)
        tokens = (start + places).to(tl.int64) * batch + one
        there = start + places < length
        steps = tl.load(dt + tokens * heads + head, mask=there, other=0.0).to(tl.float32)
        grouped = (tokens * (heads // per_group) + group)[:, None] * STATE + deep[None, :]
        both = there[:, None] & inside[None, :]
        keys = tl.load(b + grouped, mask=both, other=0.0).to(tl.float32)
        queries = tl.load(c + grouped, mask=both, other=0.0).to(tl.float32)
        target = (tokens * heads + head)[:, None] * SIZE + columns[None, :]
        filled = there[:, None] & inner[None, :]
        values = tl.load(x + target, mask=filled, other=0.0).to(tl.float32) * steps[:, None]
        between, from_start, to_end, across = chunk_decays(steps * decay, segments, one * length, start, length, CHUNK)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        result = tl.dot(weights, values, input_precision=PRECISION)
        result += tl.dot(queries, state, input_precision=PRECISION) * from_start[:, None]
        tl.store(y + target, result.to(y.dtype.element_ty), mask=filled)
        made = tl.dot(tl.trans(keys * to_end[:, None]), values, input_precision=PRECISION)
        state = state * across + made
    tl.store(states + tl.cdiv(length, SPAN * CHUNK) * step + square, state, mask=held)


@triton.jit
def _delta_rule_scan_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    inverse: tl.tensor,
    segments: tl.tensor,
    first: tl.tensor,
    y: tl.tensor,
    states: tl.tensor,
    length: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    KEY: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Kernel: the gated delta rule along one sequence for one head and COLUMNS of its channels.

    v, y: [length, batch, heads, SIZE]. inverse: inverses of the chunks' systems. first: state before the first token,
    or None. states: [spans + 1, batch, heads, KEY, SIZE], receives the state before every SPAN chunks, and the last
    state.
    """
    one, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places, deep = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    inner, inside = columns < SIZE, deep < KEY
    corner = (one.to(tl.int64) * heads + head) * SIZE * KEY
    square = corner + deep[:, None] * SIZE + columns[None, :]
    held = inside[:, None] & inner[None, :]
    step = tl.num_programs(0).to(tl.int64) * SIZE * KEY
    state = tl.zeros((WIDE, COLUMNS), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + square, mask=held, other=0.0).to(tl.float32)
    solved = inverse + tl.program_id(0).to(tl.int64) * tl.cdiv(length, CHUNK) * CHUNK * CHUNK
    for start in range(0, length, CHUNK):
        if start % (SPAN * CHUNK) == 0:
            tl.store(states + (start // (SPAN * CHUNK)) * step + square, state, mask=held)
        tokens = (start + places).to(tl.int64) * batch + one
        there = start + places < length
        fading = tl.load(g + tokens * heads + head, mask=there, other=0.0).to(tl.float32)
        rate = tl.load(beta + tokens * heads + head, mask=there, other=0.0).to(tl.float32)
        grouped = (tokens * (heads // per_group) + head // per_group)[:, None] * KEY + deep[None, :]
        both = there[:, None] & inside[None, :]
        keys = tl.load(k + grouped, mask=both, other=0.0).to(tl.float32)
        queries = tl.load(q + grouped, mask=both, other=0.0).to(tl.float32)
        target = (tokens * heads + head)[:, None] * SIZE + columns[None, :]
        filled = there[:, None] & inner[None, :]
        values = tl.load(v + target, mask=filled, other=0.0).to(tl.float32) * rate[:, None]
        system = tl.load(solved + start * CHUNK + places[:, None] * CHUNK + places[None, :])
        between, from_start, to_end, across = chunk_decays(fading, segments, one * length, start, length, CHUNK)
        reads = tl.dot(system, keys * rate[:, None], input_precision=PRECISION) * from_start[:, None]
        written = tl.dot(system * between, values, input_precision=PRECISION)
        written -= tl.dot(reads, state, input_precision=PRECISION)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        result = tl.dot(queries * from_start[:, None], state, input_precision=PRECISION)
        result += tl.dot(weights, written, input_precision=PRECISION)
        tl.store(y + target, result.to(y.dtype.element_ty), mask=filled)
        state = state * across + tl.dot(tl.trans(keys * to_end[:, None]), written, input_precision=PRECISION)
    tl.store(states + tl.cdiv(length, SPAN * CHUNK) * step + square, state, mask=held)


class _ScanFunction(Function):
    """The autograd function of both scans. run computes output and states; gradients computes the backward pass. The
    inputs and the state before every `_SPAN` chunks are kept.
    """

    @staticmethod
    def forward(
        context: Any,
        run: Callable[..., tuple[Tensor, Tensor]],
        gradients: Callable[..., tuple[Tensor, Tensor | None, tuple[Tensor, ...]]],
        segments: Tensor | None,
        state: Tensor | None,
        a: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = tuple(each.contiguous() for each in inputs)
        segments, first = (None if each is None else each.contiguous() for each in (segments, state))
        y, states = run(*inputs, segments=segments, first=first, **({} if a is None else {"a": a}))
        context.gradients = gradients
        context.save_for_backward(segments, state, a, states[:-1], *inputs)
        return y, states[-1].clone()

    @staticmethod
    def backward(context: Any, dy: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        segments, first, a, states, *inputs = context.saved_tensors
        span = _SPAN * _CHUNK
        d_first, d_a, others = context.gradients(inputs, a, segments, states, span, dy.contiguous(), d_state)
        return None, None, None, None if first is None else d_first.to(first.dtype), d_a, *others


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = _CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.scans.selective_scan` by Triton; `chunk` is ignored. x: [s, b, n, p]; dt: [s, b, n]; a: [n]; b,
    c: [s, b, g, d]. Returns y like x, and the last state [b, n, p, d] in fp32.
    """
    return _ScanFunction.apply(_launch_selective_scan, selective_scan_gradients, segments, state, a, x, dt, b, c)


def delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = _CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.scans.delta_rule_scan` by Triton; `chunk` is ignored. q, k: [s, b, g, dk]; v: [s, b, n, dv]; g,
    beta: [s, b, n]. Returns o like v, and the last state [b, n, dk, dv] in fp32.
    """
    return _ScanFunction.apply(_launch_delta_rule_scan, delta_rule_gradients, segments, state, None, q, k, v, g, beta)


def _launch_selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *, a: Tensor, segments: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch `_selective_scan_kernel`. Returns y [s, b, n, p], and the states before every `_SPAN` chunks and after the
    last token, [spans + 1, b, n, p, d].
    """
    length, batch, heads, size = x.shape
    deep, y = b.shape[3], torch.empty_like(x)
    states = x.new_empty((cdiv(length, _SPAN * _CHUNK) + 1, batch, heads, size, deep), dtype=torch.float32)
    wide, columns = padded_block_width(deep), min(_COLUMNS, padded_block_width(size))
    _selective_scan_kernel[(batch * heads, cdiv(size, columns))](
        x, dt, a, b, c, segments, first, y, states, length, batch, heads, heads // b.shape[2],
        SIZE=size, STATE=deep, WIDE=wide, CHUNK=_CHUNK, SPAN=_SPAN, COLUMNS=columns, PRECISION=dot_precision(x),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, states


def _launch_delta_rule_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, segments: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch `_delta_rule_scan_kernel`. Returns y [s, b, n, dv], and the states before every `_SPAN` chunks and after
    the last token,
    [spans + 1, b, n, dk, dv].
    """
    length, batch, heads, size = v.shape
    deep, y = k.shape[3], torch.empty_like(v)
    states = v.new_empty((cdiv(length, _SPAN * _CHUNK) + 1, batch, heads, deep, size), dtype=torch.float32)
    inverse = invert_delta_rule_systems(k, beta, segments, _CHUNK)
    wide, columns, per_group = padded_block_width(deep), min(_COLUMNS, padded_block_width(size)), heads // k.shape[2]
    _delta_rule_scan_kernel[(batch * heads, cdiv(size, columns))](
        q, k, v, g, beta, inverse, segments, first, y, states, length, batch, heads, per_group,
        KEY=deep, SIZE=size, WIDE=wide, CHUNK=_CHUNK, SPAN=_SPAN, COLUMNS=columns, PRECISION=dot_precision(v),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, states
