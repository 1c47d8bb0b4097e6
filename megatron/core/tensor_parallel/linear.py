"""Linear layers cut over the tensor ranks (Shoeybi et al., 2019).

    x -> ColumnLinear -> [.., out/tp] -> ... -> RowLinear -> x

A column layer cuts its output and opens the region; a row layer cuts its input and closes it. The gradient that a
column layer sends back is on its way while the gradient of its weight is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import Cut, Initial, ParamSpec, Part, constant, parameter
from megatron.core.tensor_parallel.region import Region


class _EnterLinear(Function):
    """Enter the region, multiply; backward overlaps the input gradient's collective with the weight gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
        context.save_for_backward(x, weight)
        context.region, context.has_bias = region, bias is not None
        whole = collectives.all_gather(x, region.axis) if region.sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = context.saved_tensors
        region, axis = context.region, context.region.axis
        gathering, whole = None, x
        if region.sequence_parallel:  # the gathered input is not kept: it is fetched again behind the first matmul
            whole = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
            gathering = collectives.start_all_gather(whole, x.contiguous(), axis)
        input_gradient = gradient.matmul(weight)
        collectives.wait(gathering)
        if region.sequence_parallel:
            own = torch.empty_like(x)
            sending = collectives.start_reduce_scatter(own, input_gradient, axis)
        else:
            own, sending = input_gradient, collectives.start_all_reduce(input_gradient, axis)
        flat = gradient.reshape(-1, gradient.shape[-1])
        weight_gradient = flat.t().matmul(whole.reshape(-1, whole.shape[-1]))
        bias_gradient = flat.sum(0) if context.has_bias else None
        collectives.wait(sending)
        return own, weight_gradient, bias_gradient, None


def enter_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
    """x W^T + b with W cut by rows. x: [s or s/tp, b, h]; weight: [out/tp, h]. Returns [s, b, out/tp]."""
    if region.axis.size == 1:
        return F.linear(x, weight, bias)
    return _EnterLinear.apply(x, weight, bias, region)


class ColumnLinear(nn.Module):
    """A linear layer whose output is cut. parts: the segments of its output, each cut by itself."""

    def __init__(self, input_size: int, parts: tuple[Part, ...], *, bias: bool, init: Initial, region: Region,
                 mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.region = region
        output_size = sum(part.size for part in parts)
        cuts = (Cut(0, "tp", parts),)
        self.weight = parameter(ParamSpec((output_size, input_size), init, "matrix", cuts), mesh, dtype)
        self.bias = parameter(ParamSpec((output_size,), constant(0.0), "vector", cuts), mesh, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [s, b, h] (or [s/tp, b, h] with sequence parallelism). Returns [s, b, out/tp]."""
        return enter_linear(x, self.weight, self.bias, self.region)


class Linear(nn.Module):
    """A linear layer that is whole on every rank. sum_over: axes whose ranks each see a share of the positions."""

    def __init__(self, input_size: int, output_size: int, *, init: Initial, mesh: Mesh, dtype: torch.dtype,
                 sum_over: tuple[str, ...] = (), bias: bool = True) -> None:
        super().__init__()
        self.weight = parameter(ParamSpec((output_size, input_size), init, "matrix", sum_over=sum_over), mesh, dtype)
        spec = ParamSpec((output_size,), constant(0.0), "vector", sum_over=sum_over)
        self.bias = parameter(spec, mesh, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer whose input is cut. Its bias is added once, after the sum."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool, init: Initial, region: Region,
                 mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.region = region
        cuts = (Cut(1, "tp", (Part(input_size),)),)
        self.weight = parameter(ParamSpec((output_size, input_size), init, "matrix", cuts), mesh, dtype)
        spec = ParamSpec((output_size,), constant(0.0), "vector", sum_over=region.outside_sums)
        self.bias = parameter(spec, mesh, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [s, b, in/tp]. Returns [s, b, h] (or [s/tp, b, h] with sequence parallelism)."""
        if self.region.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        total = self.region.exit(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias
