"""The operands of a layer's low-precision matmuls."""

from __future__ import annotations

from torch import Tensor

from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import QuantizedMatrix
from megatron.core.kernels.low_precision.recipes import LowPrecisionRecipe, Operand


def operands(
    recipe: LowPrecisionRecipe, x: Tensor, weight: Tensor, gradient: Tensor
) -> dict[str, tuple[QuantizedMatrix, QuantizedMatrix]]:
    """Those of the three products of a linear layer. x: [tokens, in]; weight: [out, in]; gradient: [tokens, out]."""

    def rounded(operand: Operand, matrix: Tensor) -> QuantizedMatrix:
        return recipe.quantise(operand, matrix, fp8.tensor_amax(matrix))

    turned = (
        rounded("weight", weight).t() if recipe.transpose_reuses_quantized("weight") else rounded("weight", weight.t())
    )
    return {
        "output": (rounded("input", x), rounded("weight", weight)),
        "input's gradient": (rounded("gradient", gradient), turned),
        "weight's gradient": (rounded("gradient", gradient.t()), rounded("input", x.t())),
    }
