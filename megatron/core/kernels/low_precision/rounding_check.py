"""What kernels of 8 bits are compared with when they are tried on a device (`kernel_check.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import E4M3, FusedRounding, NumberFormat
from megatron.core.kernels.low_precision.recipes import OPERANDS, Recipe, recipe_of

_CPU = torch.device("cpu")


def rounding_error(low: LowPrecisionConfig, kernel: FusedRounding, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of a matrix and its transposed, rounded by a kernel and by the definition, over all operands of a recipe.

    It is the norm of the difference over the norm of the matrix, in hundredths of which a device may round some values the other way.
    """
    recipe = recipe_of(low, _CPU)
    assert recipe is not None, "something is multiplied in 8 bits"
    x = torch.randn(130, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] *= 100
    return max(_operand_error(recipe, operand, kernel, x, device) for operand in OPERANDS)


def _operand_error(recipe: Recipe, operand: Any, kernel: FusedRounding, x: Tensor, device: torch.device) -> float:
    number, there = recipe.backward if operand == "gradient" else recipe.forward, x.to(device)
    if recipe.one_scale:
        rounded = kernel.quantize_per_tensor(there, number, kernel.largest_of(there), margin=recipe.margin)
    else:
        rounded = kernel.quantize_per_block(there, number, recipe.block_of(operand))
    worst = 0.0
    for mine, theirs in zip(rounded, recipe.quantise_with_transpose(operand, x, recipe.largest_of(x)), strict=True):
        assert mine is not None and theirs is not None, "both are asked for"
        expected = theirs.dequantize(torch.float64)
        gap = ((mine.dequantize(torch.float32).cpu().double() - expected).norm() / expected.norm()).item()
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


class _LowPrecisionLinear(Function):
    """A linear layer and its gradients, each product of operands with one scale a tensor."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, backward: NumberFormat) -> Tensor:
        context.save_for_backward(x, weight)
        context.number = backward
        return _fake_quantize(x, E4M3) @ _fake_quantize(weight, E4M3).t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = context.saved_tensors
        pull = _fake_quantize(gradient, context.number)
        return (
            pull @ _fake_quantize(weight, E4M3),
            pull.flatten(0, -2).t() @ _fake_quantize(x, E4M3).flatten(0, -2),
            None,
        )


def _fake_quantize(x: Tensor, number: NumberFormat) -> Tensor:
    """The values of x [..., k] that 8 bits hold."""
    scale = fp8.tensor_scale(fp8.largest_of(x).float(), number)
    return fp8.quantize_per_tensor(x.flatten(0, -2).float(), number, scale).dequantize(x.dtype).view_as(x)


def reference_low_linear(x: Tensor, weight: Tensor, bias: Tensor, backward: NumberFormat, *, emulated: bool) -> Tensor:
    """Return what the op low_linear is defined to be: x W^T + b, [.., out], by the three products of a layer in 8 bits. x: [.., in]; weight: [out, in]."""
    del emulated
    return _LowPrecisionLinear.apply(x, weight, backward) + bias


def linear_in_8_bits(
    low: LowPrecisionConfig, op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Call the op low_linear as a run with these settings does. x: [.., in]; weight: [out, in]; bias: [out]; returns [.., out]."""
    recipe = recipe_of(low, x.device)
    assert recipe is not None, "something is multiplied in 8 bits"
    return op(x, weight, bias, recipe.backward, emulated=not recipe.native)
