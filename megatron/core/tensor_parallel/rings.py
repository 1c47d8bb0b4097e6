"""Products of a sequence that is cut over the tensor ranks, whose pieces travel while others are multiplied.

    gathered_product     rank 1 of 3    own piece 1      piece 0 of rank 0      piece 2 of rank 0
                                        multiply 1       multiply 0             multiply 2
                                        0 is coming      2 is coming

    summed_product       rank 1 of 3    multiply for 0   multiply for 2         multiply for 1
                                                         + what came for 2      + what came for 1
                                                         0 is going             2 is going

Each sends what one collective would send, in as many messages to the next rank as there are others; all but what the first
or last product waits for travels beside a product (Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", 2023). Sums are made in the order of the ring, another for every piece. No autograd here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class Rings:
    """Which products are made so: of inputs that are gathered, of which outputs are summed, of which input gradients are summed."""

    gathers: bool = False
    sums: bool = False
    gradients: bool = False


def gathered_product(x: Tensor, matrix: Tensor, bias: Tensor | None, axis: Axis) -> tuple[Tensor, Tensor]:
    """The product of all ranks' pieces, and the pieces. x: [s/tp, b, i]; matrix: [i, o]; returns [s, b, o] and [s, b, i]."""
    whole = x.new_empty((axis.size, *x.shape))
    product = x.new_empty((axis.size, *x.shape[:-1], matrix.shape[-1]))
    whole[axis.rank] = x
    for step in range(axis.size):
        place, coming = (axis.rank - step) % axis.size, (axis.rank - step - 1) % axis.size
        works = collectives.start_shift(whole[coming], whole[place], axis) if step < axis.size - 1 else []
        _multiply(whole[place], matrix, bias, product[place])
        _wait(works)
    return product.flatten(0, 1), whole.flatten(0, 1)


def summed_product(x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
    """This rank's piece of the sum of all ranks' products. x: [s, b, i]; matrix: [i, o]; returns [s/tp, b, o]."""
    pieces = x.chunk(axis.size)
    total, own, arriving = (x.new_empty((*pieces[0].shape[:-1], matrix.shape[-1])) for _ in range(3))
    _multiply(pieces[axis.rank - 1], matrix, None, total)
    for step in range(1, axis.size):
        works = collectives.start_shift(arriving, total, axis)
        _multiply(pieces[(axis.rank - 1 - step) % axis.size], matrix, None, own)
        _wait(works)
        total, own = own.add_(arriving), total
    return total


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x times the matrix, and the bias, into `out`."""
    rows, out = x.flatten(0, -2), out.flatten(0, -2)
    if bias is None:
        torch.mm(rows, matrix, out=out)
    else:
        torch.addmm(bias, rows, matrix, out=out)


def _wait(works: list[collectives.Work]) -> None:
    for work in works:
        collectives.wait(work)
