"""What kernels of 8 bits are compared with when they are tried on a device (`kernel_check.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.config.settings.low_precision import LowPrecisionConfig
from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import E4M3, NumberFormat, QuantizeTransposeKernels
from megatron.core.kernels.low_precision.recipes import OPERANDS, LowPrecisionRecipe, low_precision_recipe_of

_CPU = torch.device("cpu")


def quantize_kernel_error(
    low: LowPrecisionConfig, kernel: QuantizeTransposeKernels, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest error of a quantization kernel over all operands of the config's recipe and their transposes,
    for a random matrix [130, 70] in `dtype`.

    The error is the norm of the difference from the definition, over the norm of the matrix. Devices may round a few
    values differently, which makes some hundredths.
    """
    recipe = low_precision_recipe_of(low, _CPU)
    assert recipe is not None, "something is multiplied in 8 bits"
    x = torch.randn(130, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] *= 100
    return max(_quantized_operand_error(recipe, operand, kernel, x, device) for operand in OPERANDS)


def _quantized_operand_error(
    recipe: LowPrecisionRecipe, operand: Any, kernel: QuantizeTransposeKernels, x: Tensor, device: torch.device
) -> float:
    """Return the larger error of the quantized x and its quantized transpose, as of `quantize_kernel_error`; infinite
    if there is a NaN.
    """
    number, there = recipe.backward if operand == "gradient" else recipe.forward, x.to(device)
    if recipe.has_single_tensor_scale:
        rounded = kernel.quantize_per_tensor(there, number, kernel.largest_of(there), margin=recipe.margin)
    else:
        rounded = kernel.quantize_per_block(there, number, recipe.block_shape_of(operand))
    worst = 0.0
    for mine, theirs in zip(
        rounded, recipe.quantise_with_transpose(operand, x, recipe.amax_or_partial_amaxes(x)), strict=True
    ):
        assert mine is not None and theirs is not None, "both are asked for"
        expected = theirs.dequantize(torch.float64)
        gap = ((mine.dequantize(torch.float32).cpu().double() - expected).norm() / expected.norm()).item()
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


class _ReferenceFp8Linear(Function):
    """The autograd function of `reference_low_linear` without bias: x W^T and its two gradients, all with operands
    rounded to fp8 with one scale for each tensor.
    """

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
    """Quantize x [..., k] with one scale and dequantize it again: return the rounded values in the dtype of x."""
    scale = fp8.quantization_scale(fp8.tensor_amax(x).float(), number)
    return fp8.quantize_per_tensor(x.flatten(0, -2).float(), number, scale).dequantize(x.dtype).view_as(x)


def reference_low_linear(x: Tensor, weight: Tensor, bias: Tensor, backward: NumberFormat, *, emulated: bool) -> Tensor:
    """Return x W^T + b, [.., out], with the operands of the forward product and of both gradient products rounded to
    fp8; this defines the op low_linear. x: [.., in]; weight: [out, in]; bias: [out]; backward: number format of
    gradients; emulated: ignored.
    """
    del emulated
    return _ReferenceFp8Linear.apply(x, weight, backward) + bias


def call_low_linear_kernel(
    low: LowPrecisionConfig, op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Call a kernel `op` of low_linear as a run with this config does. x: [.., in]; weight: [out, in]; bias: [out];
    returns [.., out].
    """
    recipe = low_precision_recipe_of(low, x.device)
    assert recipe is not None, "something is multiplied in 8 bits"
    return op(x, weight, bias, recipe.backward, emulated=not recipe.native)
