"""Mixture of experts: an MLP of many parts, of which each token uses a few (Shazeer et al., 2017).

    x -> norm -> own tokens -> router -> dispatch ~~> experts ~~> combine -> whole -> + -> output
           |                                                                         ^
           +--> shared experts, which every token uses ------------------------------+

A rank holds e/ep experts, and of each a piece of width f/etp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.kernels.ops import grouped, reference
from megatron.core.kernels.ops.grouped import weighted_bias_of_expert_rows
from megatron.core.parallel.recompute import apply_recomputing_input, recomputable, recompute
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    Initial,
    ParamSpec,
    ShardedDim,
    constant_initializer,
    meta_parameter,
    quantized_storage_of,
)
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.frozen_quantized import frozen_quantized_grouped_linear
from megatron.core.tensor_parallel.low_precision import LowPrecisionScaling, low_precision_grouped_linear
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.dispatch import ExpertInputs, make_token_dispatcher
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.router import TopKRouter


class _DelayedWgradGroupedLinear(Function):
    """Autograd function of the grouped matmul `kernel`; a `WeightGradStore` may take its weight gradient."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        kernel: Callable[..., Tensor],
        wgrad_store: WeightGradStore,
    ) -> Tensor:
        context.save_for_backward(x, weight, counts)
        context.kernel, context.wgrad_store = kernel, wgrad_store
        return kernel(x, weight, counts)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, counts = context.saved_tensors
        own = context.kernel(gradient, weight.transpose(1, 2), counts)
        compute = partial(grouped.grouped_weight_gradients, x, gradient, counts)  # [e, out, in]
        if context.wgrad_store.is_delaying and context.needs_input_grad[1]:
            context.wgrad_store.put([weight], lambda: (compute(),))
            return own, None, None, None, None
        return own, compute(), None, None, None


