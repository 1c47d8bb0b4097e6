"""Mistakes that distributed training is known for, each as a small patch of our own code.

`planted(name)` makes the mistake while its block runs; every rank of a pool plants it for itself. `rows` says which rows
of the table must notice. A defect that no row notices means that the table is blind there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.distributed import ddp, finalize, fsdp
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.distributed.ddp import DataParallel
from megatron.core.distributed.fsdp import FullySharded
from megatron.core.models import output_heads, stage_model
from megatron.core.models.bert import BERTModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.t5 import T5Model
from megatron.core.optimizer import clip, rule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.rule import ParamGroup
from megatron.core.parallel import collectives, recompute, rng
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import FusedWeightSegment
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.pipeline_parallel.executor import _ScriptRunner
from megatron.core.tensor_parallel import cross_entropy, linear
from megatron.core.tensor_parallel.embedding import PositionEmbeddingTable, VocabParallelEmbedding
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.transformer import stack
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.stack import TransformerStack
from megatron.training.state import trainer as stages
from megatron.training.state.step import StepWork
from tests.helpers.lazy_collectives import lazy_collectives
from tests.helpers.training import Held, train_here
from tests.parity.adapter_defects import ADAPTERS
from tests.parity.attention_defects import VARIANTS
from tests.parity.context_defects import CONTEXT
from tests.parity.defect import Defect, collectives_with, nothing, sum_replicated_but
from tests.parity.expert_defects import EXPERTS
from tests.parity.hybrid_defects import HYBRIDS
from tests.parity.latent_defects import LATENTS
from tests.parity.overlap_defects import OVERLAPS
from tests.parity.rounding_defects import ROUNDING
from tests.parity.routing_defects import ROUTING
from tests.parity.update_defects import UPDATES
from tests.parity.vision_defects import VISION

_make_column = LayerBuildContext.make_column_linear


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Make the mistake inside the block, and take it back."""
    with ExitStack() as stack:
        for owner, attribute, replacement in next(defect for defect in DEFECTS if defect.name == name).patches:
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


def train_planted_here(name: str, changes: dict[str, Any], steps: int) -> tuple[list[float], list[float], Held]:
    """On every rank: train with the mistake, over collectives that are complete only once they were waited for."""
    with planted(name), lazy_collectives("on_wait"):
        return train_here(changes, steps)


# Sums that layouts ask for.


def _sum_shared_heads_over_everyone(segments: list[OwnedSegment], mesh: Mesh) -> None:
    for segment in segments:
        for low, high, _, _ in finalize.ranges_replicated_over_tensor(segment, mesh):
            collectives.all_reduce(segment.grad[low:high], mesh.tp)


# The norm, and what it is used for.

_counted_ranges, _global_norm, _update = (
    clip.gradient_ranges_counted_once,
    clip.global_norm,
    Optimizer._apply_update_rules,
)
_group_of, _set_rates = rule.param_group_of, Optimizer.set_rates


def _count_tied_twice(segment: OwnedSegment, mesh: Mesh) -> Iterator[tuple[int, int]]:
    return _counted_ranges(dataclasses.replace(segment, spec=dataclasses.replace(segment.spec, tied=False)), mesh)


def _count_copies(segment: OwnedSegment, mesh: Mesh) -> list[tuple[int, int, int, bool]]:
    return []


def _clip_by_own_norm(self: Optimizer, factor: float | Tensor) -> None:
    alone = dataclasses.replace(self.mesh, model=Axis("model"), world=Axis("world"))
    norm = _global_norm(self.segments, alone)
    _update(self, min(1.0, self.config.clip_grad / float(norm)))


def _decay_everything_on_the_last_rank(spec: Any, config: Any) -> ParamGroup:
    group = _group_of(spec, config)
    return dataclasses.replace(group, decays=True) if dist.get_rank() == dist.get_world_size() - 1 else group


def _one_rate_on_the_last_rank(
    self: Optimizer, lr: float, weight_decay: float, decoupled_lr: float | None = None
) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    _set_rates(self, lr, weight_decay, lr if last else decoupled_lr)


