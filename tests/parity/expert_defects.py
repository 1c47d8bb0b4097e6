"""Mistakes around experts, for the table of `defects.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed import ddp, finalize
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.distributed.ddp import DataParallel
from megatron.core.optimizer import clip
from megatron.core.parallel import collectives, rng
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.collectives import AsyncAllToAll
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, ShardedDim
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.transformer import dispatch, moe
from megatron.core.transformer.dispatch import (
    AllGatherTokenDispatcher,
    AllToAllTokenDispatcher,
    ExpertInputs,
    ExpertPermutation,
    PendingTokenDispatch,
)
from megatron.core.transformer.moe import GroupedLinear, GroupedMLP
from megatron.core.transformer.router import ExpertRouting
from tests.parity.defect import Defect, collectives_with, sum_replicated_but

_counted_ranges, _make_buckets, _launch, _order_of, _cut = (
    clip.gradient_ranges_counted_once,
    ddp.make_buckets,
    DataParallel._launch_next_reduction,
    dispatch.permutation_by_expert,
    moe.ShardedDim,
)
_forward, _collect, _act = GroupedLinear.forward, dispatch.unpermute_tokens, GroupedMLP._activate_and_weigh
_gathered, _sent, _begin_all_to_all = (
    AllGatherTokenDispatcher.dispatch,
    AllToAllTokenDispatcher.dispatch,
    collectives.start_autograd_all_to_all,
)


# The gradient, from the experts on.


def _count_experts_on_every_data_rank(segment: OwnedSegment, mesh: Mesh) -> Iterator[tuple[int, int]]:
    return _counted_ranges(segment, dataclasses.replace(mesh, edp=Axis("edp")))


def _count_experts_on_the_first_ep_rank(segment: OwnedSegment, mesh: Mesh) -> Iterator[tuple[int, int]]:
    return _counted_ranges(segment, mesh) if mesh.ep.is_first or segment.spec.reduce_over != "edp" else iter(())


def _experts_over_the_dense_data_ranks(module: Any, mesh: Mesh, **keywords: Any) -> Any:
    return _make_buckets(module, dataclasses.replace(mesh, edp=mesh.dp_cp), **keywords)


def _divide_by_the_ranks_of_the_bucket(self: DataParallel) -> None:
    if self.divisor is not None:
        self.divisor = self.buckets[self._launched].axis.size
    _launch(self)


_draw = rng._draw_initial_values


def _draw_by_place(targets: Sequence[tuple[Box, Tensor]], spec: ParamSpec, seed: int, source: torch.device) -> None:
    if not spec.stacked:
        return _draw(targets, spec, seed, source)
    for box, target in targets:
        for place in range(len(target)):
            generator = torch.Generator(source).manual_seed(derive_seed("initial", seed, spec.name, place))
            target[place].copy_(spec.init(spec.shape[1:], generator)[box.slices()[1:]].to(target))


def _one_part(dim: int, axis: str, parts: tuple[FusedWeightSegment, ...]) -> ShardedDim:
    return _cut(dim, axis, (FusedWeightSegment(sum(part.size for part in parts)),))


# On the way.


def _collect_one_row_off(rows: Tensor, order: ExpertPermutation) -> Tensor:
    return _collect(rows.roll(1, 0), order)


def _count_one_expert_off(
    self: AllToAllTokenDispatcher, tokens: Tensor, routing: ExpertRouting, capacity: int | None
) -> PendingTokenDispatch:
    dispatched = _sent(self, tokens, routing, capacity)

    def wait() -> ExpertInputs:
        rows = dispatched.wait()
        return dataclasses.replace(rows, counts=rows.counts.roll(1))

    return dataclasses.replace(dispatched, wait=wait)


def _all_choices_are_mine(*arguments: Any, first: int = 0, **keywords: Any) -> ExpertPermutation:
    return _order_of(*arguments, first=0, **keywords)


def _own_share(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    return tensor.split(sizes)[axis.rank]


def _without_a_way_back(tensor: Tensor, exchange: AsyncAllToAll) -> Tensor:
    return _begin_all_to_all(tensor if tensor.shape[-1] > 1 else tensor.detach(), exchange)


def _weights_of_this_rank_only(
    self: AllGatherTokenDispatcher, tokens: Tensor, routing: ExpertRouting, capacity: int | None
) -> PendingTokenDispatch:
    here = self.num_experts // self.ep.size
    mine = (routing.experts // here == self.ep.rank).to(routing.weights.dtype)
    return _gathered(self, tokens, dataclasses.replace(routing, weights=routing.weights * mine), capacity)


# In the layer.


def _weigh_twice(self: GroupedMLP, wide: Tensor, weights: Tensor) -> Tensor:
    return _act(self, wide, weights) * weights[:, None]


def _bias_of_every_rank(
    self: GroupedLinear, x: Tensor, counts: Tensor, weights: Tensor | None = None, **keywords: bool
) -> Tensor:
    self.bias_share = 1.0
    return _forward(self, x, counts, weights, **keywords)


def _bias_without_weight(
    self: GroupedLinear, x: Tensor, counts: Tensor, weights: Tensor | None = None, **keywords: bool
) -> Tensor:
    return _forward(self, x, counts, None if weights is None else torch.ones_like(weights), **keywords)


EXPERTS: tuple[Defect, ...] = (
    Defect(
        "the norm counts experts on every rank that has a copy",
        (("tp2 etp1 dp2 average", "moe-bias"), ("ep2 dp4", "moe-capacity")),
        ((clip, "gradient_ranges_counted_once", _count_experts_on_every_data_rank),),
    ),
    Defect(
        "the norm counts the experts of the first ep rank only",
        (("ep2 dp2", "moe"), ("tp2 etp1 ep2", "moe")),
        ((clip, "gradient_ranges_counted_once", _count_experts_on_the_first_ep_rank),),
    ),
    Defect(
        "expert gradients are summed over all data ranks",
        (("ep2 dp2", "moe"), ("ep2 dp2 alltoall zero", "moe-padded")),
        ((ddp, "make_buckets", _experts_over_the_dense_data_ranks),),
    ),
    Defect(
        "averaged expert gradients are divided by the number of their copies",
        (
            ("tp2 etp1 dp2 average", "moe-bias"),
            ("ep2 dp4 zero average overlap-reduce overlap-gather bucket900 alltoall", "moe-shared"),
        ),
        ((DataParallel, "_launch_next_reduction", _divide_by_the_ranks_of_the_bucket),),
    ),
    Defect(
        "router gradients are not summed over tensor ranks",
        (("tp2", "moe-bias"), ("tp2 sp", "moe-bias")),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: "router" in s.name)),),
    ),
    Defect(
        "bias gradients of cut experts are not summed",
        (("etp2 dp2 alltoall", "moe-shared-bias"), ("tp2", "moe-bias")),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: s.name.endswith("experts.linear_fc2.bias"))),),
    ),
    Defect(
        "gradients of the shared expert's gate are not summed under sequence parallelism",
        (("tp2 sp ep2 dp2 alltoall", "moe-shared"),),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: "gate_weight" in s.name)),),
    ),
    Defect(
        "experts are drawn by their place on the rank",
        (("ep2 dp2", "moe"), ("pp2 ep2 dp4 pp-before-dp zero", "moe")),
        ((rng, "_draw_initial_values", _draw_by_place),),
    ),
    Defect(
        "gates and linear halves of experts are cut as one matrix",
        (("etp2 ep2 dp4 alltoall zero", "moe-shared-bias"),),
        ((moe, "ShardedDim", _one_part),),
    ),
    Defect(
        "rows come back one off",
        (("tp2 etp1 ep2", "moe"), ("ep4 dp4 alltoall grouped", "moe")),
        ((dispatch, "unpermute_tokens", _collect_one_row_off),),
    ),
    Defect(
        "rows meet the expert beside their own",
        (("ep2 dp2 overlap-shared", "moe-shared"), ("etp2 dp2 alltoall", "moe-shared-bias")),
        ((AllToAllTokenDispatcher, "dispatch", _count_one_expert_off),),
    ),
    Defect(
        "every rank takes the choices of the first experts for its own",
        (("ep2 dp2", "moe"),),
        ((dispatch, "permutation_by_expert", _all_choices_are_mine),),
    ),
    Defect(
        "shares of cut experts are not added up",
        (("etp2 dp2 alltoall", "moe-shared-bias"),),
        ((dispatch, "collectives", collectives_with(uneven_scatter_with_gather_backward=_own_share)),),
    ),
    Defect(
        "gradients of weights do not come home",
        (("ep4 dp4 alltoall grouped", "moe"), ("ep2 dp2 overlap-shared", "moe-shared")),
        ((dispatch, "collectives", collectives_with(start_autograd_all_to_all=_without_a_way_back)),),
    ),
    Defect(
        "tokens of other ranks weigh nothing",
        (("ep2 dp2", "moe"),),
        ((AllGatherTokenDispatcher, "dispatch", _weights_of_this_rank_only),),
    ),
    Defect(
        "every tensor rank sends all tokens",
        (("tp2 etp1 alltoall mb2", "moe-bias"),),
        (
            (TensorParallelRegion, "scatter_tokens", lambda self, x: x),
            (TensorParallelRegion, "undo_scatter_tokens", lambda self, own, held: own),
        ),
    ),
    Defect(
        "routing weights are applied twice",
        (("tp2", "moe-bias"), ("ep2 dp2", "moe")),
        ((GroupedMLP, "_activate_and_weigh", _weigh_twice),),
    ),
    Defect(
        "every rank of a cut expert adds its bias",
        (("etp2 dp2 alltoall", "moe-shared-bias"), ("tp2", "moe-bias")),
        ((GroupedLinear, "forward", _bias_of_every_rank),),
    ),
    Defect(
        "the second bias of an expert is not weighed",
        (("tp2 etp1 dp2 average", "moe-bias"),),
        ((GroupedLinear, "forward", _bias_without_weight),),
    ),
)
