"""Mistakes that cut sequences are known for; rows of `defects.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel import attention as transports
from megatron.core.context_parallel import ring
from megatron.core.context_parallel.attention import UlyssesRingAttention
from megatron.core.context_parallel.ring import QueryKeyChunkPair, RingSettings
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.distributed import ddp
from megatron.core.kernels.ops import blockwise_attention
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.mixers import attention
from megatron.training.data import rebalance as regroup
from megatron.training.state.batch import Batch
from megatron.training.state.step import StepWork
from tests.parity.defect import Defect, collectives_with

# The ring.

_merge, _forward, _backward = (
    blockwise_attention.merge_attention_blocks,
    blockwise_attention.block_attention_forward,
    blockwise_attention.block_attention_backward,
)
_kind, _pairs, _seen = ring._chunk_visibility, ring.visible_chunk_pairs, RingSettings._visible_mask


def _merge_by_sums(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    _, both = _merge(output, lse, more, more_lse)
    seen = (lse > float("-inf")).to(lse.dtype) + (more_lse > float("-inf")).to(lse.dtype)
    return (output + more) / seen.clamp(min=1)[..., None], both


def _merge_into_the_larger(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    return _merge(output, lse, more, more_lse)[0], torch.maximum(lse, more_lse)


def _backward_of_the_block_alone(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, block: Any
) -> Any:
    _, own = _forward(q, k, v, block)
    return _backward(gradient, q, k, v, output, own, block)


def _keep_gradients_where_they_were_found(arriving: Tensor, tensor: Tensor, axis: Axis) -> list[Any]:
    arriving.copy_(tensor)
    return []


def _own_chunk_only(
    queries: tuple[range, range], keys: tuple[range, range], mask: AttentionMaskSpec
) -> list[QueryKeyChunkPair]:
    return [pair for pair in _pairs(queries, keys, mask) if queries == keys or pair.queries.start == 0]


def _future_between_chunks(queries: range, keys: range, mask: AttentionMaskSpec) -> str:
    return (
        _kind(queries, keys, mask) if queries == keys else _kind(queries, keys, dataclasses.replace(mask, causal=False))
    )


def _documents_of_the_own_piece(
    self: RingSettings, source: int, pair: QueryKeyChunkPair, device: torch.device
) -> Tensor:
    documents = self.mask.documents
    if documents is not None:
        own = self.cut.shard(documents, self.axis.rank, dim=1).repeat(1, self.axis.size)
        self = dataclasses.replace(self, mask=dataclasses.replace(self.mask, documents=own))
    return _seen(self, source, pair, device)


def _window_short_across_the_border(
    self: RingSettings, source: int, pair: QueryKeyChunkPair, device: torch.device
) -> Tensor:
    if self.mask.window is not None and (source != self.axis.rank or pair.queries != pair.keys):
        left, right = self.mask.window
        self = dataclasses.replace(self, mask=dataclasses.replace(self.mask, window=(left - 1, right)))
    return _seen(self, source, pair, device)


# The other transports.


def _sum_on_no_rank(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    return collectives.gather_with_split_backward(tensor, axis)


def _heads_of_the_next_rank(self: UlyssesRingAttention, *arguments: Any, **keywords: Any) -> Tensor:
    return _call(
        dataclasses.replace(self, inner=dataclasses.replace(self.inner, rank=(self.inner.rank + 1) % self.inner.size)),
        *arguments,
        **keywords,
    )


_call = UlyssesRingAttention.__call__


# What a rank knows of the whole.


def _places_from_zero(self: LayerBuildContext, held: int) -> Tensor:
    return torch.arange(held, device=self.mesh.device)


_over_context, _looking_ahead, _missing_factor = (
    Batch.shard_over_context,
    Batch.with_future_tokens,
    StepWork.remaining_gradient_scale,
)


def _look_ahead_of_the_piece(self: Batch, axis: Axis) -> Batch:
    depths = sum(name.endswith("_tokens") for name in self.extras)
    return _looking_ahead(_over_context(self, axis), depths)


def _tokens_from_left_to_right(self: Batch, axis: Axis) -> Batch:
    cut = Zigzag(self.tokens.shape[1], axis.size)
    return dataclasses.replace(
        _over_context(self, axis),
        tokens=self.tokens[:, axis.rank * cut.num_positions_of_rank(0) :][:, : cut.num_positions_of_rank(0)],
    )


def _count_of_the_piece(self: StepWork, total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1.0) * (self._scale / (self.num_microbatches * self.trainer.run.mesh.dp.size))


def _count_every_context_rank(self: StepWork) -> float | Tensor:
    return _missing_factor(self) / self.trainer.run.mesh.cp.size


_make_buckets, _made = ddp.make_buckets, regroup._batch_from_tensors


def _one_document(rows: dict[str, Tensor]) -> Batch:
    return _made({**rows, "documents": torch.zeros_like(rows["documents"])})


def _positions_of_the_share(rows: dict[str, Tensor]) -> Batch:
    return _made({**rows, "positions": torch.arange(rows["tokens"].shape[1])[None]})


def _buckets_over_data_ranks(module: Any, mesh: Mesh, **keywords: Any) -> Any:
    return _make_buckets(module, dataclasses.replace(mesh, dp_cp=mesh.dp), **keywords)


CONTEXT: tuple[Defect, ...] = (
    Defect(
        "results of two blocks are averaged instead of merged",
        (("cp2", "gpt"), ("cp4 two-level mb2", "llama")),
        ((blockwise_attention, "merge_attention_blocks", _merge_by_sums),),
    ),
    Defect(
        "the log-sum-exp of two blocks is the larger one",
        (("cp2", "gpt"), ("cp2 mb2", "packed")),
        ((blockwise_attention, "merge_attention_blocks", _merge_into_the_larger),),
    ),
    Defect(
        "gradients of a block use the log-sum-exp of that block",
        (("cp2", "gpt"), ("cp2 tp2 sp mb4", "mla-q")),
        ((blockwise_attention, "block_attention_backward", _backward_of_the_block_alone),),
    ),
    Defect(
        "keys, values and their gradients stay where they are",
        (("cp2", "gpt"), ("cp4 mb2", "gqa2")),
        ((ring, "collectives", collectives_with(start_ring_shift=_keep_gradients_where_they_were_found)),),
    ),
    Defect(
        "a window is one place short across the border of two chunks",
        (("cp2 mb4", "windows"),),
        ((RingSettings, "_visible_mask", _window_short_across_the_border),),
    ),
    Defect(
        "late chunks do not look at other ranks' keys",
        (("cp2", "gpt"),),
        ((ring, "visible_chunk_pairs", _own_chunk_only),),
    ),
    Defect(
        "chunks of other ranks are seen whatever their place",
        (("cp2", "gpt"),),
        ((ring, "_chunk_visibility", _future_between_chunks),),
    ),
    Defect(
        "documents are those of the rank's own piece",
        (("cp2 mb2", "packed"), ("cp2 pp2 vpp2 mb2", "packed-rope")),
        ((RingSettings, "_visible_mask", _documents_of_the_own_piece),),
    ),
    Defect(
        "gathered keys keep the gradient of one rank",
        (("cp2 allgather mb2", "llama-tied"),),
        ((transports, "collectives", collectives_with(uneven_gather_with_scatter_backward=_sum_on_no_rank)),),
    ),
    Defect(
        "a rank takes the sinks of the next rank's heads",
        (("cp2 a2a mb4", "sinks-mqa"),),
        ((UlyssesRingAttention, "__call__", _heads_of_the_next_rank),),
    ),
    Defect(
        "gathered places stay in the order of the ranks",
        (("cp2 a2a mb4", "packed-rope"), ("cp4 allgather mb4", "gpt")),
        (
            (
                Zigzag,
                "sorting_permutation",
                lambda self, ranks, device: torch.arange(sum(map(self.num_positions_of_rank, ranks)), device=device),
            ),
        ),
    ),
    Defect(
        "positions begin at zero on every rank",
        (("cp2", "gpt"), ("cp2 mb2", "llama")),
        ((LayerBuildContext, "local_positions", _places_from_zero),),
    ),
    Defect(
        "tokens are cut from left to right and labels in the zigzag",
        (("cp2", "gpt"), ("cp2 pp2", "llama")),
        ((Batch, "shard_over_context", _tokens_from_left_to_right),),
    ),
    Defect(
        "tokens ahead are those of the rank's own piece",
        (("cp2 tp2 sp pp2 mb2", "mtp2"), ("cp4 a2a dp2", "mtp-mean")),
        ((Batch, "shard_over_context", _look_ahead_of_the_piece),),
    ),
    Defect(
        "a microbatch's mean is taken on every context rank",
        (("cp2 dp2", "mean"), ("cp4 allgather", "mean-llama")),
        ((StepWork, "_scale_loss", _count_of_the_piece),),
    ),
    Defect(
        "tokens are counted once for every context rank",
        (("cp2", "gpt"),),
        ((StepWork, "remaining_gradient_scale", _count_every_context_rank),),
    ),
    Defect(
        "gradients are not summed over context ranks",
        (("cp2", "gpt"), ("cp2 dp2 average", "gpt")),
        ((ddp, "make_buckets", _buckets_over_data_ranks),),
    ),
    Defect(
        "documents that travel together see each other",
        (("hybrid dp4", "packed-rope"),),
        ((regroup, "_batch_from_tensors", _one_document),),
    ),
    Defect(
        "positions count through the documents that travel together",
        (("hybrid dp4 a2a mb2", "packed"),),
        ((regroup, "_batch_from_tensors", _positions_of_the_share),),
    ),
    Defect(
        "QK-clip sees the scores of the rank's own keys",
        (("cp2 mb4", "qk-clip-gqa"),),
        (
            (
                attention,
                "gather_context_parallel_keys",
                lambda k, mask, mesh: (k, dataclasses.replace(mask, length=None, key_places=mask.query_places)),
            ),
        ),
    ),
)