# Initial values and what a stage holds.

_materialize, _seed_of, _stages_of, _groups = (
    stage_model.materialize_parameters,
    rng.derive_seed,
    stages.stage_specs_of_run,
    TransformerStack._recompute_groups,
)


def _second_home_of_its_own(module: GPTModel, mesh: Mesh, seed: int, **keywords: Any) -> None:
    _materialize(module, mesh, seed, **keywords)
    if module.stage.has_output and not module.stage.has_embedding:
        module.output_layer.weight.data.mul_(1.001)


def _seed_of_the_rank(*words: object) -> int:
    return _seed_of(*words, dist.get_rank())


def _swap_chunks(config: Any) -> tuple[StageSpec, ...]:
    specs = _stages_of(config)
    ranks = specs[-1].rank + 1
    return tuple(dataclasses.replace(spec, layers=specs[(spec.index + ranks) % len(specs)].layers) for spec in specs)


def _turn_the_way_back(config: Any) -> tuple[StageSpec, ...]:
    specs = _stages_of(config)
    half = len(specs) // 2
    return specs[:half] + tuple(
        dataclasses.replace(spec, layers=other.layers)
        for spec, other in zip(specs[half:], specs[: half - 1 : -1], strict=True)
    )


def _skip_the_last_layer(self: TransformerStack) -> list[tuple[list[Any], bool]]:
    found = _groups(self)
    return found if self.final_layernorm is None else [*found[:-1], (found[-1][0][:-1], found[-1][1])]


def _one_part(build: Any, size: int, parts: tuple[FusedWeightSegment, ...], **keywords: Any) -> ColumnParallelLinear:
    whole = (FusedWeightSegment(sum(part.size for part in parts)),)
    return _make_column(build, size, whole if len(parts) == 3 else parts, **keywords)  # queries, keys and values


# Forward and backward of cut layers.


def _bias_before_the_sum(self: RowParallelLinear, x: Tensor) -> Tensor:
    return self.region.reduce_from_region(F.linear(x, self.weight, self.bias))


def _keep_own_piece(output: Tensor, whole: Tensor, axis: Axis, op: str = "sum") -> None:
    output.copy_(collectives.local_chunk(whole, axis))


def _repeat_own_piece(output: Tensor, piece: Tensor, axis: Axis) -> None:
    output.copy_(piece.repeat(axis.size, *(1 for _ in piece.shape[1:])))


_all_gather_matmul = linear.all_gather_matmul


def _pieces_in_order_of_arrival(x: Tensor, matrix: Tensor, bias: Tensor | None, axis: Axis) -> tuple[Tensor, Tensor]:
    product, whole = _all_gather_matmul(x, matrix, bias, axis)
    pieces = product.chunk(axis.size)
    return torch.cat([pieces[(axis.rank - step) % axis.size] for step in range(axis.size)]), whole


