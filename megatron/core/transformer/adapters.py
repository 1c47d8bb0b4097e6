"""Adapters beside linear layers: LoRA (Hu et al., 2021), rsLoRA (Kalajdzievski, 2023) and DoRA (Liu et al., 2024); and beside those of experts.

    y = W x + scale B A dropout(x)            A: [r, in], drawn; B: [out, r], zero at first
    DoRA: y = m / |W + scale B A| (W x + scale B A dropout(x))      |.|: of each row, taken as a constant; m: [out], |W| at first

What an adapter adds is in the same state as what its layer gives: whole, cut by columns, or a partial sum. So

    layer       A                       between the factors         B
    column      whole                   gathered, width r           cut as the rows of W
    row         cut as W's columns      summed, width r             whole
    whole       whole                                               whole

Where a factor that is whole sees a shard of the sequence (sequence parallelism), its gradient is summed over the tensor ranks. Each
expert has factors of its own, and its adapter sums as its layer does: what enters is whole on all etp ranks and cut rows give columns, or
what enters is cut and each rank has a partial sum. The factor that is whole sees a share of its gradient on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.config.adapters import WHOLE, AdapterPlan, layer_adapter_plans
from megatron.core.config.plan.linear_layers import linear_shapes_of_layer
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    Initial,
    ParamSpec,
    ShardedDim,
    constant_initializer,
    meta_parameter,
    param_spec_of,
)
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.transformer.blocks import Block
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


def add_adapters_to_layer(layer: Block) -> None:
    """Put an adapter beside each linear layer of it that --lora-targets name."""
    plan, build = layer.plan, layer.build
    config = build.model.adapter
    made = AdapterBuildContext(build.mesh, build.streams, build.dtype, config.lora_dropout, config.dora)
    shapes = linear_shapes_of_layer(build.model, plan)
    for path, group in groupby(layer_adapter_plans(build.model, plan), key=lambda one: one.linear):
        linear, names = layer.get_submodule(path), [name for name, _ in shapes[path].parts]
        if param_spec_of(linear.weight).stacked:  # type: ignore[arg-type]
            linear.adapter = GroupedLinearAdapter(tuple(group), names, linear.weight, build)  # type: ignore[arg-type]
        else:
            linear.adapter = LinearAdapter(tuple(group), names, linear.weight, build.tp_region, made)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class AdapterBuildContext:
    """What constructors of adapters receive. dropout: of an adapter's input. dora: add magnitudes (DoRA)."""

    mesh: Mesh
    streams: RandomStreams
    dtype: torch.dtype
    dropout: float = 0.0
    dora: bool = False


def kaiming_uniform_initializer() -> Initial:
    """Return the initializer of A [r, in]: uniform within 1 / sqrt(in), as `nn.Linear` draws its weight."""

    def sample_kaiming_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        bound = shape[-1] ** -0.5
        return torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator)

    return sample_kaiming_uniform


class LoRAFactors(nn.Module):
    """LoRA factors A and B, with DoRA row magnitudes, of one adapter. rows: the output segments that B covers."""

    def __init__(
        self,
        plan: AdapterPlan,
        weight: ParamSpec,
        rows: tuple[FusedWeightSegment, ...],
        build: AdapterBuildContext,
        sums: tuple[str, ...],
    ) -> None:
        """weight: of the base. sums: axes whose ranks each see a share of the sequence where the layer is whole."""
        super().__init__()
        self.scale, self.rank, dim = plan.scale, plan.rank, _tp_sharded_dim(weight)
        out, width = sum(part.size for part in rows), weight.shape[1]
        cut_input = weight.shards if dim == 1 else ()
        cut_output = (ShardedDim(0, weight.shards[0].axis, rows),) if dim == 0 else ()
        first = ParamSpec(
            (plan.rank, width), kaiming_uniform_initializer(), "lora_a", cut_input, () if dim == 1 else sums
        )
        second = ParamSpec((out, plan.rank), constant_initializer(0.0), "lora_b", cut_output, () if dim == 0 else sums)
        length = ParamSpec((out,), constant_initializer(1.0), "vector", cut_output, () if dim == 0 else sums)
        self.lora_A = meta_parameter(first, build.mesh, build.dtype)
        self.lora_B = meta_parameter(second, build.mesh, build.dtype)
        self.magnitude = meta_parameter(length, build.mesh, build.dtype) if build.dora else None


