"""Matmuls of a sequence-parallel region, overlapped with its communication (`--tp-comm-overlap`).

    all_gather_matmul       rank 1 of 3    own piece 1      piece 0 of rank 0      piece 2 of rank 0
                                           multiply 1       multiply 0             multiply 2
                                           0 is coming      2 is coming

    matmul_reduce_scatter   rank 1 of 3    multiply for 0   multiply for 2         multiply for 1
                                                            + what came for 2      + what came for 1
                                                            0 is going             2 is going

Each sends what one collective would send, as messages around a ring; all but what the first or last matmul waits for is hidden
behind a matmul (Wang et al., "Overlap Communication with Dependent Computation via Decomposition", 2023). Sums are made in
the order of the ring, another for every piece. No autograd here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class MatmulOverlapOptions:
    """Which matmuls are overlapped: with the all-gather of inputs, the reduce-scatter of outputs, that of input gradients."""

    gathers: bool = False
    sums: bool = False
    gradients: bool = False


def all_gather_matmul(x: Tensor, matrix: Tensor, bias: Tensor | None, axis: Axis) -> tuple[Tensor, Tensor]:
    """All-gather x over the axis and multiply, overlapped. x: [s/tp, b, i]; matrix: [i, o].

    Returns the product plus bias, [s, b, o], and the gathered x, [s, b, i].
    """
    whole = x.new_empty((axis.size, *x.shape))
    product = x.new_empty((axis.size, *x.shape[:-1], matrix.shape[-1]))
    whole[axis.rank] = x
    for step in range(axis.size):
        place, coming = (axis.rank - step) % axis.size, (axis.rank - step - 1) % axis.size
        works = collectives.start_ring_shift(whole[coming], whole[place], axis) if step < axis.size - 1 else []
        _matmul_into(whole[place], matrix, bias, product[place])
        _wait_all(works)
    return product.flatten(0, 1), whole.flatten(0, 1)


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
    """Multiply and reduce-scatter over the axis, overlapped. x: [s, b, i]; matrix: [i, o]; returns [s/tp, b, o]."""
    pieces = x.chunk(axis.size)
    total, own, arriving = (x.new_empty((*pieces[0].shape[:-1], matrix.shape[-1])) for _ in range(3))
    _matmul_into(pieces[axis.rank - 1], matrix, None, total)
    for step in range(1, axis.size):
        works = collectives.start_ring_shift(arriving, total, axis)
        _matmul_into(pieces[(axis.rank - 1 - step) % axis.size], matrix, None, own)
        _wait_all(works)
        total, own = own.add_(arriving), total
    return total


def _matmul_into(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x @ matrix (+ bias) into `out`."""
    rows, out = x.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(bias, rows, matrix, out=out)


def _wait_all(works: Sequence[collectives.Work]) -> None:
    for work in works:
        collectives.wait(work)