class ExpertBranch(Protocol):
    """What stands beside a linear layer of experts, and adds to its output while it is enabled: its adapter."""

    enabled: bool

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return what is added, [n, out]. x: [n, in], sorted by expert; counts: [e], rows of each expert."""


class GroupedLinear(nn.Module):
    """One linear layer of all experts of this rank. cut: 1 if etp ranks share each output, 2 if they share each input.

    An input that is cut gives partial sums, to be added up over etp; the bias is in the first rank's.
    """

    def __init__(
        self, build: LayerBuildContext, sizes: tuple[int, tuple[FusedWeightSegment, ...]], *, cut: int, init: Initial
    ) -> None:
        """sizes: of the whole dimension that is not cut, and the parts of the one that is."""
        super().__init__()
        experts, width = build.model.moe.num_experts_or_zero, sum(part.size for part in sizes[1])
        outputs, inputs = (width, sizes[0]) if cut == 1 else (sizes[0], width)
        by_expert, by_width = ShardedDim(0, "ep", (FusedWeightSegment(experts),)), ShardedDim(cut, "etp", sizes[1])
        self.grouped_linear, self.wgrad_store = build.kernels.grouped_linear, build.wgrad_store
        self.scaling = (
            None if build.low is None else LowPrecisionScaling(build.low, shared=build.mesh.etp, cut=build.mesh.etp)
        )
        if self.scaling is not None:
            self.grouped_linear = partial(low_precision_grouped_linear, scaling=self.scaling)
        self.bias_share = 1.0 if cut == 1 else float(build.mesh.etp.is_first)
        self.weight = meta_parameter(
            ParamSpec(
                (experts, outputs, inputs), init, "matrix", (by_expert, by_width), reduce_over="edp", stacked=True
            ),
            build.mesh,
            build.dtype,
        )
        spec = ParamSpec(
            (experts, outputs),
            constant_initializer(0.0),
            "vector",
            (by_expert, by_width) if cut == 1 else (by_expert,),
            sum_over=() if cut == 1 else ("etp",),
            reduce_over="edp",
            stacked=True,
        )
        self.bias = meta_parameter(spec, build.mesh, build.dtype) if build.model.add_bias_linear else None
        self.adapter: ExpertBranch | None = None

    def forward(
        self, x: Tensor, counts: Tensor, weights: Tensor | None = None, *, skip_bias_add: bool = False
    ) -> Tensor:
        """Multiply each row by its expert's matrix.

        x: [n, in], sorted by expert; counts: [e], rows of each expert. weights: [n], routing weight that each row's
        bias is multiplied by; None: 1. skip_bias_add: the caller adds the bias. Returns [n, out].
        """
        if skip_bias_add:
            return self._product_with_adapter(x, counts)
        if self.bias is None or weights is None:
            return reference.add_bias_of_expert_rows(self._product_with_adapter(x, counts), self.bias, counts)
        bias = weighted_bias_of_expert_rows(weights * self.bias_share, self.bias, counts)
        return self._product_with_adapter(x, counts) + bias.to(x.dtype)

    def _product_with_adapter(self, x: Tensor, counts: Tensor) -> Tensor:
        product = self._grouped_product(x, counts)
        return product + self.adapter(x, counts) if self.adapter is not None and self.adapter.enabled else product

    def _grouped_product(self, x: Tensor, counts: Tensor) -> Tensor:
        if quantized_storage_of(self.weight) is not None:
            return frozen_quantized_grouped_linear(x, self.weight, counts, self.grouped_linear)
        if self.wgrad_store is None or self.scaling is not None:
            return self.grouped_linear(x, self.weight, counts, None)
        return _DelayedWgradGroupedLinear.apply(x, self.weight, counts, self.grouped_linear, self.wgrad_store)


class GroupedMLP(nn.Module):
    """Experts as grouped matmuls: routing weight * linear_fc2(activation(linear_fc1(x))); gated: fc1 is [gate | up]."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        model, part = build.model, FusedWeightSegment(build.model.moe.expert_width)
        self.build = build
        self.linear_fc1 = GroupedLinear(
            build,
            (model.hidden_size, (part, part) if model.has_gated_mlp else (part,)),
            cut=1,
            init=build.init_method(),
        )
        self.linear_fc2 = GroupedLinear(build, (model.hidden_size, (part,)), cut=2, init=build.output_init_method())

    def forward(self, rows: ExpertInputs) -> Tensor:
        """Return the weighted output of each row's expert, [n, h]: a partial sum over etp."""
        skips = self.build.adds_bias_in_activation
        wide = self.linear_fc1(rows.tokens, rows.counts, skip_bias_add=skips)
        given = (rows.weights, self.linear_fc1.bias, rows.counts) if skips else (rows.weights,)
        down = partial(self.linear_fc2, counts=rows.counts, weights=rows.weights)
        if self.build.recomputes_module("moe_act"):
            weighed = recomputable(lambda x: recompute(self._activate_and_weigh, self.build.streams, x, *given), wide)
            return apply_recomputing_input(down, weighed)
        return down(self._activate_and_weigh(wide, *given))

    def _activate_and_weigh(
        self, wide: Tensor, weights: Tensor, bias: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        # The last matmul is linear, so a row is weighed before it, where it is narrow.
        return (self.build.apply_activation(wide, bias, counts) * weights[:, None]).to(wide.dtype)


class MoELayer(nn.Module):
    """Mixture of experts: router, token dispatch and routed experts, plus shared experts that every token uses."""

    def __init__(self, build: LayerBuildContext, plan: LayerPlan) -> None:
        super().__init__()
        moe = build.model.moe
        self.build = build
        self.router = TopKRouter(build, plan)
        self.experts = GroupedMLP(build)
        self.shared_experts = None
        if moe.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = MLP(
                build, width=moe.moe_shared_expert_intermediate_size, weighs=moe.moe_shared_expert_gate
            )
        self.dispatcher = make_token_dispatcher(
            moe.moe_token_dispatcher_type, moe.num_experts_or_zero, build.mesh, build.kernels
        )

    def forward(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """Route, dispatch, compute and combine tokens, add the shared experts. normed: [s or s/tp, b, h]; returns like it."""
        moe, region, length = self.build.model.moe, self.build.tp_region, normed.shape[0]
        own = region.scatter_tokens(normed)
        routing = self.router(own, context, fill=own.shape[0] * region.axis.size - region.whole_sequence_length(length))
        dispatched = self.dispatcher.dispatch(
            own.flatten(0, 1), routing, routing.capacity if moe.moe_pad_expert_input_to_capacity else None
        )
        # while tokens are on their way
        shared = self._shared_experts_output(normed, context) if moe.moe_shared_expert_overlap else None
        outputs = self.experts(dispatched.wait())
        routed = region.undo_scatter_tokens(self.dispatcher.combine(outputs, dispatched).view(own.shape), length)
        if shared is None:
            shared = self._shared_experts_output(normed, context)
        return routed if shared is None else routed + shared

    def _shared_experts_output(self, normed: Tensor, context: ForwardContext) -> Tensor | None:
        """Return the output of the shared experts, like normed, recomputed if so configured; None if there are none."""
        experts = self.shared_experts
        if experts is None:
            return None
        if self.build.recomputes_module("shared_experts"):
            again = partial(recompute, lambda x: experts(x, context), self.build.streams)
            return self.build.project(again, normed)
        return experts(normed, context)
