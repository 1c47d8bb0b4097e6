"""Linear layers in graphs of torch's compiler (`--compile`) that add the gradients of their weights to the main gradients themselves.

    forward     multiply in a graph    y = x W^T + b
    backward    add_product            main gradient <- main gradient + g^T x, by the matmul, in place
                g W, sum of g          as in any graph, what stands around them is fused with them

Both are operations of torch's library: the compiler knows their shapes and what they write, and does not look inside. The main gradient is an
input of the graph that only its backward pass writes. Several microbatches may be between their passes: each must be given an alias of
the main gradient of its own (`MainGrad.renew_version_counter`), as autograd refuses a saved tensor that was written since.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parallel import main_grad
from megatron.core.parallel.main_grad import MainGrad


@torch.library.custom_op("megatron::add_product", mutates_args=("total",))
def _add_product_custom_op(total: Tensor, left: Tensor, right: Tensor, mixed_dtype_addmm: bool) -> None:
    """Operation for graphs: add left @ right to `total`, in place."""
    main_grad.add_product(total, left, right, mixed_dtype_addmm=mixed_dtype_addmm)


@_add_product_custom_op.register_fake
def _add_product_fake(total: Tensor, left: Tensor, right: Tensor, mixed_dtype_addmm: bool) -> None:
    """Fake of `_add_product_custom_op` for tracing: it returns nothing."""


@torch.library.custom_op("megatron::multiply", mutates_args=())
def _linear_into_main_grad_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor, mixed_dtype_addmm: bool
) -> Tensor:
    """Operation for graphs: x W^T + b. total: the main gradient, which only the backward pass uses."""
    return F.linear(x, weight, bias)


@_linear_into_main_grad_op.register_fake
def _linear_into_main_grad_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor, mixed_dtype_addmm: bool
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save_linear_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, total, ctx.mixed_dtype_addmm = inputs
    ctx.save_for_backward(x, weight)
    ctx.total = total


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and bias, and add the weight's to the main gradient."""
    x, weight = ctx.saved_tensors
    flat = gradient.reshape(-1, gradient.shape[-1])
    _add_product_custom_op(ctx.total, flat.t(), x.reshape(-1, x.shape[-1]), ctx.mixed_dtype_addmm)
    own = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
    return own, None, flat.sum(0) if ctx.needs_input_grad[2] else None, None, None


_linear_into_main_grad_op.register_autograd(_linear_backward, setup_context=_save_linear_inputs)


def linear_into_main_grad(x: Tensor, weight: Tensor, bias: Tensor | None, into: MainGrad) -> Tensor:
    """Return x [..., in] W^T + b in a compiled graph; backward adds dW [out, in] to the main gradient `into`."""
    into.added_in_graph = True
    return _linear_into_main_grad_op(x, weight, bias, into.total, into.mixed_dtype_addmm)
