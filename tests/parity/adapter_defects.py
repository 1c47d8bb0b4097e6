"""Mistakes around adapters, for the table of `defects.py`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.adapters import quantized_base
from megatron.core.distributed import finalize
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.optimizer import clip
from megatron.core.parallel.boxes import Box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, ShardedDim
from megatron.core.tensor_parallel.linear import AdaptableLinear
from megatron.core.transformer import adapters
from megatron.core.transformer.adapters import LinearAdapter
from megatron.training.state import trainer
from tests.parity.defect import Defect, nothing, sum_replicated_but

_forward, _norm, _counted_ranges = (
    LinearAdapter.forward,
    LinearAdapter._adapted_row_norms,
    clip.gradient_ranges_counted_once,
)
_FACTORS = ("lora_a", "lora_b")


def _cut_in_two(
    shape: tuple[int, ...], init: Any, kind: str, shards: tuple[ShardedDim, ...] = (), *rest: Any
) -> ParamSpec:
    """The spec of a parameter; of an A that is cut as its layer's input, with the columns cut in two segments and not in one."""
    if kind == "lora_a" and shards:
        shards = (
            ShardedDim(1, shards[0].axis, (FusedWeightSegment(shape[1] // 2), FusedWeightSegment(shape[1] // 2))),
        )
    return ParamSpec(shape, init, kind, shards, *rest)


def _of_experts(segment: OwnedSegment) -> bool:
    return segment.spec.kind in _FACTORS and segment.spec.stacked


def _of_layers(segment: OwnedSegment) -> bool:
    return segment.spec.kind in _FACTORS and not segment.spec.stacked


def _one_part(dim: int, axis: str, parts: tuple[FusedWeightSegment, ...]) -> ShardedDim:
    return ShardedDim(dim, axis, (FusedWeightSegment(sum(part.size for part in parts)),))


def _one_part_of_experts(dim: int, axis: str, parts: tuple[FusedWeightSegment, ...]) -> ShardedDim:
    return _one_part(dim, axis, parts) if axis == "etp" else ShardedDim(dim, axis, parts)


def _with_region(**replaced: Any) -> Any:
    """An adapter's forward pass in which the region does something else."""

    def forward(self: LinearAdapter, x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
        names = ("copy_to_region", "reduce_from_region")
        region = SimpleNamespace(**{name: getattr(self.region, name) for name in names} | replaced)
        with patch.object(self, "region", region):
            return _forward(self, x, base, weight)

    return forward


def _same(x: Tensor) -> Tensor:
    return x


def _own_rows_length(self: LinearAdapter, name: str, pair: Any, weight: Tensor) -> Tensor:
    with patch.object(self, "dim", 0 if self.dim == 1 else self.dim), torch.no_grad():
        return _norm(self, name, pair, weight)


def _own_box(box: Box, shape: tuple[int, ...]) -> Box:
    return box


def _uncounted(segment: OwnedSegment, mesh: Mesh) -> Iterator[tuple[int, int]]:
    return iter(()) if segment.spec.kind in _FACTORS else _counted_ranges(segment, mesh)


ADAPTERS: tuple[Defect, ...] = (
    Defect(
        "factors that are whole see a share of the sequence, and are not summed over tensor ranks",
        (("tp2 sp", "lora"), ("tp2 sp", "lora-fused"), ("tp2 sp", "lora-bert")),
        ((finalize, "sum_replicated_grads", sum_replicated_but(_of_layers)),),
    ),
    Defect(
        "factors of experts that are whole are not summed over their tensor ranks",
        (("ep2 etp2 dp4", "lora-moe-fused"), ("tp2 sp ep2 etp2 dp2", "lora-moe")),
        ((finalize, "sum_replicated_grads", sum_replicated_but(_of_experts)),),
    ),
    Defect(
        "B of q, k and v together is cut as one matrix",
        (("tp2", "lora-fused"), ("tp2 sp", "lora-fused")),
        ((adapters, "ShardedDim", _one_part),),
    ),
    Defect(
        "A of a row layer has other columns than those of its rank's input",
        (("tp2", "lora-fused"), ("tp2 sp", "lora")),
        ((adapters, "ParamSpec", _cut_in_two),),
    ),
    Defect(
        "B of gate and up of experts is cut as one matrix",
        (("ep2 etp2 dp4", "lora-moe-fused"),),
        ((adapters, "ShardedDim", _one_part_of_experts),),
    ),
    Defect(
        "the product of a row layer's A, cut as the input, is not summed",
        (("tp4", "lora"), ("tp2", "lora-fused")),
        ((LinearAdapter, "forward", _with_region(reduce_from_region=_same)),),
    ),
    Defect(
        "the gradient of a column layer's A is that of a rank's rows of B",
        (("tp4", "lora"), ("tp2", "lora-fused")),
        ((LinearAdapter, "forward", _with_region(copy_to_region=_same)),),
    ),
    Defect(
        "the lengths of rows are not taken as constants",
        (("tp2", "dora-fused"), ("tp2 sp pp2", "dora")),
        ((LinearAdapter, "_adapted_row_norms", _norm.__wrapped__),),
    ),
    Defect(
        "the lengths of rows are those of a rank's columns",
        (("tp2", "dora-fused"), ("tp2 sp", "lora-mla")),
        ((LinearAdapter, "_adapted_row_norms", _own_rows_length),),
    ),
    Defect(
        "magnitudes do not begin as the lengths of rows",
        (("dp2 fsdp", "dora"), ("tp2", "dora-fused")),
        ((AdaptableLinear, "initialize_from_other_parameters", nothing),),
    ),
    Defect(
        "adapters are not in the norm of the gradient",
        (("pp2", "lora-fused"), ("dp2 zero mb2", "lora"), ("dp2 fsdp", "lora-fused")),
        ((clip, "gradient_ranges_counted_once", _uncounted),),
    ),
    Defect(
        "a rank quantizes its shard by blocks that begin with it",
        (("tp4 sp dp2 zero", "qlora"), ("tp2 sp", "qdora-mla")),
        ((quantized_base, "_enclosing_whole_blocks", _own_box),),
    ),
    Defect(
        "frozen weights are in the optimizer",
        (("pp2", "lora-fused"), ("pp2", "frozen"), ("dp2 zero mb2", "lora")),
        ((trainer, "freeze_untrained", nothing),),
    ),
)
