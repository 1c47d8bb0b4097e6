"""Permute tokens to the order of experts, and back: every row of the result is a sum of rows.

    to experts   row i of the result is the token of choice i        k = 1
    back         token t is the sum of the rows of its k choices

Each is the gradient of the other, so both only gather; nothing is added atomically, and sums have the same order every time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.ops.reference import accumulation_dtype_of


class _Permute(Function):
    """The autograd function of `permute`."""

    @staticmethod
    def forward(context: Any, values: Tensor, places: Tensor, back: Tensor, empties: bool, losses: bool) -> Tensor:
        context.save_for_backward(back)
        context.losses = losses
        return _sum_indexed_rows(values, places, holes=empties)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        (back,) = context.saved_tensors
        return _sum_indexed_rows(gradient, back, holes=context.losses), None, None, None, None


def permute(values: Tensor, places: Tensor, back: Tensor, empties: bool, losses: bool) -> Tensor:
    """Return [n, h], whose row i is the sum over j of values[places[i, j]], accumulated in fp32 (fp64 for fp64).

    values: [m, h]; places: int64 [n, k]; back: int64 [m, l], the inverse, used by the backward pass: the rows of the
    result in which each row of values is summed. An index one past the end means no row. empties: whether `places` can
    have such an index; losses: whether `back` can.
    """
    return _Permute.apply(values, places, back, empties, losses)


def _index_select_or_zeros(values: Tensor, index: Tensor, *, holes: bool) -> Tensor:
    """Return values[index]. holes: the index may be one past the end, which gives a row of zeros."""
    if not len(values):
        return values.new_zeros((len(index), *values.shape[1:]))
    if not holes:
        return values.index_select(0, index)
    return values.index_select(0, index.clamp(max=len(values) - 1)).masked_fill_((index == len(values))[:, None], 0.0)


def _sum_indexed_rows(values: Tensor, places: Tensor, *, holes: bool) -> Tensor:
    """Return [n, h], the sum over j of values[places[:, j]]. holes: an index may be one past the end, which gives
    zeros.
    """
    first, *others = places.unbind(1)
    total = _index_select_or_zeros(values, first, holes=holes)
    if others:
        total = total.to(accumulation_dtype_of(values.dtype))
    for place in others:
        total += _index_select_or_zeros(values, place, holes=holes)
    return total.to(values.dtype)
