"""Linear layers cut over the tensor ranks (Shoeybi et al., 2019).

    x -> ColumnParallelLinear -> [.., out/tp] -> ... -> RowParallelLinear -> x

A column layer cuts its output and opens the region; a row layer cuts its input and closes it. The gradient that a
column layer sends back is on its way while the gradient of its weight is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.parallel import collectives
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    Initial,
    Kind,
    ParamSpec,
    ShardedDim,
    constant_initializer,
    meta_parameter,
    quantized_storage_of,
)
from megatron.core.tensor_parallel import compiled_linear, compiled_low_precision
from megatron.core.tensor_parallel.frozen_quantized import dense_weight, frozen_quantized_linear
from megatron.core.tensor_parallel.low_precision import LowPrecisionLinearOptions, low_precision_linear, make_tp_scaling
from megatron.core.tensor_parallel.overlapped_matmul import all_gather_matmul, matmul_reduce_scatter
from megatron.core.tensor_parallel.region import TensorParallelRegion


def _weight_and_bias_gradients(
    x: Tensor, gradient: Tensor, *, bias: bool, into: MainGrad | None
) -> tuple[Tensor | None, ...]:
    """Return dW (None if added `into` the main gradient) and with `bias` db. x: [..., in]; gradient: [..., out]."""
    flat, x, weight_gradient = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1]), None
    if into is None:
        weight_gradient = flat.t().matmul(x)
    else:
        into.add_product(flat.t(), x)
    return (weight_gradient, flat.sum(0)) if bias else (weight_gradient,)


class _ParallelLinear(Function):
    """Autograd function of a column-parallel layer, or over one rank of any: all-gather x under sequence parallelism,
    multiply; backward overlaps the input gradient's collective with the weight gradient, which may be delayed.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorParallelRegion) -> Tensor:
        context.save_for_backward(x, weight)
        context.region, context.into = region, region.main_grad_of(weight)
        context.bias = bias if bias is not None and bias.requires_grad else None
        matrix = dense_weight(weight)
        if region.overlapped.gathers:
            return all_gather_matmul(x, matrix.t(), bias, region.axis)[0]
        whole = collectives.all_gather(x, region.axis) if region.sequence_parallel else x
        return F.linear(whole, matrix, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        region, axis, bias = context.region, context.region.axis, context.bias
        learns = context.needs_input_grad[1] or bias is not None  # a frozen weight needs no gradient
        later = region.wgrad_store is not None and region.wgrad_store.is_delaying and context.needs_input_grad[1]
        own, sending, gathering, whole = None, None, None, x
        # the gathered input is not kept: it is fetched again behind the first matmul
        if region.sequence_parallel and learns and not later:
            whole, gathering = _start_input_gather(x, region)
        if region.overlapped.gradients:
            own = matmul_reduce_scatter(gradient, dense_weight(weight), axis)
            collectives.wait(gathering)
        elif region.sequence_parallel:
            input_gradient = gradient.matmul(dense_weight(weight))
            collectives.wait(gathering)
            own = torch.empty_like(x)
            sending = collectives.start_reduce_scatter(own, input_gradient, axis)
        elif context.needs_input_grad[0]:
            own = gradient.matmul(dense_weight(weight))
            sending = collectives.start_all_reduce(own, axis)
        gradients: tuple[Tensor | None, ...] = (None,)
        if later:
            region.wgrad_store.put(
                [weight] if bias is None else [weight, bias],
                partial(_gather_then_weight_gradients, x, gradient, region, bias is not None, context.into),
                context.into,
            )
        elif learns:
            gradients = _weight_and_bias_gradients(whole, gradient, bias=bias is not None, into=context.into)
        if sending is not None:
            collectives.wait_with_overlap(sending, axis)
        return own, gradients[0], gradients[1] if len(gradients) > 1 else None, None


def _start_input_gather(x: Tensor, region: TensorParallelRegion) -> tuple[Tensor, collectives.Work]:
    """Start to all-gather a layer's input along the sequence; return the tensor that will hold it and what to wait for."""
    whole = x.new_empty((x.shape[0] * region.axis.size, *x.shape[1:]))
    return whole, collectives.start_all_gather(whole, x.contiguous(), region.axis)


def _gather_then_weight_gradients(
    x: Tensor, gradient: Tensor, region: TensorParallelRegion, bias: bool, into: MainGrad | None
) -> tuple[Tensor | None, ...]:
    """Return a column layer's delayed weight (and bias) gradients; gathers x under sequence parallelism."""
    if region.sequence_parallel:
        x, gathering = _start_input_gather(x, region)
        collectives.wait(gathering)
    return _weight_and_bias_gradients(x, gradient, bias=bias, into=into)


class _RowParallelLinear(Function):
    """Autograd function of a row-parallel layer under sequence parallelism: matmul and reduce-scatter."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, region: TensorParallelRegion) -> Tensor:
        context.save_for_backward(x, weight)
        context.region, context.into = region, region.main_grad_of(weight)
        matrix = dense_weight(weight)
        if region.overlapped.sums:
            return matmul_reduce_scatter(x, matrix.t(), region.axis)
        return collectives.reduce_scatter(x.matmul(matrix.t()), region.axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = context.saved_tensors
        region, matrix = context.region, dense_weight(weight)
        if region.overlapped.gathers:
            own, whole = all_gather_matmul(gradient, matrix, None, region.axis)
        else:
            whole = collectives.all_gather(gradient, region.axis)
            own = whole.matmul(matrix)
        if not context.needs_input_grad[1]:
            return own, None, None
        compute = partial(_weight_and_bias_gradients, x, whole, bias=False, into=context.into)
        if region.wgrad_store is not None and region.wgrad_store.is_delaying:
            region.wgrad_store.put([weight], compute, context.into)
            return own, None, None
        return own, compute()[0], None


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorParallelRegion) -> Tensor:
    """Return x W^T + b, [s, b, out/tp], with the rows of W cut over the tensor ranks.

    x: [s or s/tp, b, h]; weight: [out/tp, h]; bias: [out/tp].
    """
    if region.axis.size == 1:
        return local_linear(x, weight, bias, region)
    return _ParallelLinear.apply(x, weight, bias, region)


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorParallelRegion) -> Tensor:
    """Return x W^T + b, [..., out], without communication. x: [..., in]; weight: [out, in], perhaps quantized."""
    if quantized_storage_of(weight) is not None:
        return frozen_quantized_linear(x, weight, bias)
    into = region.main_grad_of(weight)
    if region.wgrad_store is None and into is None:
        return F.linear(x, weight, bias)
    if into is not None and torch.compiler.is_compiling():
        return compiled_linear.linear_into_main_grad(x, weight, bias, into)
    return _ParallelLinear.apply(x, weight, bias, region.without_communication())


class LinearBranch(Protocol):
    """What stands beside a linear layer and changes its output: the layer's adapter, or those of several requests."""

    @property
    def enabled(self) -> bool:
        """Whether it changes anything now."""

    @property
    def has_dora_magnitudes(self) -> bool:
        """Whether it scales the rows of the layer's own product, too, and so takes that without the bias."""

    def __call__(self, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        """Return the changed output, like base. x: the layer's input, [..., in]; weight: this rank's shard, [out, in]."""

    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return this rank's shard of the weight with the branch merged in, [out, in]; without gradient."""

    def reset_dora_magnitudes(self, weight: Tensor) -> None:
        """Set magnitudes to the norms of the rows of the weight, [out, in]."""


class AdaptableLinear(nn.Module):
    """Base of linear layers: a weight, perhaps a bias, and perhaps an adapter."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: ParamSpec, bias: ParamSpec | None, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = meta_parameter(weight, mesh, dtype)
        self.bias = None if bias is None else meta_parameter(bias, mesh, dtype)
        self.adapter: LinearBranch | None = None

    def apply_with_adapter(
        self, x: Tensor, bias: Tensor | None, multiply: Callable[[Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        """Return multiply(x, bias), changed by an enabled adapter; DoRA rescales rows before the bias is added.

        x: [..., in]; bias: [out/tp] or [out]. Returns [..., out/tp] or [..., out], whole or a partial sum as `multiply`
        gives it.
        """
        if self.adapter is None or not self.adapter.enabled:
            return multiply(x, bias)
        if not self.adapter.has_dora_magnitudes:
            return self.adapter(x, multiply(x, bias), self.weight)
        result = self.adapter(x, multiply(x, None), dense_weight(self.weight))
        return result if bias is None else result + bias

    def merged_weight(self) -> Tensor:
        """Return the local weight [out, in], dequantized, with the adapter merged in; then it has no gradient."""
        adapter, weight = self.adapter, dense_weight(self.weight)
        return adapter.merged_weight(weight) if adapter is not None and adapter.enabled else weight

    def initialize_from_other_parameters(self) -> None:
        """Set the DoRA magnitudes to the row norms of the weight; `materialize` calls it."""
        if self.adapter is not None and self.adapter.has_dora_magnitudes:
            self.adapter.reset_dora_magnitudes(dense_weight(self.weight))


class ColumnParallelLinear(AdaptableLinear):
    """Linear layer whose output is cut over the tensor ranks. parts: its fused segments, each cut by itself."""

    def __init__(
        self,
        input_size: int,
        parts: tuple[FusedWeightSegment, ...],
        *,
        bias: bool,
        init: Initial,
        region: TensorParallelRegion,
        mesh: Mesh,
        dtype: torch.dtype,
        kind: Kind = "matrix",
    ) -> None:
        output_size, shards = sum(part.size for part in parts), (ShardedDim(0, "tp", parts),)
        shift = ParamSpec((output_size,), constant_initializer(0.0), "vector", shards) if bias else None
        super().__init__(ParamSpec((output_size, input_size), init, kind, shards), shift, mesh, dtype)
        self.region = region
        self.scaling = make_tp_scaling(region.low, mesh)

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
                return compiled_low_precision.compiled_low_precision_linear(x, self.weight, bias, self.scaling)
            way = LowPrecisionLinearOptions(
                self.scaling, self.region.axis, self.region.sequence_parallel, self.region.wgrad_store
            )
            return low_precision_linear(x, self.weight, bias, way)
        return column_parallel_linear(x, self.weight, bias, self.region)


class ReplicatedLinear(AdaptableLinear):
    """Linear layer that is whole on every rank. sum_over: axes that sum gradients of which a rank has a share."""

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
        weight = ParamSpec((output_size, input_size), init, "matrix", sum_over=sum_over)
        shift = ParamSpec((output_size,), constant_initializer(0.0), "vector", sum_over=sum_over) if bias else None
        super().__init__(weight, shift, mesh, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [..., out]. x: [..., in]."""
        return self.apply_with_adapter(x, self.bias, self._multiply)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        frozen = quantized_storage_of(self.weight) is not None
        return (frozen_quantized_linear if frozen else F.linear)(x, self.weight, bias)


class RowParallelLinear(AdaptableLinear):
    """Row-parallel linear layer: its input is cut over the tensor ranks; partial outputs are summed, bias added."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        init: Initial,
        region: TensorParallelRegion,
        mesh: Mesh,
        dtype: torch.dtype,
    ) -> None:
        weight = ParamSpec(
            (output_size, input_size), init, "matrix", (ShardedDim(1, "tp", (FusedWeightSegment(input_size),)),)
        )
        sum_over = region.gradient_sum_axes
        shift = ParamSpec((output_size,), constant_initializer(0.0), "vector", sum_over=sum_over) if bias else None
        super().__init__(weight, shift, mesh, dtype)
        self.region = region
        self.scaling = make_tp_scaling(region.low, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [s, b, in/tp]; return [s, b, h] (or [s/tp, b, h] with sequence parallelism)."""
        return self.apply_with_adapter(x, self.bias, self._multiply_and_reduce)

    def _multiply_and_reduce(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply, sum over the tensor ranks (all-reduce or reduce-scatter), and add the bias."""
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
                return compiled_low_precision.compiled_low_precision_linear(x, self.weight, bias, self.scaling)
            return low_precision_linear(
                x, self.weight, bias, LowPrecisionLinearOptions(self.scaling, wgrad_store=self.region.wgrad_store)
            )
        return local_linear(x, self.weight, bias, self.region)
