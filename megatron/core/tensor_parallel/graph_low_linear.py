"""Linear layers of 8 and 4 bits in graphs of torch's compiler (`--compile`).

    forward     low_multiply     x W^T, and what is kept of x for the weight's gradient, rounded
    backward    low_gradients    g W and g^T x, of rounded operands
                sum of g         as in any graph

Both are operations of torch's library: the compiler knows their shapes and does not look inside. Scales, histories of largest values, and weights
that are rounded once a step stay outside of graphs, where the operations find them by the number in a handle. A handle is a tensor,
an input of the graph like the weight, so layers of a kind share one graph; and on the CPU, so reading it waits for no device.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron.core.kernels.reference import accumulation_dtype
from megatron.core.tensor_parallel.low_precision import (
    LowLinearOptions,
    Scaling,
    backward_products,
    form_of,
    forward_product,
)

_NUMBERS = count()
_WHOLE = -1  # an input is kept as it is


@cache
def _scalings() -> WeakValueDictionary[int, Scaling]:
    """The scales of layers that are still there, by the numbers in their handles."""
    return WeakValueDictionary()


def enter_graphs(scaling: Scaling) -> None:
    """Give the scales of a layer a handle, before the layer is compiled."""
    number = next(_NUMBERS)
    _scalings()[number], scaling.handle = scaling, torch.tensor(number, device="cpu")


def _way(handle: Tensor) -> LowLinearOptions:
    return LowLinearOptions(_scalings()[int(handle)])


# block: elements that share a scale in what is kept of x; 0: all do; `_WHOLE`: x is not rounded. dtypes: of the rounded values and their scales.
@torch.library.custom_op("megatron::low_multiply", mutates_args=())
def _low_multiply(
    x: Tensor, weight: Tensor, handle: Tensor, block: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    way = _way(handle)
    output, kept, scales, _ = forward_product(x, weight, form_of(way.scaling.recipe), way)
    if block == _WHOLE:
        return output.contiguous(), x.new_empty(0), x.new_empty(0)
    assert scales is not None, "what is rounded has scales"
    return output.contiguous(), kept.contiguous(), scales.contiguous()


@_low_multiply.register_fake
def _empty_product(
    x: Tensor, weight: Tensor, handle: Tensor, block: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    output = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if block == _WHOLE:
        return output, x.new_empty(0), x.new_empty(0)
    size = x.shape[-1]
    tokens = x.numel() // size
    kept = x.new_empty((size, tokens), dtype=dtype)
    return output, kept, x.new_empty((size, -(-tokens // block)) if block else (), dtype=scale_dtype)


@torch.library.custom_op("megatron::low_gradients", mutates_args=())
def _low_gradients(
    gradient: Tensor, weight: Tensor, kept: Tensor, scales: Tensor | None, handle: Tensor
) -> tuple[Tensor, Tensor]:
    own, of_weight = backward_products(gradient, weight, kept, scales, _way(handle))
    return own.reshape(*gradient.shape[:-1], own.shape[-1]).contiguous(), of_weight.contiguous()


@_low_gradients.register_fake
def _empty_gradients(
    gradient: Tensor, weight: Tensor, kept: Tensor, scales: Tensor | None, handle: Tensor
) -> tuple[Tensor, Tensor]:
    return gradient.new_empty((*gradient.shape[:-1], weight.shape[1])), gradient.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, handle, block, *_ = inputs
    _, kept, scales = output
    ctx.mark_non_differentiable(kept, scales)
    if block == _WHOLE:
        ctx.save_for_backward(weight, handle, x)
    else:
        ctx.save_for_backward(weight, handle, kept, scales)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, handle, kept, *scales = ctx.saved_tensors
    own, of_weight = _low_gradients(gradient, weight, kept, scales[0] if scales else None, handle)
    learns = ctx.needs_input_grad
    return own if learns[0] else None, of_weight if learns[1] else None, None, None, None, None


_low_multiply.register_autograd(_backward, setup_context=_save)


def operands_of(scaling: Scaling, dtype: torch.dtype) -> tuple[Tensor, int, torch.dtype, torch.dtype]:
    """What `low_multiply` is given besides matrices of this dtype: the handle [], the block, and the dtypes of rounded values and of their scales."""
    recipe = scaling.recipe
    assert scaling.handle is not None, "a layer is given a handle before it is compiled"
    block = _WHOLE if form_of(recipe) == "whole" else recipe.block
    scale_dtype = recipe.block_scale_dtype if recipe.block else accumulation_dtype(dtype)
    return scaling.handle, block, recipe.forward.dtype, scale_dtype


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """x W^T + b, [.., out], of rounded operands, by a layer of this rank alone. x: [.., in]; weight: [out, in]; bias: [out]."""
    output, _, _ = _low_multiply(x, weight, *operands_of(scaling, x.dtype))
    return output if bias is None else output + bias
