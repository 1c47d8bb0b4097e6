"""Linear layers cut over the tensor ranks (Shoeybi et al., 2019).

    x -> ColumnLinear -> [.., out/tp] -> ... -> RowLinear -> x

A column layer cuts its output and opens the region; a row layer cuts its input and closes it. The gradient that a
column layer sends back is on its way while the gradient of its weight is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.parallel import collectives
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import (
    FusedSegment,
    Initial,
    Kind,
    ParamSpec,
    Shard,
    constant_initializer,
    meta_parameter,
    quantized_of,
)
from megatron.core.tensor_parallel import graph_linear, graph_low_linear
from megatron.core.tensor_parallel.adapter import LinearAdapter
from megatron.core.tensor_parallel.low_precision import LowLinearOptions, low_linear, scaling_of
from megatron.core.tensor_parallel.overlapped_matmul import all_gather_matmul, matmul_reduce_scatter
from megatron.core.tensor_parallel.quantized import dense, frozen_linear
from megatron.core.tensor_parallel.region import Region


def _weight_gradients(x: Tensor, gradient: Tensor, *, bias: bool, into: MainGrad | None) -> tuple[Tensor | None, ...]:
    """Of y = x W^T + b: dW, and db if there is one. x: [..., in]; gradient: [..., out]. into: where dW is added, and then None for it."""
    flat, x, weight_gradient = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1]), None
    if into is None:
        weight_gradient = flat.t().matmul(x)
    else:
        into.add_product(flat.t(), x)
    return (weight_gradient, flat.sum(0)) if bias else (weight_gradient,)


class _ColumnParallelLinear(Function):
    """Enter the region, multiply; backward overlaps the input gradient's collective with the weight gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
        context.save_for_backward(x, weight)
        context.region, context.into = region, region.main_grad_of(weight)
        context.bias = bias if bias is not None and bias.requires_grad else None
        matrix = dense(weight)
        if region.overlapped.gathers:
            return all_gather_matmul(x, matrix.t(), bias, region.axis)[0]
        whole = collectives.all_gather(x, region.axis) if region.sequence_parallel else x
        return F.linear(whole, matrix, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = context.saved_tensors
        region, axis, bias = context.region, context.region.axis, context.bias
        learns = context.needs_input_grad[1] or bias is not None  # a frozen weight needs no gradient
        later = region.wgrad_store is not None and region.wgrad_store.is_delaying and context.needs_input_grad[1]
        gathering, whole = None, x
        if (
            region.sequence_parallel and learns and not later
        ):  # the gathered input is not kept: it is fetched again behind the first matmul
            whole, gathering = _start_gather(x, region)
        matrix = dense(weight)
        if region.overlapped.gradients:
            own, sending = matmul_reduce_scatter(gradient, matrix, axis), None
            collectives.wait(gathering)
        elif region.sequence_parallel:
            input_gradient = gradient.matmul(matrix)
            collectives.wait(gathering)
            own = torch.empty_like(x)
            sending = collectives.start_reduce_scatter(own, input_gradient, axis)
        else:
            own = gradient.matmul(matrix)
            sending = collectives.start_all_reduce(own, axis)
        gradients: tuple[Tensor | None, ...] = (None,)
        if later:
            region.wgrad_store.put(
                [weight] if bias is None else [weight, bias],
                partial(_delayed_weight_gradients, x, gradient, region, bias is not None, context.into),
                context.into,
            )
        elif learns:
            gradients = _weight_gradients(whole, gradient, bias=bias is not None, into=context.into)
        collectives.wait_with_overlap(sending, axis)
        return own, gradients[0], gradients[1] if len(gradients) > 1 else None, None


def _start_gather(x: Tensor, region: Region) -> tuple[Tensor, collectives.Work]:
    """Begin to fetch all positions of a layer's input."""
    whole = x.new_empty((x.shape[0] * region.axis.size, *x.shape[1:]))
    return whole, collectives.start_all_gather(whole, x.contiguous(), region.axis)


def _delayed_weight_gradients(
    x: Tensor, gradient: Tensor, region: Region, bias: bool, into: MainGrad | None
) -> tuple[Tensor | None, ...]:
    """The weight's and bias's gradients of a layer that enters a region."""
    if region.sequence_parallel:
        x, gathering = _start_gather(x, region)
        collectives.wait(gathering)
    return _weight_gradients(x, gradient, bias=bias, into=into)


class _RowParallelLinear(Function):
    """Multiply, and leave the region where a sequence is cut: the sum travels beside the products, and so do gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, region: Region) -> Tensor:
        context.save_for_backward(x, weight)
        context.region, context.into = region, region.main_grad_of(weight)
        matrix = dense(weight)
        if region.overlapped.sums:
            return matmul_reduce_scatter(x, matrix.t(), region.axis)
        return collectives.reduce_scatter(x.matmul(matrix.t()), region.axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = context.saved_tensors
        region, matrix = context.region, dense(weight)
        if region.overlapped.gathers:
            own, whole = all_gather_matmul(gradient, matrix, None, region.axis)
        else:
            whole = collectives.all_gather(gradient, region.axis)
            own = whole.matmul(matrix)
        if region.wgrad_store is not None and region.wgrad_store.is_delaying and context.needs_input_grad[1]:
            region.wgrad_store.put(
                [weight], partial(_weight_gradients, x, whole, bias=False, into=context.into), context.into
            )
            return own, None, None
        gradients = (
            _weight_gradients(x, whole, bias=False, into=context.into) if context.needs_input_grad[1] else (None,)
        )
        return own, gradients[0], None


class _LocalLinear(Function):
    """x W^T + b, whose weight gradient may wait, and is added to what others have said by the matmul that makes it."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
        context.save_for_backward(x, weight)
        context.region, context.into = region, region.main_grad_of(weight)
        context.bias = bias if bias is not None and bias.requires_grad else None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        wgrad_store, bias = context.region.wgrad_store, context.bias
        gradients: tuple[Tensor | None, ...] = (None,)
        own = gradient.matmul(weight) if context.needs_input_grad[0] else None
        if wgrad_store is not None and wgrad_store.is_delaying and context.needs_input_grad[1]:
            compute = partial(_weight_gradients, x, gradient, bias=bias is not None, into=context.into)
            wgrad_store.put([weight] if bias is None else [weight, bias], compute, context.into)
        elif context.needs_input_grad[1] or bias is not None:
            gradients = _weight_gradients(x, gradient, bias=bias is not None, into=context.into)
        return own, gradients[0], gradients[1] if len(gradients) > 1 else None, None


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
    """x W^T + b with W cut by rows. x: [s or s/tp, b, h]; weight: [out/tp, h]. Returns [s, b, out/tp]."""
    if region.axis.size == 1:
        return local_linear(x, weight, bias, region)
    return _ColumnParallelLinear.apply(x, weight, bias, region)


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region) -> Tensor:
    """x W^T + b, inside a region. x: [..., in]; weight: [out, in]."""
    if quantized_of(weight) is not None:
        return frozen_linear(x, weight, bias)
    into = region.main_grad_of(weight)
    if region.wgrad_store is None and into is None:
        return F.linear(x, weight, bias)
    if into is not None and torch.compiler.is_compiling():
        return graph_linear.linear(x, weight, bias, into)
    return _LocalLinear.apply(x, weight, bias, region)