class _AddLoRAOutput(Function):
    """Autograd function: base + scale B low for adapters, each in its columns of base, in one pass over the output.

    The gradient of base is the output's, not copied.
    """

    @staticmethod
    def forward(
        context: Any, base: Tensor, low: Tensor, places: tuple[tuple[int, float], ...], *seconds: Tensor
    ) -> Tensor:
        """base: [.., out]; low: [.., r of all]; places: (first column, scale) of each pair; seconds: B, [size, r] each."""
        context.save_for_backward(low, *seconds)
        context.places = places
        result = base.clone(memory_format=torch.contiguous_format)
        rows, at = result.view(-1, result.shape[-1]), 0
        flat = low.reshape(-1, low.shape[-1])
        for (first, scale), second in zip(places, seconds, strict=True):
            size, rank = second.shape
            rows[:, first : first + size].addmm_(flat[:, at : at + rank], second.t(), alpha=scale)
            at += rank
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """gradient: [.., out], which is that of base as it is."""
        low, *seconds = context.saved_tensors
        rows, flat = gradient.reshape(-1, gradient.shape[-1]), low.reshape(-1, low.shape[-1])
        parts, gradients, at = [], list[Tensor | None](), 0
        for (first, scale), second, trained in zip(context.places, seconds, context.needs_input_grad[3:], strict=True):
            size, rank = second.shape
            own = rows[:, first : first + size]
            parts.append(own.mm(second).mul_(scale))
            gradients.append(own.t().mm(flat[:, at : at + rank]).mul_(scale) if trained else None)
            at += rank
        return gradient, torch.cat(parts, dim=1).view(low.shape), None, *gradients


