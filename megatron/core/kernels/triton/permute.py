"""Rows of tokens to the order of experts and back in Triton: each row is read where it lies, summed in fp32 and written once.

This file needs the package triton, and is imported when its kernel is first called.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.triton import cdiv

_BLOCK = 1024


@triton.jit
def _sum_indexed_rows_kernel(
    values: tl.tensor,
    places: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    size: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Kernel: y[i] = sum over j of values[places[i, j]]. values: [rows, size]; places: [n, COUNT], where a place from
    `rows` on counts as zeros; y: [n, size].
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(COUNT):
        place = tl.load(places + row * COUNT + j)
        there = tl.where(place < rows, size, 0)
        total += tl.load(values + place * size + columns, mask=columns < there, other=0.0).to(tl.float32)
    tl.store(y + row * size + columns, total.to(y.dtype.element_ty), mask=columns < size)


class _Permute(Function):
    """The autograd function of `permute`."""

    @staticmethod
    def forward(context: Any, values: Tensor, places: Tensor, back: Tensor) -> Tensor:
        context.save_for_backward(back)
        return _sum_indexed_rows(values, places)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = context.saved_tensors
        return _sum_indexed_rows(gradient, back), None, None


def permute(values: Tensor, places: Tensor, back: Tensor, empties: bool, losses: bool) -> Tensor:
    """Compute `kernels.permute.permute` by Triton. values: [m, h]; places: int64 [n, k]; back: int64 [m, l].
    Returns [n, h].

    empties, losses: not needed here, as indices past the end are always allowed.
    """
    return _Permute.apply(values, places, back)


def _sum_indexed_rows(values: Tensor, places: Tensor) -> Tensor:
    """Return [n, h], the sum over j of values[places[:, j]], accumulated in fp32. values: [m, h]; places: int64 [n, k],
    m counts as a row of zeros.
    """
    values, places = values.contiguous(), places.contiguous()
    size, y = values.shape[1], values.new_empty((len(places), values.shape[1]))
    if y.numel():
        _sum_indexed_rows_kernel[(len(places), cdiv(size, _BLOCK))](
            values, places, y, len(values), size, COUNT=places.shape[1], BLOCK=_BLOCK
        )
    return y
