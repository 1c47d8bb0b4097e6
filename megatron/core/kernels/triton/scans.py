"""Scans over a state in Triton: a program walks along a sequence with a head's state in its registers, a chunk of tokens at a time.

    selective_scan     a program: a head and some of its channels
    delta_rule_scan    first the inverse of every chunk's triangular system, all chunks at once; then as above

Decays multiply along any way from a token to a later one, so that they are left out of the system and multiplied into its inverse.

The backward pass is torch's (`kernels.scans`): the kernels write the state before every few chunks, from where those are computed again and differentiated.
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

from megatron.core.kernels import scans
from megatron.core.kernels.triton import cdiv, power_of_2_above

_CHUNK, _SPAN, _COLUMNS = 64, 4, 32  # tokens of a chunk; chunks between states that are kept; channels of a program

Spans = Callable[..., tuple[Tensor, Tensor]]


@triton.jit
def _decays(
    logs: tl.tensor, segments: tl.tensor, row: tl.tensor, start: tl.tensor, length: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Of a chunk: decays between tokens [q, q], of the state before it until each token [q], of each token until its end [q], of it all.

    logs: [q], of each token's decay. segments: [b, length] or None; row: b's start in it.
    """
    places = tl.arange(0, CHUNK)
    sums = tl.cumsum(logs, 0)
    total = tl.sum(logs, 0)
    seen = places[:, None] >= places[None, :]
    from_start, to_end, across = sums, total - sums, total
    if segments is not None:
        last = tl.minimum(start + CHUNK, length) - 1
        own = tl.load(segments + row + tl.minimum(start + places, length - 1))
        before = tl.load(segments + row + tl.maximum(start - 1, 0))
        end = tl.load(segments + row + last)
        seen = seen & (own[:, None] == own[None, :])
        from_start = tl.where(own == before, from_start, float("-inf"))
        to_end = tl.where(own == end, to_end, float("-inf"))
        across = tl.where(before == end, across, float("-inf"))
    between = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))
    return between, tl.exp(from_start), tl.exp(to_end), tl.exp(across)


