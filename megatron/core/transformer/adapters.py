"""Give the linear layers of a layer the adapters of its plan. Those of experts: each expert has factors of its own.

An expert's adapter sums as its layer does: what enters is whole on all etp ranks and cut rows give columns, or what enters is cut and
each rank has a partial sum. The factor that is whole sees a share of its gradient on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn

from megatron.core.config.adapters import WHOLE, AdapterPlan, linear_shapes_of_layer
from megatron.core.config.plan.layers import LayerPlan
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    ParamSpec,
    ShardedDim,
    constant_initializer,
    meta_parameter,
    param_spec_of,
)
from megatron.core.tensor_parallel.adapter import AdapterBuildContext, LinearAdapter, kaiming_uniform_initializer
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


def add_adapters_to_layer(layer: nn.Module, plan: LayerPlan, build: LayerBuildContext) -> None:
    """Put an adapter beside each linear layer that the plan names."""
    config = build.model.adapter
    made = AdapterBuildContext(build.mesh, build.streams, build.dtype, config.lora_dropout, config.dora)
    shapes = linear_shapes_of_layer(build.model, plan)
    for path, group in groupby(plan.adapters, key=lambda one: one.linear):
        linear, names = layer.get_submodule(path), [name for name, _ in shapes[path].parts]
        if param_spec_of(linear.weight).stacked:  # type: ignore[arg-type]
            linear.adapter = GroupedLinearAdapter(tuple(group), names, linear.weight, build)  # type: ignore[arg-type]
        else:
            linear.adapter = LinearAdapter(tuple(group), names, linear.weight, build.tp_region, made)  # type: ignore[arg-type]


class ExpertLoRAFactors(nn.Module):
    """The factors of all experts of this rank: A [e, r, in], B [e, out, r]."""

    def __init__(
        self, plan: AdapterPlan, weight: ParamSpec, rows: tuple[FusedWeightSegment, ...], build: LayerBuildContext
    ) -> None:
        super().__init__()
        self.scale, self.rank = plan.scale, plan.rank
        experts, _, inputs = weight.shape
        by_expert, by_width = weight.shards
        cut_output = by_width.dim == 1
        first = ParamSpec(
            (experts, plan.rank, inputs),
            kaiming_uniform_initializer(),
            "lora_a",
            (by_expert,) if cut_output else (by_expert, by_width),
            ("etp",) if cut_output else (),
            reduce_over="edp",
            stacked=True,
        )
        second = ParamSpec(
            (experts, sum(part.size for part in rows), plan.rank),
            constant_initializer(0.0),
            "lora_b",
            (by_expert, ShardedDim(1, "etp", rows)) if cut_output else (by_expert,),
            () if cut_output else ("etp",),
            reduce_over="edp",
            stacked=True,
        )
        self.lora_A, self.lora_B = (meta_parameter(spec, build.mesh, build.dtype) for spec in (first, second))


class GroupedLinearAdapter(nn.Module):
    """The LoRA adapters of a grouped linear layer (experts): of the whole matrix, of fused parts, or both, which add up."""

    def __init__(
        self, plans: Sequence[AdapterPlan], names: Sequence[str], weight: nn.Parameter, build: LayerBuildContext
    ) -> None:
        super().__init__()
        spec, self.enabled = param_spec_of(weight), True
        by_width = spec.shards[1]
        segments = by_width.segments if by_width.dim == 1 else (FusedWeightSegment(spec.shape[1]),)
        ranks = build.mesh.etp.size if by_width.dim == 1 else 1
        self.multiply: Callable[..., Tensor] = build.kernels.grouped_linear
        self.names, self.pairs = tuple(names), nn.ModuleDict()
        self.sizes = [part.local_size(ranks) for part in segments]
        for plan in plans:
            rows = segments if plan.part == "" else (segments[self.names.index(plan.part)],)
            self.pairs[plan.part or WHOLE] = ExpertLoRAFactors(plan, spec, rows, build)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return what adapters add to the output, [n, out]; over etp a partial sum where the output is one.

        x: [n, in], sorted by expert; counts: [e], rows of each expert.
        """
        products = {}
        for name, pair in cast(list[tuple[str, ExpertLoRAFactors]], list(self.pairs.items())):
            low = self.multiply(x, pair.lora_A, counts, None)
            products[name] = self.multiply(low, pair.lora_B, counts, None) * pair.scale
        whole = products.pop(WHOLE, None)
        if whole is not None and not products:
            return whole
        nothing = x.new_zeros(())
        parts = torch.cat(
            [
                products[name] if name in products else nothing.expand(x.shape[0], size)
                for name, size in zip(self.names, self.sizes, strict=True)
            ],
            dim=-1,
        )
        return parts if whole is None else whole + parts
