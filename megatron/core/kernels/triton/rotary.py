"""Rotary embeddings in Triton: queries and keys of a token in one program, read where the fused projection wrote them.

    forward    [q | k | v] of a token, one row       -> q and k rotated, each in new memory; v stays where it is
    backward   gradients of q, k and v, anywhere     -> one row [dq | dk | dv]: dq and dk turned back, dv copied

So the gradient of the fused projection is written once, and no part of it is concatenated. Halves of a head are loaded apart, 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.triton import power_of_2_above

_ELEMENTS = (
    4 * 32 * 8
)  # that the threads of four warps load at a time, 16 bytes of a half format each; heads that are not there load nothing


@triton.jit
def _turn(
    x: tl.tensor,
    y: tl.tensor,
    step: tl.tensor,
    count: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate `count` heads of a token, `step` apart in x and SIZE apart in y. cosine, sine: [PAIRS]; the last SIZE - TURNED elements of a head are copied."""
    for start in range(0, count, HEADS):
        rows = start + tl.arange(0, HEADS)
        real = (rows < count)[:, None]
        here, there = x + rows[:, None] * step, y + rows[:, None] * SIZE
        if INTERLEAVED:
            columns = tl.arange(0, 2 * PAIRS)[None, :]
            inside = real & (columns < TURNED)
            pairs = tl.load(here + columns, mask=inside, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(pairs, (HEADS, PAIRS, 2)))
            turned = tl.join(first * cosine - second * sine, second * cosine + first * sine)
            tl.store(there + columns, tl.reshape(turned, (HEADS, 2 * PAIRS)).to(y.dtype.element_ty), mask=inside)
        else:
            columns = tl.arange(0, PAIRS)[None, :]
            inside = real & (columns < TURNED // 2)
            first = tl.load(here + columns, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(here + TURNED // 2 + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(there + columns, (first * cosine - second * sine).to(y.dtype.element_ty), mask=inside)
            tl.store(
                there + TURNED // 2 + columns, (second * cosine + first * sine).to(y.dtype.element_ty), mask=inside
            )
        if SIZE > TURNED:
            columns = TURNED + tl.arange(0, REST)[None, :]
            inside = real & (columns < SIZE)
            tl.store(there + columns, tl.load(here + columns, mask=inside, other=0.0), mask=inside)


@triton.jit
def _copy(
    x: tl.tensor,
    y: tl.tensor,
    step: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Copy `count` heads of a token, `step` apart in x and SIZE apart in y."""
    columns = tl.arange(0, BLOCK)[None, :]
    for start in range(0, count, HEADS):
        rows = start + tl.arange(0, HEADS)
        inside = (rows < count)[:, None] & (columns < SIZE)
        values = tl.load(x + rows[:, None] * step + columns, mask=inside, other=0.0)
        tl.store(y + rows[:, None] * SIZE + columns, values, mask=inside)


@triton.jit
def _rotate_token(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    gate: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    batch: tl.tensor,
    tables: tl.tensor,
    q_heads: tl.tensor,
    k_heads: tl.tensor,
    row: tl.tensor,
    q_s: tl.tensor,
    q_b: tl.tensor,
    q_h: tl.tensor,
    k_s: tl.tensor,
    k_b: tl.tensor,
    k_h: tl.tensor,
    v_s: tl.tensor,
    v_b: tl.tensor,
    v_h: tl.tensor,
    gate_s: tl.tensor,
    gate_b: tl.tensor,
    gate_h: tl.tensor,
    BACK: tl.constexpr,
    SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """One token (of s x batch). q, gate: [s, batch, q_heads, SIZE], k, v: [s, batch, k_heads, SIZE], by their strides; k, v and gate may be None.

    q_out, k_out: without gaps; k_out None: q_out has `row` elements for each token, [q | gate | k | v]. cos, sin: [s, tables (1 or batch), TURNED],
    the same for both of a pair. BACK: turn back.
    """
    token = tl.program_id(0).to(tl.int64)
    place, text = token // batch, token % batch
    pairs = tl.arange(0, PAIRS)
    at = (place * tables + text % tables) * TURNED + (pairs * 2 if INTERLEAVED else pairs)
    cosine = tl.load(cos + at, mask=pairs < TURNED // 2, other=0.0)[None, :]
    sine = tl.load(sin + at, mask=pairs < TURNED // 2, other=0.0)[None, :]
    if BACK:
        sine = -sine
    out = q_out + token * row
    _turn(q + place * q_s + text * q_b, out, q_h, q_heads, cosine, sine, SIZE, TURNED, INTERLEAVED, PAIRS, REST, HEADS)
    out += q_heads * SIZE
    if gate is not None:
        _copy(gate + place * gate_s + text * gate_b, out, gate_h, q_heads, SIZE, BLOCK, HEADS)
        out += q_heads * SIZE
    if k is not None:
        if k_out is not None:
            out = k_out + token * k_heads * SIZE
        _turn(
            k + place * k_s + text * k_b, out, k_h, k_heads, cosine, sine, SIZE, TURNED, INTERLEAVED, PAIRS, REST, HEADS
        )
    if v is not None:
        _copy(v + place * v_s + text * v_b, out + k_heads * SIZE, v_h, k_heads, SIZE, BLOCK, HEADS)


def _launch(
    parts: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Tensor | None],
    tables: tuple[Tensor, Tensor],
    row: int,
    *,
    interleaved: bool,
    back: bool,
) -> None:
    """Rotate parts (q, k, v, gate), [s, b, heads, d] each, into outputs (q or the whole row, k). tables: cos and sin, [s, b or 1, 1, r]."""
    q, *others = (one if one is None or one.stride(-1) == 1 else one.contiguous() for one in parts)
    assert q is not None, "there is something to rotate"
    k, v, gate = others
    (length, batch, heads, size), turned = q.shape, tables[0].shape[-1]
    assert tables[0].shape[0] == length and tables[0].shape[1] in (1, batch), "a table has a row for every token"
    groups = 1 if k is None else k.shape[2]
    pairs = power_of_2_above(turned // 2)
    steps = (step for one in (q, k, v, gate) for step in ((0, 0, 0) if one is None else one.stride()[:3]))
    if q.numel():
        _rotate_token[(length * batch,)](
            q, k, v, gate, *outputs, *tables, batch, tables[0].shape[1], heads, groups, row, *steps,
            BACK=back,
            SIZE=size,
            TURNED=turned,
            INTERLEAVED=interleaved,
            PAIRS=pairs,
            REST=power_of_2_above(max(size - turned, 1)),
            BLOCK=power_of_2_above(size),
            HEADS=max(1, _ELEMENTS // pairs),
            num_warps=4,
        )  # fmt: skip


class _Rotary(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        tables = cos.contiguous(), sin.contiguous()
        context.save_for_backward(*tables)
        context.interleaved = interleaved
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch((x, None, None, None), (y, None), tables, _elements_per_token(x), interleaved=interleaved, back=False)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = context.saved_tensors
        dx = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        parts = (gradient, None, None, None)
        _launch(parts, (dx, None), (cos, sin), _elements_per_token(dx), interleaved=context.interleaved, back=True)
        return dx, None, None, None


class _RotaryQKV(Function):
    @staticmethod
    def forward(
        context: Any, heads: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, ...]:
        tables = cos.contiguous(), sin.contiguous()
        context.save_for_backward(*tables)
        context.interleaved = interleaved
        q, *gate, k, v = heads.split(counts, dim=2)
        q_out, k_out = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q, k))
        _launch((q, k, None, None), (q_out, k_out), tables, _elements_per_token(q), interleaved=interleaved, back=False)
        return q_out, *gate, k_out, v

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        cos, sin = context.saved_tensors
        q, *gate, k, v = gradients
        total = sum(one.shape[2] for one in gradients)
        whole = torch.empty((*q.shape[:2], total, q.shape[3]), dtype=q.dtype, device=q.device)
        parts = q, k, v, gate[0] if gate else None
        _launch(
            parts, (whole, None), (cos, sin), _elements_per_token(whole), interleaved=context.interleaved, back=True
        )
        return whole, None, None, None, None


def _elements_per_token(x: Tensor) -> int:
    """Elements of a token of x [s, b, heads, d]."""
    return x.shape[2] * x.shape[3]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`reference.rotary` of angles that are the same for both of a pair.

    x: [s, b, n, d]; cos, sin: [s, b or 1, 1, r] in fp32.
    """
    return _Rotary.apply(x, cos, sin, interleaved)


def rotary_qkv(
    heads: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, ...]:
    """`reference.rotary_qkv`, with the gradient of all heads in one piece of memory.

    heads: [s, b, sum of counts, d]; cos, sin: [s, b or 1, 1, r] in fp32, the same for both of a pair.
    """
    return _RotaryQKV.apply(heads, counts, cos, sin, interleaved)
