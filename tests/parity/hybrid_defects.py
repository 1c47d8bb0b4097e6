"""Mistakes around layers with a state, for the table of `defects.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.mixers.gated_delta_net import DeltaNetSizes
from megatron.core.config.mixers.mamba import MambaSizes
from megatron.core.config.settings.model import ModelConfig, PositionConfig
from megatron.core.context_parallel.head_exchange import HeadExchange
from megatron.core.context_parallel.sequence_sharded_kernels import SequenceShardedKernels
from megatron.core.distributed import finalize
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.models.mtp import MultiTokenPrediction
from megatron.core.parallel.spec import FusedWeightSegment, Initial
from megatron.core.tensor_parallel.linear import ColumnParallelLinear
from megatron.core.transformer.blocks import Block
from megatron.core.transformer.context import rope
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.mixers import gated_delta_net, mamba
from megatron.core.transformer.mixers.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.mixers.mamba import GatedNorm, MambaMixer
from megatron.core.transformer.sublayers import MultipliedMamba
from tests.parity.defect import Defect, sum_replicated_but

_make_column = LayerBuildContext.make_column_linear

_sizes_of, _log_uniform, _borders, _norm = (
    MambaSizes.from_model,
    mamba.log_of_uniform_initializer,
    mamba.document_segment_ids,
    GatedNorm.forward,
)
_frequencies = rope.rotary_frequencies
_last_inputs, _states_before = SequenceShardedKernels._halo_inputs, SequenceShardedKernels._states_before_chunks
_split, _delta_sizes_of = MambaMixer._split_projection, DeltaNetSizes.from_model
_run_depth = MultiTokenPrediction.run_depth
_share, _order, _mix, _mix_delta = (
    HeadExchange.shard_parameter,
    HeadExchange._sequence_permutation,
    MambaMixer._conv_and_scan,
    GatedDeltaNet._conv_and_scan,
)


def _in_one_piece(
    build: Any, size: int, pieces: tuple[FusedWeightSegment, ...], **settings: Any
) -> ColumnParallelLinear:
    whole = (FusedWeightSegment(sum(piece.size for piece in pieces)),)
    return _make_column(build, size, whole if len(pieces) == 5 else pieces, **settings)  # z, x, B, C and dt


def _without_segments(mix: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The mixer's convolution and scan, of which these kernels are not told where documents begin."""

    def changed(self: Any, parts: Any, exchange: Any, segments: Any, state: Any) -> Any:
        whole = self.build
        kernels = {name: getattr(whole.kernels, name) for name in names}

        def blind(call: Callable[..., Any]) -> Callable[..., Any]:
            def of_one_text(*inputs: Any, **more: Any) -> Any:
                known = (*inputs[:3], None, *inputs[4:]) if len(inputs) > 3 and "segments" not in more else inputs
                return call(*known, **{**more, **({"segments": None} if "segments" in more else {})})

            return of_one_text

        self.build = replace(
            whole, kernels=replace(whole.kernels, **{name: blind(call) for name, call in kernels.items()})
        )
        try:
            return mix(self, parts, exchange, segments, state)
        finally:
            self.build = whole

    return changed


def _as_they_come(self: HeadExchange, device: torch.device) -> Tensor:
    return torch.arange(len(_order(self, device)), device=device)


def _first_group_for_all(self: GatedNorm, y: Tensor, z: Tensor) -> Tensor:
    groups, self.groups = self.groups, 1
    try:
        return _norm(self, y, z)
    finally:
        self.groups = groups


def _norm_before_the_gate(self: GatedNorm, y: Tensor, z: Tensor) -> Tensor:
    return _norm(self, y, torch.full_like(z, 1.2784645)) * F.silu(z)  # SiLU of that number is 1


def _without_limits(model: ModelConfig) -> MambaSizes:
    return replace(_sizes_of(model), step_limits=(0.0, float("inf")))


def _in_half_precision(low: float, high: float) -> Initial:
    whole = _log_uniform(low, high)
    return lambda shape, generator: whole(shape, generator).bfloat16().float()


def _groups_in_turns(self: HeadExchange, x: Tensor, heads: int, copies: int = 1) -> Tensor:
    if self.axis.size == 1 or copies == 1:
        return _share(self, x, heads, copies)
    by_head = x.unflatten(0, (heads, -1)).repeat(copies, *[1] * x.dim())
    return by_head.chunk(self.axis.size)[self.axis.rank].flatten(0, 1)


def _gradient_of_one_rank(self: HeadExchange, x: Tensor, heads: int, copies: int = 1) -> Tensor:
    share = _share(self, x, heads, copies)
    return share.detach() if self.axis.rank else share


