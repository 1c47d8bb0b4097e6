"""The main gradient of a parameter: its sum over the microbatches of a step, usually in fp32. Three kinds of
contributions:

    autograd        computes a gradient in separate memory, which is added
    a linear layer  accumulates gradient^T x inside the matmul (not with `--no-gradient-accumulation-fusion`)
    the loss        accumulates chunks of the vocabulary

A layer that accumulates by itself returns no gradient to autograd: nothing is rounded to the format of the weights on
its way into the fp32 sum, and there is no second pass through memory. distributed/ddp.py counts the contributions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class MainGrad:
    """The accumulated gradient of one parameter.

    total: the sum, in the parameter's shape and the dtype of main gradients. mixed_dtype_addmm: a matmul of the
    parameter's dtype can accumulate into it. open: a step is under way. has_uncounted: a contribution was added that is
    not counted yet. added_in_graph: a compiled layer adds one in every backward pass of the step, of which only autograd tells.
    on_accumulated: call it to count contributions where no backward pass ends at the parameter.
    """

    def __init__(self, total: Tensor, *, mixed_dtype_addmm: bool = False) -> None:
        self.total, self.mixed_dtype_addmm, self.open, self.has_uncounted = total, mixed_dtype_addmm, False, False
        self.added_in_graph = False
        self.on_accumulated: Callable[[], None] = lambda: None

    def add(self, gradient: Tensor, factor: Tensor | None = None) -> None:
        """Add a gradient of any dtype, in the parameter's shape, multiplied by `factor` [] if given."""
        if factor is None:
            self.total.add_(gradient)
        elif gradient.dtype == self.total.dtype == factor.dtype:
            self.total.addcmul_(gradient, factor)
        else:
            self.total.add_(gradient * factor)
        self.has_uncounted = True

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left [m, k] times right [k, n] for a parameter [m, n], inside the matmul where the dtypes allow it."""
        add_product(self.total, left, right, mixed_dtype_addmm=self.mixed_dtype_addmm)
        self.has_uncounted = True

    def renew_version_counter(self) -> None:
        """Make `total` a new alias of the same memory, for which autograd counts no writes but its own."""
        self.total = self.total.data


def add_product(total: Tensor, left: Tensor, right: Tensor, *, mixed_dtype_addmm: bool) -> None:
    """Add left [m, k] times right [k, n] to a sum [m, n], inside the matmul where the dtypes allow it."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif mixed_dtype_addmm:
        torch.addmm(total, left, right, total.dtype, out=total)
    else:
        total.add_(left.mm(right))


def active_main_grad(parameter: Tensor) -> MainGrad | None:
    """Return a parameter's (any shape) main gradient during a step; None when autograd is to return gradients."""
    result = getattr(parameter, "main_grad", None)
    return result if result is not None and result.open else None
