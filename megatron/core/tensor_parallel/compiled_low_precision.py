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

from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.tensor_parallel.low_precision import (
    LowPrecisionLinearOptions,
    LowPrecisionScaling,
    low_precision_backward,
    low_precision_forward,
    saved_input_form,
)

_NUMBERS = count()
_WHOLE = -1  # an input is kept as it is


@cache
def _scalings_by_handle() -> WeakValueDictionary[int, LowPrecisionScaling]:
    """Return the scalings of all layers that still exist, by the number in their handle."""
    return WeakValueDictionary()


def register_scaling_for_compile(scaling: LowPrecisionScaling) -> None:
    """Give a scaling the handle by which compiled graphs find it; call it before the layer is compiled."""
    number = next(_NUMBERS)
    _scalings_by_handle()[number], scaling.handle = scaling, torch.tensor(number, device="cpu")


def _linear_options_from_handle(handle: Tensor) -> LowPrecisionLinearOptions:
    """Return the options of the layer whose scaling has this handle."""
    return LowPrecisionLinearOptions(_scalings_by_handle()[int(handle)])


# block: elements that share a scale in what is kept of x; 0: all do; `_WHOLE`: x is not rounded. dtypes: of the rounded values and their scales.
@torch.library.custom_op("megatron::low_multiply", mutates_args=())
def _low_precision_matmul_op(
    x: Tensor, weight: Tensor, handle: Tensor, block: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """For graphs: return x W^T, and x rounded with its scales, or two empty tensors if x itself is saved."""
    way = _linear_options_from_handle(handle)
    output, kept, scales, _ = low_precision_forward(x, weight, saved_input_form(way.scaling.recipe), way)
    if block == _WHOLE:
        return output.contiguous(), x.new_empty(0), x.new_empty(0)
    assert scales is not None, "what is rounded has scales"
    return output.contiguous(), kept.contiguous(), scales.contiguous()


@_low_precision_matmul_op.register_fake
def _low_precision_matmul_fake(
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
def _low_precision_gradients_op(
    gradient: Tensor, weight: Tensor, kept: Tensor, scales: Tensor | None, handle: Tensor
) -> tuple[Tensor, Tensor]:
    """Operation for graphs: return the gradients of x, [..., in], and of the weight, [out, in].

    kept, scales: from `_low_precision_matmul_op`, or x and None.
    """
    own, of_weight = low_precision_backward(gradient, weight, kept, scales, _linear_options_from_handle(handle))
    return own.reshape(*gradient.shape[:-1], own.shape[-1]).contiguous(), of_weight.contiguous()


@_low_precision_gradients_op.register_fake
def _low_precision_gradients_fake(
    gradient: Tensor, weight: Tensor, kept: Tensor, scales: Tensor | None, handle: Tensor
) -> tuple[Tensor, Tensor]:
    return gradient.new_empty((*gradient.shape[:-1], weight.shape[1])), gradient.new_empty(weight.shape)


def _save_low_precision_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save for the backward pass the weight, the handle, and x or its rounded values and scales."""
    x, weight, handle, block, *_ = inputs
    _, kept, scales = output
    ctx.mark_non_differentiable(kept, scales)
    if block == _WHOLE:
        ctx.save_for_backward(weight, handle, x)
    else:
        ctx.save_for_backward(weight, handle, kept, scales)


def _low_precision_backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, handle, kept, *scales = ctx.saved_tensors
    own, of_weight = _low_precision_gradients_op(gradient, weight, kept, scales[0] if scales else None, handle)
    learns = ctx.needs_input_grad
    return own if learns[0] else None, of_weight if learns[1] else None, None, None, None, None


_low_precision_matmul_op.register_autograd(_low_precision_backward, setup_context=_save_low_precision_inputs)


def low_precision_op_arguments(
    scaling: LowPrecisionScaling, dtype: torch.dtype
) -> tuple[Tensor, int, torch.dtype, torch.dtype]:
    """Return the op's arguments after the matrices: handle [], block size, dtypes of rounded values and scales.

    dtype: of the matrices.
    """
    recipe = scaling.recipe
    assert scaling.handle is not None, "a layer is given a handle before it is compiled"
    block = _WHOLE if saved_input_form(recipe) == "whole" else recipe.block
    scale_dtype = recipe.block_scale_dtype if recipe.block else accumulation_dtype_of(dtype)
    return scaling.handle, block, recipe.forward.dtype, scale_dtype


def compiled_low_precision_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scaling: LowPrecisionScaling
) -> Tensor:
    """Return x W^T + b, [.., out], in 8 or 4 bits, in a compiled graph; no communication. Differentiable.

    x: [.., in]; weight: [out, in]; bias: [out].
    """
    output, _, _ = _low_precision_matmul_op(x, weight, *low_precision_op_arguments(scaling, x.dtype))
    return output if bias is None else output + bias
