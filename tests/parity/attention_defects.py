"""Mistakes around windows, sinks, gates, caps and the clipping of scores, for the table of `defects.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.distributed import finalize
from megatron.core.models.output_heads import LanguageModelHead
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.transformer.context import rope
from megatron.core.transformer.mixers import attention, qk_clip
from megatron.core.transformer.mixers.attention import SelfAttention
from megatron.training.state import trainer as stages
from tests.parity.defect import Defect, collectives_with

_stages_of, _recompute, _sink, _clip_rows = (
    stages.stage_specs_of_run,
    attention.recompute,
    SelfAttention._attention_sink_logits,
    SelfAttention.qk_clip_weight_factors,
)
_scale_rows, _publish, _logits, _sum_replicated = (
    Optimizer._scale_weight_rows,
    Optimizer._write_weights,
    LanguageModelHead.logits,
    finalize.sum_replicated_grads,
)
_rotary_table = rope.rotary_table


def _pattern_of_the_stage(config: Any) -> tuple[StageSpec, ...]:
    """Windows and rotations by a layer's place in its stage."""
    specs = _stages_of(config)
    rows = [plan for spec in sorted(specs, key=lambda spec: spec.index) for plan in spec.layers]
    return tuple(
        dataclasses.replace(
            spec,
            layers=tuple(
                dataclasses.replace(plan, window=rows[place].window, rope=rows[place].rope)
                for place, plan in enumerate(spec.layers)
            ),
        )
        for spec in specs
    )


def _sinks_of_the_first_rank(self: SelfAttention, q: Tensor) -> Tensor | None:
    found = _sink(self, q)
    return (
        found
        if found is None
        else collectives.broadcast(found.detach().clone(), self.build.mesh.tp) + found - found.detach()
    )


def _sinks_are_not_kept(
    function: Callable[..., Tensor], streams: Any, *tensors: Tensor | None, **keywords: Any
) -> Tensor:
    return _recompute(lambda *kept: function(*kept, tensors[-1].detach()), streams, *tensors[:-1], **keywords)


def _sinks_like_norms(segments: list[Any], mesh: Any) -> None:
    _sum_replicated(segments, mesh)
    for segment in segments:
        if segment.name.endswith("softmax_offset"):
            collectives.all_reduce(segment.grad, mesh.tp)


def _own_heads_only(piece: Tensor, axis: Axis) -> Tensor:
    return torch.cat([piece] * axis.size)


def _each_head_alone(self: SelfAttention, shrink: Tensor, alpha: float) -> dict[Any, Tensor]:
    """A key head shrinks by the first of its query heads."""
    model = self.build.model
    first = shrink.view(model.num_query_groups, -1)[:, :1].expand(-1, shrink.numel() // model.num_query_groups)
    return _clip_rows(self, first.flatten(), alpha)


def _nothing_yet(self: Optimizer, factors: Mapping[str, Tensor]) -> None:
    self.reduce_deferred = factors


def _scaled_when_all_have_gone_round(self: Optimizer) -> None:
    _publish(self)
    for parallel in self.parallels:
        parallel.finish_gather()
    _scale_rows(self, self.reduce_deferred)


def _rows_from_the_start_of_the_piece(self: Optimizer, factors: Mapping[str, Tensor]) -> None:
    whole = self.segments
    self.segments = [dataclasses.replace(s, low=0, high=s.high - s.low) if s.name in factors else s for s in whole]
    _scale_rows(self, factors)
    self.segments = whole


def _capped_on_the_first_rank(self: LanguageModelHead, x: Tensor, weight: Tensor) -> Tensor:
    if self.build.mesh.tp.is_first:
        return _logits(self, x, weight)
    build, bare = self.build, dataclasses.replace(self.build.model, final_logit_softcap=None)
    self.build = dataclasses.replace(build, model=bare)
    found = _logits(self, x, weight)
    self.build = build
    return found


def _stretched_by_the_rank(positions: Tensor, config: Any, head_size: int, *, dtype: torch.dtype, pairs: bool) -> Any:
    growth = dataclasses.replace(config, mscale=config.mscale + dist.get_rank())
    return _rotary_table(positions, growth, head_size, dtype=dtype, pairs=pairs)


VARIANTS: tuple[Defect, ...] = (
    Defect(
        "windows are counted from the first layer of each stage",
        (("pp2 vpp2 mb2", "windows"),),
        ((stages, "stage_specs_of_run", _pattern_of_the_stage),),
    ),
    Defect(
        "layers without rotations are counted from the first layer of each stage",
        (("pp4 mb2", "some-rope"),),
        ((stages, "stage_specs_of_run", _pattern_of_the_stage),),
    ),
    Defect(
        "tensor ranks use the sinks of the first rank's heads",
        (("tp2 mb4", "gpt-oss-dense"), ("tp4 sp mb4", "gpt-oss-dense")),
        ((SelfAttention, "_attention_sink_logits", _sinks_of_the_first_rank),),
    ),
    Defect(
        "gradients of sinks are summed over tensor ranks",
        (("tp2 mb4", "gpt-oss-dense"), ("tp2 sp mb4", "sinks-mqa")),
        ((finalize, "sum_replicated_grads", _sinks_like_norms),),
    ),
    Defect(
        "recomputation loses the gradients of sinks",
        (("recompute-all-parts tp2 sp mb4", "gpt-oss-dense"),),
        ((attention, "recompute", _sinks_are_not_kept),),
    ),
    Defect(
        "logits are capped on the first tensor rank only",
        (("tp2 sp pp2 native mb2", "caps"),),
        ((LanguageModelHead, "logits", _capped_on_the_first_rank),),
    ),
    Defect(
        "rotations of yarn grow differently on each rank",
        (("tp2 sp mb4", "yarn"),),
        ((rope, "rotary_table", _stretched_by_the_rank),),
    ),
    Defect(
        "QK-clip sees the scores of the rank's own samples",
        (("dp2", "qk-clip-gqa"),),
        ((qk_clip, "collectives", collectives_with(all_reduce=lambda tensor, axis, op: tensor)),),
    ),
    Defect(
        "QK-clip sees the scores of the rank's own query heads",
        (("tp4 mb4", "qk-clip-gqa"),),
        ((qk_clip, "collectives", collectives_with(all_gather=_own_heads_only)),),
    ),
    Defect(
        "QK-clip scales a key head by one of its query heads",
        (("dp2", "qk-clip-gqa"), ("tp4 mb4", "qk-clip-gqa")),
        ((SelfAttention, "qk_clip_weight_factors", _each_head_alone),),
    ),
    Defect(
        "QK-clip comes when the new weights have gone round",
        (("tp4 sp dp2 zero bucket400", "qk-clip"),),
        (
            (Optimizer, "_scale_weight_rows", _nothing_yet),
            (Optimizer, "_write_weights", _scaled_when_all_have_gone_round),
        ),
    ),
    Defect(
        "QK-clip counts rows from the start of the rank's own piece",
        (("tp4 sp dp2 zero bucket400", "qk-clip"),),
        ((Optimizer, "_scale_weight_rows", _rows_from_the_start_of_the_piece),),
    ),
)