def _borders_of_pieces(mask: Any) -> Tensor | None:
    segments = _borders(mask)
    if segments is None:
        return None
    places = torch.arange(segments.shape[1], device=segments.device)
    return segments + (places >= segments.shape[1] // 2)


def _nothing_before(self: SequenceShardedKernels, x: Tensor, width: int, segments: Tensor | None) -> list[Tensor]:
    return [torch.zeros_like(one) for one in _last_inputs(self, x, width, segments)]


def _without_gradient(find: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda *inputs: [one.detach() for one in find(*inputs)]


def _own_only(self: SequenceShardedKernels, made: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.zeros_like(one) for one in made]


def _layers_of_the_first_depth(self: MultiTokenPrediction, *inputs: Any) -> Tensor:
    layers, self.layers = self.layers, self.layers[:1]
    try:
        return _run_depth(self, *inputs)
    finally:
        self.layers = layers


def _one_after_the_other(self: Block, normed: Tensor, context: Any, bias: Any = None) -> Tensor:
    assert self.self_attention is not None and self.mixer is not None
    attended = self.self_attention(normed, context, bias)
    return attended + self.mixer(normed + attended, context)


def _factors_one_place_off(self: MultipliedMamba, projected: Tensor) -> Any:
    factors = self.build.model.multipliers.mamba_factors
    parts = _split(self, projected)
    return tuple(part * factor for part, factor in zip(parts, (*factors[1:], *factors[:1]), strict=True))


def _rates_below_one(model: ModelConfig) -> DeltaNetSizes:
    return replace(_delta_sizes_of(model), largest_rate=1.0)


def _whole_heads_turned(config: PositionConfig, head_size: int, *inputs: Any) -> Tensor:
    return _frequencies(replace(config, rotary_percent=1.0), head_size, *inputs)


def _output_norms(segment: OwnedSegment) -> bool:
    return "out_norm" in segment.spec.name


HYBRIDS: tuple[Defect, ...] = (
    Defect(
        "z, x, B, C and dt are cut as one piece",
        (("tp2", "hybrid"), ("tp2 sp", "hybrid")),
        ((LayerBuildContext, "make_column_linear", _in_one_piece),),
    ),
    Defect(
        "the convolution sees the document before",
        (("tp2 sp", "hybrid-packed"), ("cp2", "hybrid-packed")),
        ((MambaMixer, "_conv_and_scan", _without_segments(_mix, "causal_conv")),),
    ),
    Defect(
        "the state of a document goes on in the next",
        (("tp2 sp", "hybrid-packed"), ("cp2", "hybrid-packed")),
        ((MambaMixer, "_conv_and_scan", _without_segments(_mix, "selective_scan")),),
    ),
    Defect(
        "a delta net's state goes on in the next document",
        (("tp2 sp", "hybrid-packed"),),
        ((GatedDeltaNet, "_conv_and_scan", _without_segments(_mix_delta, "delta_rule_scan")),),
    ),
    Defect(
        "the scan sees positions in zigzag order",
        (("cp2", "hybrid"), ("cp2", "delta")),
        ((HeadExchange, "_sequence_permutation", _as_they_come),),
    ),
    Defect(
        "the norm is over all groups of a rank", (("tp2", "hybrid"),), ((GatedNorm, "forward", _first_group_for_all),)
    ),
    Defect("the norm comes before the gate", (("tp2", "hybrid"),), ((GatedNorm, "forward", _norm_before_the_gate),)),
    Defect(
        "the limits of time steps are left out",
        (("tp2", "hybrid-limits"),),
        ((MambaSizes, "from_model", _without_limits),),
    ),
    Defect(
        "decays are held in bf16", (("tp2", "hybrid"),), ((mamba, "log_of_uniform_initializer", _in_half_precision),)
    ),
    Defect(
        "copies of groups stand beside the heads of others",
        (("cp4", "hybrid-two-groups"),),
        ((HeadExchange, "shard_parameter", _groups_in_turns),),
    ),
    Defect(
        "the gradient of the convolution is that of one context rank",
        (("cp2", "hybrid"), ("cp2", "delta")),
        ((HeadExchange, "shard_parameter", _gradient_of_one_rank),),
    ),
    Defect(
        "the gradient of a delta net's output norm is not summed over tensor ranks",
        (("tp2", "delta"), ("tp4 sp", "delta")),
        ((finalize, "sum_replicated_grads", sum_replicated_but(_output_norms)),),
    ),
    Defect(
        "every context rank begins a document of its own",
        (("cp2", "hybrid-packed"), ("cp2", "hybrid-odd-packed")),
        (
            (mamba, "document_segment_ids", _borders_of_pieces),
            (gated_delta_net, "document_segment_ids", _borders_of_pieces),
        ),
    ),
    Defect(
        "the convolution does not see the chunk before",
        (("cp2", "hybrid-odd"), ("cp4", "hybrid-odd-packed")),
        ((SequenceShardedKernels, "_halo_inputs", _nothing_before),),
    ),
    Defect(
        "the inputs before a chunk get no gradient",
        (("cp2", "hybrid-odd"),),
        ((SequenceShardedKernels, "_halo_inputs", _without_gradient(_last_inputs)),),
    ),
    Defect(
        "the states of other context ranks are left out",
        (("cp2", "hybrid-odd"), ("cp4", "hybrid-odd-packed")),
        ((SequenceShardedKernels, "_states_before_chunks", _own_only),),
    ),
    Defect(
        "the states before a chunk get no gradient",
        (("cp2", "hybrid-odd"),),
        ((SequenceShardedKernels, "_states_before_chunks", _without_gradient(_states_before)),),
    ),
    Defect(
        "Mamba-2 beside attention sees what attention adds",
        (("tp2 sp", "parallel"), ("cp2", "parallel")),
        ((Block, "_attention_plus_mamba", _one_after_the_other),),
    ),
    Defect(
        "the factors of z, x, B, C and dt stand one place off",
        (("tp2 sp", "parallel"),),
        ((MultipliedMamba, "_split_projection", _factors_one_place_off),),
    ),
    Defect(
        "the attention of Bamba turns whole heads",
        (("tp2 sp", "bamba"),),
        ((rope, "rotary_frequencies", _whole_heads_turned),),
    ),
    Defect(
        "a delta net writes at rates up to one only",
        (("tp2 sp", "delta-norms"),),
        ((DeltaNetSizes, "from_model", _rates_below_one),),
    ),
    Defect(
        "the layers of one depth of multi-token prediction serve all",
        (("tp2 sp", "hybrid-mtp"), ("pp2", "hybrid-mtp")),
        ((MultiTokenPrediction, "run_depth", _layers_of_the_first_depth),),
    ),
)
