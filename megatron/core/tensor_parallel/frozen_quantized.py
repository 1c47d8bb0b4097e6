"""Products with frozen weights that are stored quantized: a weight is dequantized for each product, and again backward.

What stores the values is beside the core (adapters/quantized_base.py); here it is a `QuantizedStorage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.parallel.spec import quantized_storage_of


def dense_weight(weight: Tensor) -> Tensor:
    """Return a weight as it is multiplied (any shape): itself, or dequantized if it is stored quantized."""
    quantized = quantized_storage_of(weight)
    return weight if quantized is None else quantized.dequantized()


class _FrozenQuantizedProduct(Function):
    """Autograd function: product(x, W), with W dequantized in forward and again in backward; no weight gradient.

    product: x W^T, of each row's expert if there are several; the gradient of x is the same product with W transposed.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: nn.Parameter, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        context.weight, context.product = weight, product
        return product(x, dense_weight(weight))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.product(gradient, dense_weight(context.weight).transpose(-2, -1)), None, None


def frozen_quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [.., in] W^T + b, [.., out], W [out, in] quantized; saves neither x nor the dequantized W."""
    product = _FrozenQuantizedProduct.apply(x, weight, F.linear)
    return product if bias is None else product + bias


def frozen_quantized_grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    """Return x W^T of each row's expert, [n, out], with quantized experts. kernel: as `reference.grouped_linear`.

    x: [n, in], sorted by expert; weight: [e, out, in]; counts: [e].
    """
    return _FrozenQuantizedProduct.apply(x, weight, lambda x, matrices: kernel(x, matrices, counts, None))
