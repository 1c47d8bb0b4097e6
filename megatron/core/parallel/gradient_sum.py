"""Where the gradients of a parameter are summed over the microbatches of a step, whoever computes them.

    autograd        a gradient in memory of its own, which is added
    a linear layer  adds gradient^T x by the matmul itself (`--no-gradient-accumulation-fusion`: gives it to autograd)
    the loss        adds what its blocks of words have gathered

What adds for itself gives autograd no gradient. So nothing is rounded to the format of the weights on its way to the wider sum, and
no second pass through memory is made for it. How gradients are counted says distributed/ddp.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class GradientSum:
    """The sum of one parameter's gradients. total: where it is, in the parameter's shape, in the format of sums. widens: products of
    the parameter's format can be added to it by the matmul.

    open: a step is under way. touched: something was added that nobody has counted yet. came: to be called when what was added is
    to be counted, where no backward pass that ends at the parameter will do it.
    """

    def __init__(self, total: Tensor, *, widens: bool = False) -> None:
        self.total, self.widens, self.open, self.touched = total, widens, False, False
        self.came: Callable[[], None] = lambda: None

    def add(self, gradient: Tensor, factor: Tensor | None = None) -> None:
        """Add a gradient of any format, times a number []."""
        if factor is None:
            self.total.add_(gradient)
        elif gradient.dtype == self.total.dtype == factor.dtype:
            self.total.addcmul_(gradient, factor)
        else:
            self.total.add_(gradient * factor)
        self.touched = True

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left [m, k] times right [k, n], for a parameter [m, n]; without a place for the product where that is possible."""
        if left.dtype == self.total.dtype:
            torch.addmm(self.total, left, right, out=self.total)
        elif self.widens:
            torch.addmm(self.total, left, right, self.total.dtype, out=self.total)
        else:
            self.total.add_(left.mm(right))
        self.touched = True


def sum_of(parameter: Tensor) -> GradientSum | None:
    """Where the gradients of a parameter are summed, while a step is under way. At other times they are whoever's that asks autograd."""
    found = getattr(parameter, "gradient_sum", None)
    return found if found is not None and found.open else None
