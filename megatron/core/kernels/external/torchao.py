"""fp8 linear layers by torchao, where it is installed.

It computes scales from the tensors that it gets. So it fits where a rank has everything that shares a scale, and scales need no history: tensorwise scaling of
layers that are not sharded. Its products are torch's own, as ours are (fp8_native.py).
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.low_precision.fp8 import NumberFormat
from megatron.core.kernels.ops.requirements import KernelRequirements, first_reason


def torchao_fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, backward: NumberFormat, *, emulated: bool
) -> Tensor:
    """Return x W^T + b, [.., out], by torchao: the operands of this product and of both products of the backward pass
    are quantized to fp8 with one scale for each tensor.

    x: [.., in]; weight: [out, in]; bias: [out] or None. backward: number format of gradients. emulated: multiply in the
    dtype of x, as on a CPU.
    """
    layer = _weightless_float8_linear(backward.dtype, emulated)
    product = import_module("torchao.float8.float8_linear").matmul_with_hp_or_float8_args
    output = product.apply(x, weight.t(), layer.linear_mm_config, layer.config)
    return output if bias is None else output + bias


@lru_cache(maxsize=4)
def _weightless_float8_linear(backward: torch.dtype, emulated: bool) -> Any:
    """Return torchao's Float8Linear without weights, whose settings are used to multiply given weights. backward: dtype
    of gradients.
    """
    names, library = import_module("torchao.float8.config"), import_module("torchao.float8.float8_linear")
    slow = names.Float8GemmConfig(use_fast_accum=False)
    config = names.Float8LinearConfig(
        cast_config_input=names.CastConfig(target_dtype=torch.float8_e4m3fn),
        cast_config_weight=names.CastConfig(target_dtype=torch.float8_e4m3fn),
        cast_config_grad_output=names.CastConfig(target_dtype=backward),
        gemm_config_output=slow,
        gemm_config_grad_input=slow,
        gemm_config_grad_weight=slow,
        pad_inner_dim=True,
        emulate=emulated,
    )
    return library.Float8Linear(16, 16, bias=False, device="meta", config=config)


def torchao_unsupported_reason(need: KernelRequirements) -> str:
    """Return why torchao cannot compute the linear layers of a run; "" if it can."""
    return first_reason(
        {
            "nothing is multiplied in 8 bits; give --fp8-format": not need.low.recipe_name,
            f"of the recipes it has tensorwise, not {need.low.recipe_name}": need.low.recipe_name != "tensorwise",
            "its scales are of what one rank sees, and others see the rest; leave out --tensor-model-parallel-size and "
            "--context-parallel-size": not need.alone,
            "weights are kept rounded; leave out --fp8-param-gather": need.low.has_quantized_weights,
            "gradients of weights are products of 8 bits there; leave out --no-fp8-wgrad": not need.low.fp8_wgrad,
            "gradients of weights wait; choose --pipeline-schedule 1f1b or gpipe, without --delay-wgrad-compute": need.delays_wgrad,
            "the package torchao is not installed; pip install torchao": find_spec("torchao") is None,
        }
    )