@triton.jit
def _selective(
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
    """x, y: [length, batch, heads, SIZE]; states: [spans + 1, batch, heads, SIZE, STATE], the last one behind the last token."""
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
        between, from_start, to_end, across = _decays(steps * decay, segments, one * length, start, length, CHUNK)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        result = tl.dot(weights, values, input_precision=PRECISION)
        result += tl.dot(queries, state, input_precision=PRECISION) * from_start[:, None]
        tl.store(y + target, result.to(y.dtype.element_ty), mask=filled)
        made = tl.dot(tl.trans(keys * to_end[:, None]), values, input_precision=PRECISION)
        state = state * across + made
    tl.store(states + tl.cdiv(length, SPAN * CHUNK) * step + square, state, mask=held)


@triton.jit
def _invert_chunk_systems(
    k: tl.tensor,
    beta: tl.tensor,
    segments: tl.tensor,
    inverse: tl.tensor,
    length: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    KEY: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """(1 + the part below the diagonal of beta_i k_i k_j)^-1 of each chunk, by forward substitution. inverse: [batch, heads, chunks, CHUNK, CHUNK]."""
    one, head, start = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1) * CHUNK
    places, deep = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    tokens = (start + places).to(tl.int64) * batch + one
    there = start + places < length
    grouped = (tokens * (heads // per_group) + head // per_group)[:, None] * KEY + deep[None, :]
    keys = tl.load(k + grouped, mask=there[:, None] & (deep < KEY)[None, :], other=0.0).to(tl.float32)
    rate = tl.load(beta + tokens * heads + head, mask=there, other=0.0).to(tl.float32)
    system = rate[:, None] * tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    seen = places[:, None] > places[None, :]
    if segments is not None:
        own = tl.load(segments + one * length + tl.minimum(start + places, length - 1))
        seen = seen & (own[:, None] == own[None, :])
    system = tl.where(seen, system, 0.0)
    result = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        at = (places == row)[:, None]
        given = tl.sum(tl.where(at, system, 0.0), 0)
        result -= tl.where(at, tl.sum(given[:, None] * result, 0)[None, :], 0.0)
    corner = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * CHUNK * CHUNK
    tl.store(inverse + corner + places[:, None] * CHUNK + places[None, :], result)


@triton.jit
def _delta(
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
    """v, y: [length, batch, heads, SIZE]; states: [spans + 1, batch, heads, KEY, SIZE], the last one behind the last token."""
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
        between, from_start, to_end, across = _decays(fading, segments, one * length, start, length, CHUNK)
        reads = tl.dot(system, keys * rate[:, None], input_precision=PRECISION) * from_start[:, None]
        written = tl.dot(system * between, values, input_precision=PRECISION)
        written -= tl.dot(reads, state, input_precision=PRECISION)
        weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between
        result = tl.dot(queries * from_start[:, None], state, input_precision=PRECISION)
        result += tl.dot(weights, written, input_precision=PRECISION)
        tl.store(y + target, result.to(y.dtype.element_ty), mask=filled)
        state = state * across + tl.dot(tl.trans(keys * to_end[:, None]), written, input_precision=PRECISION)
    tl.store(states + tl.cdiv(length, SPAN * CHUNK) * step + square, state, mask=held)


class _Scan(Function):
    """A scan whose forward pass is a kernel, and whose backward pass differentiates torch's, a few chunks at a time from the last to the first."""

    @staticmethod
    def forward(
        context: Any,
        kernel: Callable[..., tuple[Tensor, Tensor]],
        spans: Spans,
        segments: Tensor | None,
        state: Tensor | None,
        whole: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = tuple(each.contiguous() for each in inputs)
        segments = None if segments is None else segments.contiguous()
        given = None if state is None else state.contiguous()
        y, states = kernel(*inputs, segments=segments, first=given, **({} if whole is None else {"a": whole}))
        context.spans = spans
        context.save_for_backward(segments, state, whole, states[:-1], *inputs)
        return y, states[-1].clone()

    @staticmethod
    def backward(context: Any, of_y: Tensor, of_state: Tensor) -> tuple[Tensor | None, ...]:
        segments, first, whole, states, *inputs = context.saved_tensors
        shared = None if whole is None else whole.detach().requires_grad_()
        gradients = [torch.zeros_like(each) for each in inputs]
        of_shared = None if whole is None else torch.zeros_like(whole)
        rows = _SPAN * _CHUNK
        for index in reversed(range(len(states))):
            part = slice(index * rows, (index + 1) * rows)
            own = [each[part].detach().requires_grad_() for each in inputs]
            state = states[index].detach().requires_grad_()
            within = None if segments is None else segments[:, part]
            with torch.enable_grad():
                passed = state
                if within is not None and segments is not None:
                    passed = scans.carry_state_within_segment(state, within, segments[:, max(0, index * rows - 1)])
                outputs = context.spans(*own, within, passed, chunk=_CHUNK, **({} if shared is None else {"a": shared}))
                leaves = [*own, state, *([] if shared is None else [shared])]
                pieces = torch.autograd.grad(outputs, leaves, (of_y[part], of_state))
            for total, each in zip(gradients, pieces, strict=False):
                total[part] = each
            of_state = pieces[len(own)]
            if of_shared is not None:
                of_shared += pieces[-1]
        return None, None, None, None if first is None else of_state.to(first.dtype), of_shared, *gradients


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
    """`kernels.scans.selective_scan`, in chunks of its own. x: [s, b, n, p]; dt: [s, b, n]; b, c: [s, b, g, d]."""
    return _Scan.apply(_run_selective, scans.selective_chunk_scan, segments, state, a, x, dt, b, c)


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
    """`kernels.scans.delta_rule_scan`, in chunks of its own. q, k: [s, b, g, dk]; v: [s, b, n, dv]."""
    return _Scan.apply(_run_delta, scans.delta_rule_chunk_scan, segments, state, None, q, k, v, g, beta)


def _run_selective(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *, a: Tensor, segments: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y, and the states [spans + 1, b, n, p, d]."""
    length, batch, heads, size = x.shape
    deep, y = b.shape[3], torch.empty_like(x)
    states = x.new_empty((cdiv(length, _SPAN * _CHUNK) + 1, batch, heads, size, deep), dtype=torch.float32)
    wide, columns = power_of_2_above(max(16, deep)), min(_COLUMNS, power_of_2_above(max(16, size)))
    _selective[(batch * heads, cdiv(size, columns))](
        x, dt, a, b, c, segments, first, y, states, length, batch, heads, heads // b.shape[2],
        SIZE=size, STATE=deep, WIDE=wide, CHUNK=_CHUNK, SPAN=_SPAN, COLUMNS=columns, PRECISION=_precision(x),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, states


def _run_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, segments: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y, and the states [spans + 1, b, n, dk, dv]."""
    length, batch, heads, size = v.shape
    deep, y, chunks = k.shape[3], torch.empty_like(v), cdiv(length, _CHUNK)
    states = v.new_empty((cdiv(length, _SPAN * _CHUNK) + 1, batch, heads, deep, size), dtype=torch.float32)
    inverse = v.new_empty((batch, heads, chunks, _CHUNK, _CHUNK), dtype=torch.float32)
    wide, columns = power_of_2_above(max(16, deep)), min(_COLUMNS, power_of_2_above(max(16, size)))
    per_group = heads // k.shape[2]
    _invert_chunk_systems[(batch * heads, chunks)](
        k, beta, segments, inverse, length, batch, heads, per_group,
        KEY=deep, WIDE=wide, CHUNK=_CHUNK, PRECISION="ieee", num_warps=16,
    )  # fmt: skip
    _delta[(batch * heads, cdiv(size, columns))](
        q, k, v, g, beta, inverse, segments, first, y, states, length, batch, heads, per_group,
        KEY=deep, SIZE=size, WIDE=wide, CHUNK=_CHUNK, SPAN=_SPAN, COLUMNS=columns, PRECISION=_precision(v),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return y, states


def _precision(x: Tensor) -> str:
    """How products of fp32 numbers are made: in full where what comes in is fp32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
