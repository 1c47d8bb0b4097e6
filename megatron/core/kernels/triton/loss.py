"""The softmax of a block of logits in Triton, for `linear_loss`: one program a token.

The logits stay in the format in which they were made. They are read once for their largest and their sum of exponentials, and
once more to become the gradient in their own memory; torch takes some ten passes over a copy in fp32.
This file needs the package triton, and is imported when one of its kernels is first called.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.kernels.triton import cdiv

_BLOCK = 4096


@triton.jit
def _softmax_statistics_kernel(
    logits: tl.tensor, rows: tl.tensor, result: tl.tensor, valid: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Kernel: for one token compute the largest of its first `valid` logits, the sum of exp(logit - largest), and the
    logit in column rows[token].

    result: [3, tokens], in this order. size: columns of the logits.
    """
    token = tl.program_id(0).to(tl.int64)
    largest = -3.4028234663852886e38
    total = 0.0
    for start in range(0, valid, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        some = tl.load(logits + token * size + columns, mask=columns < valid, other=float("-inf")).to(tl.float32)
        top = tl.maximum(largest, tl.max(some))
        total = total * tl.exp(largest - top) + tl.sum(tl.exp(some - top))
        largest = top
    place, count = result + token, tl.num_programs(0)
    tl.store(place, largest)
    tl.store(place + count, total)
    tl.store(place + 2 * count, tl.load(logits + token * size + tl.load(rows + token)).to(tl.float32))


@triton.jit
def _logit_gradient_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    largest: tl.tensor,
    factor: tl.tensor,
    hit: tl.tensor,
    valid: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Kernel: replace logits [tokens, size] by exp(logit - largest) * factor, minus `hit` in column rows[token]; by 0
    from column `valid` on.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = logits + token * size + columns
    some = tl.load(there, mask=columns < valid, other=float("-inf")).to(tl.float32)
    result = tl.exp(some - tl.load(largest + token)) * tl.load(factor + token)
    result = tl.where(columns == tl.load(rows + token), result - tl.load(hit + token), result)
    tl.store(there, result.to(logits.dtype.element_ty), mask=columns < size)


def softmax_statistics(logits: Tensor, rows: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's largest logit among the first `valid` columns, the sum of exp(logit - largest), and the logit
    of its target; fp32 [k] each.

    logits: [k, v]; rows: int64 [k], column of each token's target.
    """
    result = torch.empty((3, len(logits)), dtype=torch.float32, device=logits.device)
    _softmax_statistics_kernel[(len(logits),)](
        logits, rows, result, min(valid, logits.shape[1]), logits.shape[1], BLOCK=_BLOCK, num_warps=8
    )
    largest, total, target = result
    return largest, total, target


def logits_to_gradient(
    logits: Tensor, rows: Tensor, largest: Tensor, factor: Tensor, hit: Tensor, valid: int
) -> Tensor:
    """Replace logits by their gradient in place: factor * exp(logit - largest), minus `hit` at each token's target.
    Returns the logits.

    logits: [k, v/tp]; rows: [k], column of each target; largest, factor, hit: [k]. valid: number of columns that are
    not padding; the others get 0.
    """
    size = logits.shape[1]
    _logit_gradient_kernel[(len(logits), cdiv(size, _BLOCK))](
        logits, rows, largest, factor.contiguous(), hit.contiguous(), min(valid, size), size, BLOCK=_BLOCK
    )
    return logits