class AdaptedLinear(nn.Module):
    """What linear layers have in common: a weight, perhaps a bias, and perhaps an adapter beside them."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.adapter: LinearAdapter | None = None

    def apply_with_adapter(
        self, x: Tensor, bias: Tensor | None, multiply: Callable[[Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        """Return multiply(x, bias) plus the adapter's product. With DoRA the bias is added after the rows are rescaled.

        x: [..., in]; bias: [out/tp] or [out]. Returns [..., out/tp] or [..., out], in the state of the base layer's
        result.
        """
        if self.adapter is None or not self.adapter.enabled:
            return multiply(x, bias)
        if not self.adapter.has_magnitudes:
            return self.adapter(x, multiply(x, bias), self.weight)
        result = self.adapter(x, multiply(x, None), dense(self.weight))
        return result if bias is None else result + bias

    def merged_weight(self) -> Tensor:
        """The matrix of the layer and its adapter together, [out, in], the shard of this rank. For decoding: without gradients."""
        adapter, weight = self.adapter, dense(self.weight)
        return adapter.merged_weight(weight) if adapter is not None and adapter.enabled else weight

    def initialize_from_other_parameters(self) -> None:
        """The lengths of rows begin as those of the weight."""
        if self.adapter is not None and self.adapter.has_magnitudes:
            self.adapter.reset_magnitudes(dense(self.weight))


class ColumnLinear(AdaptedLinear):
    """A linear layer whose output is cut. parts: the segments of its output, each cut by itself."""

    def __init__(
        self,
        input_size: int,
        parts: tuple[FusedSegment, ...],
        *,
        bias: bool,
        init: Initial,
        region: Region,
        mesh: Mesh,
        dtype: torch.dtype,
        kind: Kind = "matrix",
    ) -> None:
        super().__init__()
        self.region = region
        output_size = sum(part.size for part in parts)
        shards = (Shard(0, "tp", parts),)
        self.weight = meta_parameter(ParamSpec((output_size, input_size), init, kind, shards), mesh, dtype)
        self.bias = (
            meta_parameter(ParamSpec((output_size,), constant_initializer(0.0), "vector", shards), mesh, dtype)
            if bias
            else None
        )
        self.scaling = scaling_of(region.low, mesh)

    def forward(self, x: Tensor, skip_bias_add: bool = False, *, skip_bias_gradient: bool = False) -> Tensor:
        """x: [s, b, h] (or [s/tp, b, h] with sequence parallelism). Returns [s, b, out/tp].

        skip_bias_add: the caller adds the bias; skip_bias_gradient: it is added here, and the caller computes its gradient.
        """
        bias = None if skip_bias_add else self.bias
        return self.apply_with_adapter(
            x, bias.detach() if bias is not None and skip_bias_gradient else bias, self._multiply
        )

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.scaling is not None:
            if torch.compiler.is_compiling():
                return graph_low_linear.multiply(x, self.weight, bias, self.scaling)
            way = LowLinearOptions(
                self.scaling, self.region.axis, self.region.sequence_parallel, self.region.wgrad_store
            )
            return low_linear(x, self.weight, bias, way)
        return column_parallel_linear(x, self.weight, bias, self.region)


class Linear(AdaptedLinear):
    """A linear layer that is whole on every rank. sum_over: axes whose ranks each see a share of the positions."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        init: Initial,
        mesh: Mesh,
        dtype: torch.dtype,
        sum_over: tuple[str, ...] = (),
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = meta_parameter(
            ParamSpec((output_size, input_size), init, "matrix", sum_over=sum_over), mesh, dtype
        )
        spec = ParamSpec((output_size,), constant_initializer(0.0), "vector", sum_over=sum_over)
        self.bias = meta_parameter(spec, mesh, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        return self.apply_with_adapter(x, self.bias, self._multiply)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        frozen = quantized_of(self.weight) is not None
        return (frozen_linear if frozen else F.linear)(x, self.weight, bias)


class RowLinear(AdaptedLinear):
    """A linear layer whose input is cut. Its bias is added once, after the sum."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        init: Initial,
        region: Region,
        mesh: Mesh,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.region = region
        shards = (Shard(1, "tp", (FusedSegment(input_size),)),)
        self.weight = meta_parameter(ParamSpec((output_size, input_size), init, "matrix", shards), mesh, dtype)
        spec = ParamSpec((output_size,), constant_initializer(0.0), "vector", sum_over=region.gradient_sum_axes)
        self.bias = meta_parameter(spec, mesh, dtype) if bias else None
        self.scaling = scaling_of(region.low, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x: [s, b, in/tp]. Returns [s, b, h] (or [s/tp, b, h] with sequence parallelism)."""
        return self.apply_with_adapter(x, self.bias, self._reduce_with_bias)

    def _reduce_with_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.region.axis.size == 1:
            return self._multiply(x, bias)
        overlapped = self.region.overlapped
        total = (
            _RowParallelLinear.apply(x, self.weight, self.region)
            if overlapped.gathers or overlapped.sums
            else self.region.reduce_from_region(self._multiply(x, None))
        )
        return total if bias is None else total + bias

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.scaling is not None:
            if torch.compiler.is_compiling():
                return graph_low_linear.multiply(x, self.weight, bias, self.scaling)
            return low_linear(x, self.weight, bias, LowLinearOptions(self.scaling, wgrad_store=self.region.wgrad_store))
        return local_linear(x, self.weight, bias, self.region)
