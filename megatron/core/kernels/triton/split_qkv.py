"""The heads of a fused projection in Triton: the backward pass writes their gradients into one piece of memory, and sums the bias's on the way.

    forward    [q | k | v] of a token, one row                 -> views of it
    backward   gradients of q, k and v, anywhere, read once    -> one row [dq | dk | dv] of each token; sums [parts of the tokens, of the row]

torch's backward pass of attention makes three tensors, which are concatenated, and the sum for the bias reads the result once more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.triton import cdiv, round_up_to_power_of_2

_ROWS = 64  # tokens of a program
_ELEMENTS = 4 * 32 * 8  # that four warps load at a time, 16 bytes of a half format each


@triton.jit
def _copy_head_and_sum_tokens(
    x: tl.tensor, y: tl.tensor, sums: tl.tensor, token: tl.tensor, tokens: tl.tensor, batch: tl.tensor,
    row: tl.tensor, x_s: tl.tensor, x_b: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Copy one head of ROWS tokens from token `token` on, from x, given by its strides over s and b, to y, where tokens
    are `row` elements apart.

    sums: [SIZE], receives the sum over these tokens in fp32, or None. STEP: tokens at a time; BLOCK: power of two that
    covers SIZE.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((STEP, BLOCK), dtype=tl.float32)
    for start in range(0, ROWS, STEP):
        at = token + start + tl.arange(0, STEP)[:, None]
        inside = (at < tokens) & (columns < SIZE)
        values = tl.load(x + (at // batch) * x_s + (at % batch) * x_b + columns, mask=inside, other=0.0)
        tl.store(y + at * row + columns, values, mask=inside)
        total += values.to(tl.float32)
    if sums is not None:
        columns = tl.arange(0, BLOCK)
        tl.store(sums + columns, tl.sum(total, 0), mask=columns < SIZE)


@triton.jit
def _join_head_gradients_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, gate: tl.tensor, whole: tl.tensor, sums: tl.tensor, tokens: tl.tensor,
    batch: tl.tensor, q_heads: tl.tensor, k_heads: tl.tensor, row: tl.tensor, q_s: tl.tensor, q_b: tl.tensor,
    q_h: tl.tensor, k_s: tl.tensor, k_b: tl.tensor, k_h: tl.tensor, v_s: tl.tensor, v_b: tl.tensor, v_h: tl.tensor,
    gate_s: tl.tensor, gate_b: tl.tensor, gate_h: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: write the gradients of one head of ROWS tokens into the gradient of the fused projection's output, and
    sum them over the tokens.

    q, gate: gradients [s, batch, q_heads, SIZE]; k, v: [s, batch, k_heads, SIZE], by their strides; gate may be None.
    whole: receives [tokens, row], laid out [q | gate | k | v]; sums: [programs of tokens, row], or None.
    """
    token, head = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    out = whole + head * SIZE
    if sums is not None:
        sums += tl.program_id(0).to(tl.int64) * row + head * SIZE
    first = q_heads
    if gate is not None:
        first += q_heads
    if head < q_heads:
        _copy_head_and_sum_tokens(
            q + head * q_h, out, sums, token, tokens, batch, row, q_s, q_b, SIZE, BLOCK, ROWS, STEP
        )
    elif head >= first + k_heads:
        v += (head - first - k_heads) * v_h
        _copy_head_and_sum_tokens(v, out, sums, token, tokens, batch, row, v_s, v_b, SIZE, BLOCK, ROWS, STEP)
    elif head >= first:
        _copy_head_and_sum_tokens(
            k + (head - first) * k_h, out, sums, token, tokens, batch, row, k_s, k_b, SIZE, BLOCK, ROWS, STEP
        )
    elif gate is not None:
        gate += (head - q_heads) * gate_h
        _copy_head_and_sum_tokens(gate, out, sums, token, tokens, batch, row, gate_s, gate_b, SIZE, BLOCK, ROWS, STEP)


class _SplitQKV(Function):
    """The autograd function of `split_qkv`."""

    @staticmethod
    def forward(context: Any, heads: Tensor, counts: tuple[int, ...], bias: Tensor | None) -> tuple[Tensor, ...]:
        context.dtype = None if bias is None else bias.dtype
        return heads.split(counts, dim=2)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None]:
        q, *gate, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in gradients)
        (length, batch, heads, size), groups = q.shape, k.shape[2]
        total, tokens = (1 + len(gate)) * heads + 2 * groups, length * batch
        whole = torch.empty((length, batch, total, size), dtype=q.dtype, device=q.device)
        parts, sums = cdiv(tokens, _ROWS), None
        if context.dtype is not None:
            sums = torch.empty((parts, total * size), dtype=torch.float32, device=q.device)
        block = round_up_to_power_of_2(size)
        steps = (
            step
            for one in (q, k, v, gate[0] if gate else None)
            for step in (one.stride()[:3] if one is not None else (0, 0, 0))
        )
        if tokens:
            _join_head_gradients_kernel[(parts, total)](
                q, k, v, gate[0] if gate else None, whole, sums, tokens, batch, heads, groups, total * size, *steps,
                SIZE=size, BLOCK=block, ROWS=_ROWS, STEP=min(_ROWS, max(1, _ELEMENTS // block)), num_warps=4,
            )  # fmt: skip
        return whole, None, None if sums is None else sums.sum(0, dtype=context.dtype)


def split_qkv(heads: Tensor, counts: tuple[int, ...], bias: Tensor | None) -> tuple[Tensor, ...]:
    """Compute `reference.split_qkv` by Triton: return views of the parts; the backward pass writes the gradient of
    `heads` in one kernel, and sums the bias's.

    heads: [s, b, sum of counts, d]; counts: heads of each part; bias: [sum of counts * d] or None.
    """
    return _SplitQKV.apply(heads, counts, bias)
