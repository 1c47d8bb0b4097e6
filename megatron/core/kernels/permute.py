"""Rows of tokens to the order of experts, and back: every row of the result is a sum of some rows.

    to experts   row i of the result is the token that choice i is of          k = 1
    and back     token t is the sum of the rows that its k choices became

Each is the gradient of the other, so both only read, and nothing is added atomically: the same sums in the same order every time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.reference import wide


class _Permute(Function):
    @staticmethod
    def forward(context: Any, values: Tensor, places: Tensor, back: Tensor, empties: bool, losses: bool) -> Tensor:
        context.save_for_backward(back)
        context.losses = losses
        return _sum(values, places, holes=empties)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        (back,) = context.saved_tensors
        return _sum(gradient, back, holes=context.losses), None, None, None, None


def permute(values: Tensor, places: Tensor, back: Tensor, empties: bool, losses: bool) -> Tensor:
    """Row i is the sum over j of values[places[i, j]], taken in a wide format. values: [m, h]; places: [n, k]; returns [n, h].

    back: [m, l], where row i of values went: places read from the other side. A place one past the end is none; empties: whether
    there may be such in places; losses: in back.
    """
    return _Permute.apply(values, places, back, empties, losses)


def _take(values: Tensor, index: Tensor, *, holes: bool) -> Tensor:
    """values[index]; with holes: zeros where the index is one past the end."""
    if not len(values):
        return values.new_zeros((len(index), *values.shape[1:]))
    if not holes:
        return values.index_select(0, index)
    return values.index_select(0, index.clamp(max=len(values) - 1)).masked_fill_((index == len(values))[:, None], 0.0)


def _sum(values: Tensor, places: Tensor, *, holes: bool) -> Tensor:
    """The sums over k of values[places[:, k]]."""
    first, *others = places.unbind(1)
    total = _take(values, first, holes=holes)
    if others:
        total = total.to(wide(values.dtype))
    for place in others:
        total += _take(values, place, holes=holes)
    return total.to(values.dtype)
