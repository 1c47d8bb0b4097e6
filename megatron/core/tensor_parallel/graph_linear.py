"""Linear layers in graphs of torch's compiler (`--compile`) that add the gradients of their weights to the main gradients themselves.

    forward     multiply in a graph    y = x W^T + b
    backward    add_product            main gradient <- main gradient + g^T x, by the matmul, in place
                g W, sum of g          as in any graph, what stands around them is fused with them

Both are operations of torch's library: the compiler knows their shapes and what they write, and does not look inside. The main gradient is an
input of the graph that only its backward pass writes. Several microbatches may be between their passes: each must be given an alias of
the main gradient of its own (`MainGrad.refresh_alias`), as autograd refuses a saved tensor that was written since.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parallel import main_grad
from megatron.core.parallel.main_grad import MainGrad


@torch.library.custom_op("megatron::add_product", mutates_args=("total",))
def _add_product(total: Tensor, left: Tensor, right: Tensor, mixed_dtype_addmm: bool) -> None:
    main_grad.add_product(total, left, right, mixed_dtype_addmm=mixed_dtype_addmm)


@_add_product.register_fake
def _add_product_fake(total: Tensor, left: Tensor, right: Tensor, mixed_dtype_addmm: bool) -> None:
    """It returns nothing."""


@torch.library.custom_op("megatron::multiply", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor, mixed_dtype_addmm: bool) -> Tensor:
    return F.linear(x, weight, bias)


@_linear.register_fake
def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor, mixed_dtype_addmm: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, total, ctx.mixed_dtype_addmm = inputs
    ctx.save_for_backward(x, weight)
    ctx.total = total


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    flat = gradient.reshape(-1, gradient.shape[-1])
    _add_product(ctx.total, flat.t(), x.reshape(-1, x.shape[-1]), ctx.mixed_dtype_addmm)
    own = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
    return own, None, flat.sum(0) if ctx.needs_input_grad[2] else None, None, None


_linear.register_autograd(_backward, setup_context=_setup_context)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, into: MainGrad) -> Tensor:
    """x W^T + b, [..., out]; the backward pass adds the weight's gradient `into` its sum. x: [..., in]; weight: [out, in]; bias: [out]."""
    into.added_in_graph = True
    return _linear(x, weight, bias, into.total, into.mixed_dtype_addmm)
