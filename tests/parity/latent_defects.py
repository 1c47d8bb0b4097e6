"""Mistakes around latent attention and multi-token prediction, for the table of `defects.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.settings.model import MTPConfig
from megatron.core.distributed import finalize
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.models import stage_model
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import MTPLosses, MultiTokenPrediction
from megatron.core.optimizer import clip
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import FusedWeightSegment
from megatron.core.tensor_parallel import region
from megatron.core.tensor_parallel.linear import ColumnParallelLinear
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.mixers import mla
from megatron.core.transformer.mixers.mla import MultiLatentAttention
from megatron.training.state.batch import Batch, Loss, language_loss_with_mtp, masked_loss_sum
from tests.helpers import tiny
from tests.parity.defect import Defect, collectives_with, nothing, sum_replicated_but

_make_column = LayerBuildContext.make_column_linear

_counted_ranges, _materialize, _sum_replicated = (
    clip.gradient_ranges_counted_once,
    stage_model.materialize_parameters,
    finalize.sum_replicated_grads,
)
_look, _cut, _message, _predict, _turn = (
    Batch.with_future_tokens,
    Batch.shard_over_context,
    GPTModel._with_mtp_states,
    MultiTokenPrediction.forward,
    MultiLatentAttention._apply_rotary_to_tensor,
)


# Latents.


def _sum_down_projections_too(segments: list[OwnedSegment], mesh: Mesh) -> None:
    _sum_replicated(segments, mesh)
    for segment in segments:
        if "down_proj" in segment.name:
            collectives.all_reduce(segment.grad, mesh.tp)


def _keep_own_gradient(self: TensorParallelRegion, x: Tensor) -> Tensor:
    return collectives.gather_with_split_backward(x, self.axis) if self.sequence_parallel else x


def _turn_from_the_rank(self: MultiLatentAttention, x: Tensor, table: Any) -> Tensor:
    if table is None or x.shape[2] > 1:
        return _turn(self, x, table)
    rank = self.build.mesh.tp.rank
    return _turn(self, x, dataclasses.replace(table, cos=table.cos.roll(rank, 0), sin=table.sin.roll(rank, 0)))


def _keys_beside_values(
    build: Any, size: int, parts: tuple[FusedWeightSegment, ...], **keywords: Any
) -> ColumnParallelLinear:
    halves = (FusedWeightSegment(parts[0].size // 2), FusedWeightSegment(parts[0].size // 2))
    return _make_column(build, size, halves if len(parts) == 1 else parts, **keywords)


# Tokens ahead.


def _count_each_depth_where_it_is(output: Tensor | MTPLosses, batch: Batch, config: MTPConfig) -> Loss:
    total, count, report = language_loss_with_mtp(output, batch, config)
    if isinstance(output, MTPLosses):
        total, _, _ = masked_loss_sum(output.next, batch.loss_mask)
        for depth, losses in enumerate(output.ahead, start=1):
            further, own, _ = masked_loss_sum(losses, batch.extras[f"mtp_{depth}_loss_mask"])
            total = total + further / own.clamp(min=1) * count * config.mtp_loss_scaling_factor / len(output.ahead)
    return total, count, report


def _look_at_the_own_piece(self: Batch, axis: Axis) -> Batch:
    depths = sum(name.endswith("_labels") for name in self.extras)
    whole = dataclasses.replace(self, extras={})
    return _look(_cut(whole, axis), depths)


def _look_across_documents(self: Batch, depths: int, **mode: bool) -> Batch:
    return dataclasses.replace(
        _look(dataclasses.replace(self, documents=None), depths, **mode), documents=self.documents
    )


def _shift_once(self: Batch, depths: int, **mode: bool) -> Batch:
    found = _look(self, depths, **mode)
    return dataclasses.replace(
        found,
        extras={
            name: found.extras[name.replace("mtp_2", "mtp_1")] if name.startswith("mtp_2") else rows
            for name, rows in found.extras.items()
        },
    )


def _places_of_the_first_rank(
    self: MultiTokenPrediction, x: Tensor, ids: tuple[Tensor, ...], positions: Tensor, *rest: Any
) -> Any:
    return _predict(self, x, ids, torch.arange(positions.shape[1])[None], *rest)


def _copy_of_its_own(module: GPTModel, mesh: Mesh, seed: int, **keywords: Any) -> None:
    _materialize(module, mesh, seed, **keywords)
    if module.mtp is not None and not module.stage.has_embedding:
        module.embedding.word_embeddings.weight.data.mul_(1.001)


def _count_the_copy(segment: OwnedSegment, mesh: Mesh) -> Iterator[tuple[int, int]]:
    return _counted_ranges(dataclasses.replace(segment, spec=dataclasses.replace(segment.spec, tied=False)), mesh)


class _GatherThenSum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return torch.cat(collectives.all_gather(tensor, axis).chunk(axis.size), dim=-1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = collectives.all_reduce(gradient.clone(), context.axis)
        return total.chunk(context.axis.size, dim=-1)[context.axis.rank].contiguous(), None


def _columns_backwards(tensor: Tensor, axis: Axis) -> Tensor:
    whole = collectives.gather_columns_with_split_backward(tensor, axis)
    return torch.cat(whole.chunk(axis.size, dim=-1)[::-1], dim=-1)


def _depths_swapped(self: GPTModel, x: Tensor, ahead: Any) -> tuple[Tensor, ...]:
    first, *states = _message(self, x, ahead)
    return first, *states[::-1]


LATENTS: tuple[Defect, ...] = (
    Defect(
        "gradients of whole down projections are summed over tensor ranks",
        (("tp2 mb4", "mla-q"),),
        ((finalize, "sum_replicated_grads", _sum_down_projections_too),),
    ),
    Defect(
        "gradients of down projections are not summed under sequence parallelism",
        (("tp2 sp mb2", "mla-q"), ("tp4 sp mb4", "mla")),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: "down_proj" in s.name)),),
    ),
    Defect(
        "gradients of the latents' norms are not summed under sequence parallelism",
        (("tp2 sp mb2", "mla-q"),),
        (
            (
                finalize,
                "sum_replicated_grads",
                sum_replicated_but(lambda s: s.name.endswith(("q_layernorm.weight", "kv_layernorm.weight"))),
            ),
        ),
    ),
    Defect(
        "each tensor rank keeps its own gradient of the shared key",
        (("tp2 mb4", "mla"), ("tp2 sp mb2", "mla-q")),
        ((TensorParallelRegion, "copy_to_region", _keep_own_gradient),),
    ),
    Defect(
        "tensor ranks rotate the shared key by other positions",
        (("tp2 mb4", "mla"), ("tp2 sp mb4", "mla-packed")),
        ((MultiLatentAttention, "_apply_rotary_to_tensor", _turn_from_the_rank),),
    ),
    Defect(
        "keys and values of all heads are cut as two parts",
        (("tp2 mb4", "mla"),),
        ((LayerBuildContext, "make_column_linear", _keys_beside_values),),
    ),
    Defect(
        "scores are not sharpened as yarn asks",
        (("tp2 mb4", "mla"),),
        ((mla, "yarn_mscale", lambda config, share: 1.0),),
    ),
    Defect(
        "each microbatch divides tokens ahead by its own number",
        (("mb8", "mtp2-tied-packed"),),
        ((tiny, "language_loss_with_mtp", _count_each_depth_where_it_is),),
    ),
    Defect(
        "tokens ahead are looked for in a context rank's own piece",
        (("cp2 mb2", "mtp"), ("cp2 pp2 mb2", "mtp2")),
        ((Batch, "shard_over_context", _look_at_the_own_piece),),
    ),
    Defect(
        "positions ahead begin anew on every context rank",
        (("cp2 mb2", "mtp"),),
        ((MultiTokenPrediction, "forward", _places_of_the_first_rank),),
    ),
    Defect(
        "tokens of other documents are predicted ahead",
        (("mb8", "mtp2-tied-packed"), ("pp4 mb2", "mtp2-tied-packed")),
        ((Batch, "with_future_tokens", _look_across_documents),),
    ),
    Defect(
        "the second depth looks no further than the first",
        (("tp2 sp mb2", "mtp2"),),
        ((Batch, "with_future_tokens", _shift_once),),
    ),
    Defect(
        "gradients of the embedding's copy are not summed",
        (("pp2", "mtp2"), ("pp4 layout=E|ttt|tmm|L", "mtp2")),
        ((finalize, "sum_tied_grads", nothing),),
    ),
    Defect(
        "the embedding's copy starts otherwise",
        (("pp2", "mtp2"), ("pp4 layout=Et|t|ttmm|L mb2", "mtp2-tied-packed")),
        ((stage_model, "materialize_parameters", _copy_of_its_own),),
    ),
    Defect(
        "the norm counts the embedding's copy",
        (("pp2", "mtp2"), ("pp4 layout=E|ttt|tmm|L", "mtp2")),
        ((clip, "gradient_ranges_counted_once", _count_the_copy),),
    ),
    Defect(
        "whole gradients are summed where columns were gathered",
        (("tp2 mb4", "mtp"), ("tp2 sp mb2", "mtp2")),
        ((region, "collectives", collectives_with(gather_columns_with_split_backward=_GatherThenSum.apply)),),
    ),
    Defect(
        "columns are gathered in the wrong order",
        (("tp2 mb4", "mtp"),),
        ((region, "collectives", collectives_with(gather_columns_with_split_backward=_columns_backwards)),),
    ),
    Defect(
        "states of two depths change places on their way to the head",
        (("pp4 layout=E|ttt|tmm|L", "mtp2"),),
        ((GPTModel, "_with_mtp_states", _depths_swapped),),
    ),
)