def _own_product(x: Tensor, matrix: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[axis.rank].matmul(matrix)


def _embed_foreign_ids(self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
    local = ids.t() - self.first
    return self.region.reduce_from_region(F.embedding(local.clamp(0, self.rows - 1), self.weight))


def _positions_of_the_first_piece(self: PositionEmbeddingTable, positions: Tensor) -> Tensor:
    return F.embedding(positions.t()[: self.region.local_sequence_length(positions.shape[1])], self.weight)


def _softmax_with_padding(logits: Tensor, targets: Tensor, axis: Axis, true_vocab_size: int) -> Tensor:
    return cross_entropy.vocab_parallel_cross_entropy(logits, targets, axis, logits.shape[-1] * axis.size)


def _blocks_with_padding(kernel: Any, *given: Any, true_vocab_size: int, region: Any, **more: Any) -> Tensor:
    return cross_entropy.fused_linear_cross_entropy(
        kernel, *given, true_vocab_size=len(given[1]) * region.axis.size, region=region, **more
    )


def _own_piece_alone(piece: Tensor, axis: Axis) -> Tensor:
    return piece


def _own_maximum(tensor: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    return tensor if op == "max" else collectives.all_reduce(tensor, axis, op)


def _gather_backwards(piece: Tensor, axis: Axis) -> Tensor:
    return torch.cat(collectives.all_gather(piece, axis).chunk(axis.size)[::-1])


_forward = GPTModel.forward


def _forget_documents(self: GPTModel, *, documents: Tensor | None = None, **keywords: Any) -> Tensor:
    return _forward(self, documents=documents if self.embedding is not None else None, **keywords)


# Encoders, and what travels with their messages.

_bert, _t5, _bias_of = BERTModel.forward, T5Model.forward, T5Model._relative_score_bias


def _forget_padding(self: BERTModel, *, padding: Tensor | None, **keywords: Any) -> Any:
    return _bert(self, padding=padding if self.embedding is not None else None, **keywords)


def _forget_padding_of_the_memory(self: T5Model, *, encoder_padding: Tensor | None, **keywords: Any) -> Any:
    return _t5(self, encoder_padding=encoder_padding if self.encoder is not None else None, **keywords)


def _let_go_of(place: int) -> Callable[..., Any]:
    def forward(self: T5Model, *, message: tuple[Tensor, ...] | None = None, **keywords: Any) -> Any:
        if message is not None:
            message = tuple(tensor.detach() if index == place else tensor for index, tensor in enumerate(message))
        return _t5(self, message=message, **keywords)

    return forward


def _tables_swapped(self: T5Model, tables: list[Tensor], x: Tensor, *, causal: bool) -> Tensor | None:
    return _bias_of(self, [table.flip(0) for table in tables] if self.embedding is None else tables, x, causal=causal)


def _recompute_first_input_only(
    function: Any, streams: Any, x: Tensor, *others: Tensor | None, axis: Axis | None = None
) -> Tensor:
    return recompute.recompute(function, streams, x, *(None if o is None else o.detach() for o in others), axis=axis)


# Microbatches.

_run_backward, _batch, _before_backward, _scaled = (
    _ScriptRunner._backward,
    StepWork._microbatch,
    StepWork.before_backward,
    StepWork._scale_loss,
)


def _another_activation(self: _ScriptRunner, action: Any) -> Any:
    mine, other = (action.stage, action.microbatch), (action.stage, action.microbatch + 1)
    if other in self.saved and action.stage < self.script.stages - 1:
        self.saved[mine], self.saved[other] = self.saved[other], self.saved[mine]
    return _run_backward(self, action)


def _piece_of_the_input(x: Tensor, gradient: Tensor, region: Any, bias: bool, into: Any) -> tuple[Tensor | None, ...]:
    first = gradient.tensor_split(region.axis.size)[region.axis.rank] if region.sequence_parallel else gradient
    return linear._weight_and_bias_gradients(x, first, bias=bias, into=into)


def _another_batch_at_the_end(self: StepWork, microbatch: int) -> Any:
    ends = self.trainer.stages[-1].stage.has_output
    return _batch(self, microbatch ^ 1 if ends else microbatch)


def _reduce_one_early(self: StepWork, stage: int, microbatch: int, last: bool) -> None:
    _before_backward(self, stage, microbatch, microbatch == self.num_microbatches - 2)


def _mean_of_means(self: StepWork, total: Tensor, count: Tensor) -> Tensor:
    return total / count * (self._scale / (self.num_microbatches * self.trainer.run.mesh.dp.size))


def _own_count(self: StepWork) -> Tensor:
    return self._expected_tokens() / (self.count * self.trainer.run.mesh.dp.size)


# Data parallelism.

_make_buckets, _start_gather, _init = ddp.make_buckets, DataParallel.start_gather, DataParallel.__init__
_init_shares, _share = FullySharded.__init__, fsdp._owned_segments


def _buckets_over_tensor_ranks(module: GPTModel, mesh: Mesh, **keywords: Any) -> Any:
    return _make_buckets(module, dataclasses.replace(mesh, dp_cp=mesh.tp), **keywords)


def _always_average(self: DataParallel, *arguments: Any, **keywords: Any) -> None:
    _init(self, *arguments, **{**keywords, "average": True})


def _keep_the_last_piece(self: DataParallel) -> None:
    before = [bucket.data.clone() for bucket in self.buckets]
    _start_gather(self)
    for bucket, old in zip(self.buckets, before, strict=True):
        low = bucket.data.numel() // bucket.axis.size * (bucket.axis.size - 1)
        if not bucket.axis.is_last:
            bucket.data[low:] = old[low:]


def _keep_gradients(self: DataParallel) -> None:
    self._missing, self._launched = None, 0


def _always_average_shares(self: FullySharded, *arguments: Any, **keywords: Any) -> None:
    _init_shares(self, *arguments, **{**keywords, "average": True})


def _update_a_copy(*arguments: Any) -> list[OwnedSegment]:
    return [dataclasses.replace(share, data=share.data.clone()) for share in _share(*arguments)]


def _count_shares_of_the_first_rank(*arguments: Any) -> list[OwnedSegment]:
    return [dataclasses.replace(share, sharded=False) for share in _share(*arguments)]


def _forget_the_divisor(self: StepWork) -> float:
    return self.trainer.optimizer.scaler.scale


def _rows_of_all_ranks(
    param: torch.nn.Parameter, ranks: int, rank: int, rows: Callable[..., tuple[int, int]] = fsdp._owned_flat_range
) -> tuple[int, int]:
    """`fsdp._owned_flat_range` as if every rank were a data-parallel one."""
    return rows(param, dist.get_world_size(), dist.get_rank())


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "norm gradients are not summed under sequence parallelism",
        (("tp2 sp", "gpt"), ("tp2 sp mb4", "rope-interleaved")),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: "layernorm" in s.name)),),
    ),
    Defect(
        "row bias gradients are not summed under sequence parallelism",
        (("tp2 sp", "gpt"),),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: s.name.endswith(("proj.bias", "fc2.bias")))),),
    ),
    Defect(
        "position embedding gradients are not summed under sequence parallelism",
        (("tp2 sp", "gpt"),),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: "position" in s.name)),),
    ),
    Defect(
        "query and key norm gradients are not summed over tensor ranks",
        (("tp2 mb4", "qk-norm-decays"),),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: s.spec.kind == "qk_norm")),),
    ),
    Defect(
        "gradients of key/value head copies are not summed",
        (("tp4 mb4", "mqa"),),
        ((finalize, "sum_shared_kv_head_grads", nothing),),
    ),
    Defect(
        "key/value head copies are summed over all ranks, not over those that share",
        (("tp4 sp mb2", "gqa2"),),
        ((finalize, "sum_shared_kv_head_grads", _sum_shared_heads_over_everyone),),
    ),
    Defect(
        "the tied matrix's gradients are not summed over its two stages",
        (("pp2", "gpt"), ("pp2 vpp2", "gpt"), ("pp2 zbv", "gpt")),
        ((finalize, "sum_tied_grads", nothing),),
    ),
    Defect(
        "the norm counts replicated parameters on every tensor rank",
        (("tp2", "gpt"), ("tp2 sp", "gpt")),
        ((clip, "is_replicated_over_tensor", lambda spec: False),),
    ),
    Defect(
        "the norm counts the tied matrix on both stages",
        (("pp2", "gpt"),),
        ((clip, "gradient_ranges_counted_once", _count_tied_twice),),
    ),
    Defect(
        "the norm counts both homes of a tied matrix on one rank",
        (("pp2 zbv", "gpt"),),
        ((clip, "without_tied_duplicates", list),),
    ),
    Defect(
        "the norm counts every copy of a key/value head",
        (("tp4 mb4", "mqa"),),
        ((clip, "ranges_replicated_over_tensor", _count_copies),),
    ),
    Defect(
        "gradients are clipped by each rank's own norm",
        (("tp2", "gpt"),),
        ((Optimizer, "_apply_update_rules", _clip_by_own_norm),),
    ),
    Defect(
        "weight decay reaches norms and biases on one stage",
        (("pp2", "gpt"),),
        ((rule, "param_group_of", _decay_everything_on_the_last_rank),),
    ),
    Defect(
        "the decoupled learning rate is missing on one stage",
        (("pp2", "decoupled"),),
        ((Optimizer, "set_rates", _one_rate_on_the_last_rank),),
    ),
    Defect(
        "the tied matrix starts differently on its two stages",
        (("pp2", "gpt"),),
        ((stage_model, "materialize_parameters", _second_home_of_its_own),),
    ),
    Defect(
        "initial values are drawn by rank instead of by name",
        (("tp2", "gpt"), ("pp2", "gpt")),
        ((rng, "derive_seed", _seed_of_the_rank),),
    ),
    Defect(
        "the chunks of a rank are in the wrong order",
        (("pp2 vpp2", "gpt"),),
        ((stages, "stage_specs_of_run", _swap_chunks),),
    ),
    Defect(
        "the way back begins on the first rank",
        (("pp4 zbv layout=E|t|t||t||t|L mb2", "llama"),),
        ((stages, "stage_specs_of_run", _turn_the_way_back),),
    ),
    Defect(
        "a stage skips a layer", (("pp2", "gpt"),), ((TransformerStack, "_recompute_groups", _skip_the_last_layer),)
    ),
    Defect(
        "queries, keys and values are cut as one matrix",
        (("tp2", "gpt"),),
        ((LayerBuildContext, "make_column_linear", _one_part),),
    ),
    Defect(
        "a row layer adds its bias on every rank before the sum",
        (("tp2", "gpt"),),
        ((RowParallelLinear, "forward", _bias_before_the_sum),),
    ),
    Defect(
        "a column layer does not sum its input gradient",
        (("tp2", "gpt"),),
        ((linear, "collectives", collectives_with(start_all_reduce=nothing)),),
    ),
    Defect(
        "a column layer keeps its piece of the input gradient without summing",
        (("tp2 sp", "gpt"),),
        ((linear, "collectives", collectives_with(start_reduce_scatter=_keep_own_piece)),),
    ),
    Defect(
        "a column layer's weight gradient sees one piece of the sequence",
        (("tp2 sp", "gpt"),),
        ((linear, "collectives", collectives_with(start_all_gather=_repeat_own_piece)),),
    ),
    Defect(
        "pieces that travel are laid down in the order in which they arrive",
        (("tp4 rings-all mb4", "llama"), ("tp2 rings-in mb4", "gqa2")),
        ((linear, "all_gather_matmul", _pieces_in_order_of_arrival),),
    ),
    Defect(
        "a sum that travels forgets what it meets",
        (("tp2 rings-out", "untied"), ("tp4 rings-all mb4", "llama")),
        ((linear, "matmul_reduce_scatter", _own_product),),
    ),
    Defect(
        "ids of another rank are embedded too",
        (("tp2", "gpt"),),
        ((VocabParallelEmbedding, "forward", _embed_foreign_ids),),
    ),
    Defect(
        "positions restart on every piece of the sequence",
        (("tp2 sp", "gpt"),),
        ((PositionEmbeddingTable, "forward", _positions_of_the_first_piece),),
    ),
    Defect(
        "padded vocabulary rows take part in the softmax",
        (("tp2 sp native vocab96 mb4", "untied"), ("tp2 native", "gpt")),
        ((output_heads, "vocab_parallel_cross_entropy", _softmax_with_padding),),
    ),
    Defect(
        "ranks subtract different maxima in the softmax",
        (("tp2 native", "gpt"),),
        ((cross_entropy, "collectives", collectives_with(all_reduce=_own_maximum)),),
    ),
    Defect(
        "padded vocabulary rows take part in the softmax of blocks",
        (("tp2 sp vocab96 mb4", "untied"), ("tp2", "gpt")),
        ((output_heads, "fused_linear_cross_entropy", _blocks_with_padding),),
    ),
    Defect(
        "the softmax of blocks is of a rank's own words",
        (("tp2", "gpt"), ("tp2 sp vocab96 mb4", "untied")),
        ((cross_entropy, "collectives", collectives_with(all_gather=_own_piece_alone)),),
    ),
    Defect(
        "documents are kept apart on the first stage only",
        (("pp4 mb2", "packed-rope"),),
        ((GPTModel, "forward", _forget_documents),),
    ),
    Defect(
        "a saved input is gathered in the wrong order",
        (("recompute-uniform tp2 distribute-saved", "gpt"),),
        ((recompute, "collectives", collectives_with(all_gather=_gather_backwards)),),
    ),
    Defect(
        "recomputation draws other dropout",
        (("recompute-uniform recompute-layers2", "dropout"), ("recompute-all-parts", "dropout")),
        ((RandomStreams, "load", nothing),),
    ),
    Defect(
        "a gradient meets another microbatch's activations",
        (("pp2", "gpt"), ("pp2 gpipe", "gpt"), ("pp2 ep2 dp2 turns zero overlap-reduce bucket600", "moe-shared-bias")),
        ((_ScriptRunner, "_backward", _another_activation),),
    ),
    Defect(
        "a weight's gradient waits and is forgotten",
        (("pp2 zb", "gpt"), ("pp2 ep2 dp2 delay alltoall zero overlap-reduce bucket600", "moe-shared")),
        ((WeightGradStore, "pop", nothing),),
    ),
    Defect(
        "a weight's gradient that waits for travelling tokens is forgotten",
        (("tp2 sp ep2 dp2 turns delay", "moe-shared-bias"),),
        (
            (
                WeightGradStore,
                "flush",
                lambda self: self._delayed.update({key: [] for key in self._delayed}) if self.is_delaying else None,
            ),
        ),
    ),
    Defect(
        "inputs that wait for their weights are pieces of the sequence",
        (("tp2 sp pp2 dp2 zb zero overlap-reduce overlap-gather bucket600", "gpt"),),
        ((linear, "_gather_then_weight_gradients", _piece_of_the_input),),
    ),
    Defect(
        "the last stage reads another microbatch's labels",
        (("pp2", "gpt"),),
        ((StepWork, "_microbatch", _another_batch_at_the_end),),
    ),
    Defect(
        "gradients are reduced one microbatch early",
        (("dp2 overlap-reduce bucket500", "gpt"),),
        ((StepWork, "before_backward", _reduce_one_early),),
    ),
    Defect(
        "the loss is a mean of means over uneven microbatches",
        (("mb2", "gpt"), ("dp2", "gpt")),
        ((StepWork, "_scale_loss", _mean_of_means), (StepWork, "remaining_gradient_scale", lambda self: 1.0)),
    ),
    Defect(
        "tokens are counted on each data-parallel rank alone",
        (("dp2", "gpt"),),
        ((StepWork, "remaining_gradient_scale", _own_count),),
    ),
    Defect(
        "gradients are reduced over tensor instead of data ranks",
        (("tp2 dp2", "gpt"),),
        ((ddp, "make_buckets", _buckets_over_tensor_ranks),),
    ),
    Defect("gradients are averaged and scaled", (("dp2", "gpt"),), ((DataParallel, "__init__", _always_average),)),
    Defect(
        "averaged gradients are not scaled",
        (("dp2 average", "gpt"),),
        ((StepWork, "_loss_scale", _forget_the_divisor),),
    ),
    Defect(
        "one rank's new parameters never arrive",
        (("dp2 zero", "sgd"), ("dp2 zero", "unclipped")),
        ((DataParallel, "start_gather", _keep_the_last_piece),),
    ),
    Defect(
        "gradient buffers are not zeroed between steps",
        (("dp2", "gpt"), ("mb2", "gpt")),
        ((DataParallel, "zero_gradients", _keep_gradients),),
    ),
    Defect(
        "a matrix forgets what it has added for earlier microbatches",
        (("dp2", "gpt"), ("mb2", "gpt")),
        ((MainGrad, "add_product", lambda self, left, right: self.total.copy_(left.mm(right))),),
    ),
    Defect(
        "gradients of shares are averaged and scaled",
        (("dp2 fsdp", "gpt"),),
        ((FullySharded, "__init__", _always_average_shares),),
    ),
    Defect(
        "gradients of shares are not zeroed between steps",
        (("dp2 fsdp", "gpt"),),
        ((FullySharded, "zero_gradients", nothing),),
    ),
    Defect(
        "gradients of shares are those of the last microbatch",
        (("dp2 fsdp", "gpt"), ("pp2 dp2 fsdp mb2", "gpt")),
        ((FullySharded, "before_last_backward", FullySharded.zero_gradients),),
    ),
    Defect("layers are gathered from old shares", (("dp2 fsdp", "gpt"),), ((fsdp, "_owned_segments", _update_a_copy),)),
    Defect(
        "the norm counts the shares of the first rank only",
        (("dp2 fsdp", "gpt"), ("tp2 sp dp2 fsdp mb2", "gqa2")),
        ((fsdp, "_owned_segments", _count_shares_of_the_first_rank),),
    ),
    Defect(
        "experts are cut over all data-parallel ranks",
        (("ep2 dp4 fsdp alltoall", "moe-no-aux"),),
        ((fsdp, "_fsdp_row_placement", nothing), (fsdp, "_owned_flat_range", _rows_of_all_ranks)),
    ),
    Defect(
        "padding is left out on the first stage only",
        (("pp4 mb2", "bert-published"), ("pp2 vpp2", "bert")),
        ((BERTModel, "forward", _forget_padding),),
    ),
    Defect(
        "stages without encoder layers see padding of the memory",
        (("pp4 layout=Ett|tt|t|tL mb2", "t5-v1.0"),),
        ((T5Model, "forward", _forget_padding_of_the_memory),),
    ),
    Defect(
        "the gradient of the decoder's embedding does not come back",
        (("pp2", "t5"), ("pp2 vpp3", "t5-v1.0")),
        ((T5Model, "forward", _let_go_of(0)),),
    ),
    Defect(
        "the gradient of the memory does not come back",
        (("pp2 vpp3", "t5-v1.0"), ("pp2 first-layers4", "t5-v1.1")),
        ((T5Model, "forward", _let_go_of(1)),),
    ),
    Defect(
        "the gradient of the bias tables does not come back",
        (("pp2 vpp3", "t5-v1.0"), ("pp2 first-layers4", "t5-v1.1")),
        ((T5Model, "forward", _let_go_of(2)),),
    ),
    Defect(
        "later stages take the encoder's bias for the decoder's",
        (("pp2 first-layers4", "t5-v1.1"),),
        ((T5Model, "_relative_score_bias", _tables_swapped),),
    ),
    Defect(
        "recomputation loses the gradients of memory and bias",
        (("recompute-uniform recompute-layers2 pp2 mb2", "t5-v1.0"),),
        ((stack, "recompute", _recompute_first_input_only),),
    ),
    Defect(
        "each tensor rank pools the first position of its own piece",
        (("tp2 sp mb2", "bert"), ("tp4 sp mb4", "bert-published")),
        ((TensorParallelRegion, "replicate_first_position", lambda self, x: x[0]),),
    ),
    Defect(
        "the masked-word transform's gradients are not summed under sequence parallelism",
        (("tp2 sp mb4", "bert-words"),),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: "lm_head.dense" in s.name)),),
    ),
    Defect(
        "gradients of token types are not summed under sequence parallelism",
        (("tp2 sp mb2", "bert"),),
        ((finalize, "sum_replicated_grads", sum_replicated_but(lambda s: "tokentype" in s.name)),),
    ),
    *VARIANTS,
    *CONTEXT,
    *EXPERTS,
    *LATENTS,
    *ROUTING,
    *UPDATES,
    *ADAPTERS,
    *HYBRIDS,
    *VISION,
    *ROUNDING,
    *OVERLAPS,
)
