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

from megatron.core.kernels.triton import round_up_to_power_of_2

_ELEMENTS = (
    4 * 32 * 8
)  # that the threads of four warps load at a time, 16 bytes of a half format each; heads that are not there load nothing


@triton.jit
def _rotate_heads(
    x: tl.tensor, y: tl.tensor, step: tl.tensor, count: tl.tensor, cosine: tl.tensor, sine: tl.tensor,
    SIZE: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate `count` heads of a token: those of x, `step` elements apart, are written to y, SIZE elements apart.

    cosine, sine: [1, PAIRS]. The first TURNED elements of a head are rotated, the other SIZE - TURNED copied.
    INTERLEAVED: neighbours are a pair; else the two halves. HEADS: heads at a time; PAIRS, REST: powers of two that
    cover TURNED / 2 and SIZE - TURNED.
    """
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
def _copy_heads(
    x: tl.tensor,
    y: tl.tensor,
    step: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Copy `count` heads of a token from x, where they are `step` elements apart, to y, where they are SIZE elements
    apart. BLOCK: power of two that covers SIZE; HEADS: heads at a time.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    for start in range(0, count, HEADS):
        rows = start + tl.arange(0, HEADS)
        inside = (rows < count)[:, None] & (columns < SIZE)
        values = tl.load(x + rows[:, None] * step + columns, mask=inside, other=0.0)
        tl.store(y + rows[:, None] * SIZE + columns, values, mask=inside)


@triton.jit
def _rotate_token_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, gate: tl.tensor, q_out: tl.tensor, k_out: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, batch: tl.tensor, tables: tl.tensor, q_heads: tl.tensor, k_heads: tl.tensor, row: tl.tensor,
    q_s: tl.tensor, q_b: tl.tensor, q_h: tl.tensor, k_s: tl.tensor, k_b: tl.tensor, k_h: tl.tensor, v_s: tl.tensor,
    v_b: tl.tensor, v_h: tl.tensor, gate_s: tl.tensor, gate_b: tl.tensor, gate_h: tl.tensor,
    BACK: tl.constexpr, SIZE: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: rotate the query and key heads of one of the s * batch tokens, and copy gate and values.

    q, gate: [s, batch, q_heads, SIZE]; k, v: [s, batch, k_heads, SIZE], with their strides; k, v and gate may be None.
    q_out, k_out: contiguous outputs of q and k; k_out None: q_out receives `row` elements for each token, [q | gate | k
    | v]. cos, sin: [s, tables (1 or batch), TURNED], equal for both elements of a pair.
    BACK: rotate by the negative angle (backward pass).
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
    _rotate_heads(
        q + place * q_s + text * q_b, out, q_h, q_heads, cosine, sine, SIZE, TURNED, INTERLEAVED, PAIRS, REST, HEADS
    )
    out += q_heads * SIZE
    if gate is not None:
        _copy_heads(gate + place * gate_s + text * gate_b, out, gate_h, q_heads, SIZE, BLOCK, HEADS)
        out += q_heads * SIZE
    if k is not None:
        if k_out is not None:
            out = k_out + token * k_heads * SIZE
        _rotate_heads(
            k + place * k_s + text * k_b, out, k_h, k_heads, cosine, sine, SIZE, TURNED, INTERLEAVED, PAIRS, REST, HEADS
        )
    if v is not None:
        _copy_heads(v + place * v_s + text * v_b, out + k_heads * SIZE, v_h, k_heads, SIZE, BLOCK, HEADS)


def _launch_rotary(
    parts: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Tensor | None],
    tables: tuple[Tensor, Tensor],
    *,
    interleaved: bool,
    back: bool,
) -> None:
    """Rotate parts (q, k, v, gate), [s, b, heads, d] each or None, into outputs: (q, k), or (all parts of a token in
    one row, None).

    tables: cos and sin, [s, b or 1, 1, r]. back: rotate by the negative angle.
    """
    q, *others = (one if one is None or one.stride(-1) == 1 else one.contiguous() for one in parts)
    assert q is not None, "there is something to rotate"
    k, v, gate = others
    (length, batch, heads, size), turned = q.shape, tables[0].shape[-1]
    assert tables[0].shape[0] == length and tables[0].shape[1] in (1, batch), "a table has a row for every token"
    groups = 1 if k is None else k.shape[2]
    pairs = round_up_to_power_of_2(turned // 2)
    steps = (step for one in (q, k, v, gate) for step in ((0, 0, 0) if one is None else one.stride()[:3]))
    if q.numel():
        _rotate_token_kernel[(length * batch,)](
            q, k, v, gate, *outputs, *tables, batch, tables[0].shape[1], heads, groups, outputs[0][0, 0].numel(), *steps,
            BACK=back, SIZE=size, TURNED=turned, INTERLEAVED=interleaved, PAIRS=pairs,
            REST=round_up_to_power_of_2(max(size - turned, 1)), BLOCK=round_up_to_power_of_2(size),
            HEADS=max(1, _ELEMENTS // pairs), num_warps=4,
        )  # fmt: skip


class _RotaryQKV(Function):
    """The autograd function of `rotary_qkv`, and for one part of `rotary`."""

    @staticmethod
    def forward(
        context: Any, heads: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Any, ...]:
        tables = cos.contiguous(), sin.contiguous()
        context.save_for_backward(*tables)
        context.interleaved = interleaved
        q, *others = heads.split(counts, dim=2)
        *gate, k, v = others or (None, None)
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
        _launch_rotary((q, k, None, None), (q_out, k_out), tables, interleaved=interleaved, back=False)
        return (q_out,) if k_out is None else (q_out, *gate, k_out, v)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        q, *others = gradients
        *gate, k, v = others or (None, None)
        total = sum(one.shape[2] for one in gradients)
        whole = torch.empty((*q.shape[:2], total, q.shape[3]), dtype=q.dtype, device=q.device)
        parts = q, k, v, gate[0] if gate else None
        _launch_rotary(parts, (whole, None), context.saved_tensors, interleaved=context.interleaved, back=True)
        return whole, None, None, None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Compute `reference.rotary` by Triton, for cos and sin that are equal for both elements of a pair.

    x: [s, b, n, d]; cos, sin: [s, b or 1, 1, r] in fp32. Returns the shape of x.
    """
    return _RotaryQKV.apply(x, (x.shape[2],), cos, sin, interleaved)[0]


def rotary_qkv(
    heads: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, ...]:
    """Compute `reference.rotary_qkv` by Triton; the backward pass writes the gradient of `heads` in one kernel.

    heads: [s, b, sum of counts, d]; counts: heads of each part; cos, sin: [s, b or 1, 1, r] in fp32, equal for both
    elements of a pair. Returns the parts, each [s, b, count, d].
    """
    return _RotaryQKV.apply(heads, counts, cos, sin, interleaved)
