"""The main gradient of a parameter: its sum over the microbatches of a step, usually in fp32.

    autograd        a gradient in memory of its own, which is added
    a linear layer  accumulates gradient^T x in the matmul itself (`--no-gradient-accumulation-fusion`: gives it to autograd)
    the loss        accumulates chunks of the vocabulary

A layer that accumulates by itself gives autograd no gradient: nothing is rounded to the format of the weights on its way to the
wider sum, and there is no second pass through memory. distributed/ddp.py says how the contributions are counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class MainGrad:
    """The summed gradient of one parameter. total: the tensor, in the parameter's shape and the dtype of main gradients. widens: a matmul
    of the parameter's dtype can accumulate into it.

    open: a step is under way. touched: something was added and is not counted yet. came: to be called to count it where no
    backward pass ends at the parameter.
    """

    def __init__(self, total: Tensor, *, widens: bool = False) -> None:
        self.total, self.widens, self.open, self.touched = total, widens, False, False
        self.came: Callable[[], None] = lambda: None

    def add(self, gradient: Tensor, factor: Tensor | None = None) -> None:
        """Add a gradient of any dtype, times a factor []."""
        if factor is None:
            self.total.add_(gradient)
        elif gradient.dtype == self.total.dtype == factor.dtype:
            self.total.addcmul_(gradient, factor)
        else:
            self.total.add_(gradient * factor)
        self.touched = True

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left [m, k] times right [k, n], for a parameter [m, n]; in the matmul itself where that is possible."""
        if left.dtype == self.total.dtype:
            torch.addmm(self.total, left, right, out=self.total)
        elif self.widens:
            torch.addmm(self.total, left, right, self.total.dtype, out=self.total)
        else:
            self.total.add_(left.mm(right))
        self.touched = True


def sum_of(parameter: Tensor) -> MainGrad | None:
    """The main gradient of a parameter while a step is under way; None at other times, when autograd returns gradients."""
    result = getattr(parameter, "main_grad", None)
    return result if result is not None and result.open else None