class LinearAdapter(nn.Module):
    """The LoRA or DoRA adapters of one linear layer: one of the whole matrix, or one of each of some fused parts.

    enabled: while False the layer ignores them and computes as its base does.
    """

    def __init__(
        self,
        plans: Sequence[AdapterPlan],
        names: Sequence[str],
        weight: nn.Parameter,
        region: TensorParallelRegion,
        build: AdapterBuildContext,
    ) -> None:
        """plans: of this layer. names: of its parts. weight: of the layer, whose spec says how it is cut."""
        super().__init__()
        spec, self.enabled = param_spec_of(weight), True
        self.region, self.build, self.dim = region, build, _tp_sharded_dim(spec)
        self.axis: Axis = build.mesh.tp
        sums = region.gradient_sum_axes if self.dim is not None else spec.sum_over
        segments = spec.shards[0].segments if self.dim == 0 else (FusedWeightSegment(spec.shape[0]),)
        ranks = self.axis.size if self.dim == 0 else 1
        self.pairs, self.sizes = nn.ModuleDict(), []
        for place, name in enumerate(names):
            rows = (segments[place],) if len(names) > 1 else segments  # one name: all of the matrix
            self.sizes.append(sum(part.local_size(ranks) for part in rows))
            for plan in plans:
                if plan.part == name != "" or (plan.part == "" and place == 0):
                    self.pairs[plan.part or WHOLE] = LoRAFactors(
                        plan, spec, segments if plan.part == "" else rows, build, sums
                    )
        self.names = tuple(names)
        # The input of a row layer differs from rank to rank, and so does that of any layer under sequence parallelism.
        self.stream = "cut" if self.dim == 1 or "tp" in sums else "default"

    @property
    def has_dora_magnitudes(self) -> bool:
        """Whether it is DoRA, whose row magnitudes scale the base layer's output too."""
        return self.build.dora

    def forward(self, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        """Return the adapted output of the layer, like base.

        x: the layer's input; base: its output, with DoRA without the bias; weight: this rank's shard, [out, in] (used
        by DoRA only).
        """
        low = F.linear(self._apply_dropout(x), torch.cat([pair.lora_A for _, pair in self.named_lora_factors]))
        if self.dim == 0:
            low = self.region.copy_to_region(low)
        elif self.dim == 1:
            low = self.region.reduce_from_region(low)
        adapted = self._add_lora_output(base, low)
        factors = self.dora_row_factors(weight)
        return adapted if factors is None else adapted * factors.to(adapted.dtype)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return this rank's shard of the weight with the adapters merged in, [out, in]. weight: the shard of the base."""
        deltas = {name: pair.scale * (pair.lora_B @ pair.lora_A) for name, pair in self.named_lora_factors}
        whole = weight + self.join_part_rows(deltas, weight, 0.0)
        factors = self.dora_row_factors(weight)
        return whole if factors is None else whole * factors[:, None].to(whole.dtype)

    def dora_row_factors(self, weight: Tensor) -> Tensor | None:
        """Return magnitude / norm of each row, [out], 1 without adapter; None without DoRA. weight: [out, in]."""
        if not self.build.dora:
            return None
        factors = {
            name: pair.magnitude / self._adapted_row_norms(name, pair, weight)
            for name, pair in self.named_lora_factors
            if pair.magnitude is not None
        }
        return self.join_part_rows(factors, weight[:, 0], 1.0)

    @torch.no_grad()
    def reset_dora_magnitudes(self, weight: Tensor) -> None:
        """Set the DoRA magnitudes to the row norms of the adapted weight, that of the base while B is zero.

        weight: [out, in], this rank's shard of the base. Collective over the tensor ranks where they share rows.
        """
        for name, pair in self.named_lora_factors:
            if pair.magnitude is not None:
                pair.magnitude.copy_(self._adapted_row_norms(name, pair, weight))

    @property
    def named_lora_factors(self) -> list[tuple[str, LoRAFactors]]:
        """The LoRA factors with the names of the parts that they adapt, in order."""
        return cast(list[tuple[str, LoRAFactors]], list(self.pairs.items()))

    def _add_lora_output(self, base: Tensor, low: Tensor) -> Tensor:
        """Return base [.., out] plus scale B low of each adapter, in its part's columns. low: [.., all ranks], of A."""
        firsts = dict(zip(self.names, accumulate(self.sizes, initial=0), strict=False))
        firsts.setdefault(WHOLE, 0)
        pairs = [pair for _, pair in self.named_lora_factors]
        places = tuple((firsts[name], pair.scale) for name, pair in self.named_lora_factors)
        return cast(Tensor, _AddLoRAOutput.apply(base, low, places, *[pair.lora_B for pair in pairs]))

    def _apply_dropout(self, x: Tensor) -> Tensor:
        if self.build.dropout == 0.0 or not self.training:
            return x
        with self.build.streams.fork(self.stream):
            return torch.native_dropout(x, self.build.dropout, True)[0]

    def join_part_rows(self, parts: dict[str, Tensor], like: Tensor, other: float = 0.0) -> Tensor:
        """Concatenate results of parts, [size, ..] each. like: [out, ..], gives the shape of missing parts.

        other: value that fills the rows of parts without an adapter.
        """
        if WHOLE in parts:
            return parts[WHOLE]
        pieces = zip(self.names, like.split(self.sizes), strict=True)
        return torch.cat([parts[name] if name in parts else torch.full_like(rows, other) for name, rows in pieces])

    @torch.no_grad()
    def _adapted_row_norms(self, name: str, pair: LoRAFactors, weight: Tensor) -> Tensor:
        """Return the L2 norms [rows] of W + scale B A of one part; collective where ranks share a row."""
        rows = weight if name == WHOLE else weight.split(self.sizes)[self.names.index(name)]
        squares = torch.addmm(rows, pair.lora_B.to(rows.dtype), pair.lora_A.to(rows.dtype), alpha=pair.scale)
        total = squares.to(torch.promote_types(squares.dtype, torch.float32)).square().sum(dim=1)
        return (collectives.all_reduce(total, self.axis) if self.dim == 1 else total).sqrt().to(weight.dtype)


def _tp_sharded_dim(spec: ParamSpec) -> int | None:
    """Return the dimension of a matrix that is cut over the tensor ranks, or None."""
    return spec.shards[0].dim if spec.shards else None


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
