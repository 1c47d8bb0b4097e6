"""Context-parallel attention with the signature of any attention kernel (`--cp-comm-type`).

    a2a         all-to-all (DeepSpeed-Ulysses): each rank trades positions for heads, and has all positions of n/cp heads
    p2p         ring attention: each rank keeps its queries; keys and values circulate (ring.py)
    a2a+p2p     a2a among neighbouring ranks, p2p between the blocks of neighbours
    allgather   each rank keeps its queries and gathers all keys and values

The first three are one class: a2a over an inner axis, p2p over an outer one, either of which may have a single rank.
Queries, keys and values are sharded in the zigzag order of `zigzag.py`; the mask describes the whole sequence, and
holds its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.head_exchange import heads_to_positions, positions_to_heads
from megatron.core.context_parallel.ring import RingSettings, ring_attention
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.ops import reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh

Kernel = Callable[..., Tensor]


def context_parallel_attention(kernel: Kernel, mesh: Mesh, kind: str) -> Kernel:
    """Return attention with the signature of `kernel` for queries, keys and values that are this rank's shards;
    `kernel` itself without context parallelism. kind: a value of --cp-comm-type.
    """
    if not mesh.hybrid_cp:
        return kernel if mesh.cp.group is None else _cp_attention_over_axis(kernel, mesh.cp, kind, mesh)
    axes = [axis for axis in mesh.hybrid_cp if axis.group is not None]
    kernels = {1: kernel} | {axis.size: _cp_attention_over_axis(kernel, axis, kind, mesh) for axis in axes}

    def dynamic_cp_size_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, *rest: Any) -> Tensor:
        """Attend with the kernel for the number of ranks over which this sequence is sharded."""
        return kernels[1 if mask.length is None else mask.length // len(q)](q, k, v, mask, *rest)

    return dynamic_cp_size_attention


def _cp_attention_over_axis(kernel: Kernel, axis: Axis, kind: str, mesh: Mesh) -> Kernel:
    """Return context-parallel attention over one axis, by a value of --cp-comm-type."""
    if kind in ("allgather", "all_gather"):
        return AllGatherAttention(kernel, axis)
    single = Axis("alone", ranks=axis.ranks[axis.rank : axis.rank + 1])
    inner, outer = {"a2a": (axis, single), "p2p": (single, axis), "a2a+p2p": (mesh.cp_inner, mesh.cp_outer)}[kind]
    return UlyssesRingAttention(kernel, inner, outer)


@torch.no_grad()
def gather_context_parallel_keys(k: Tensor, mask: AttentionMaskSpec, mesh: Mesh) -> tuple[Tensor, AttentionMaskSpec]:
    """Gather keys [s/cp, b, g, d] to [s, b, g, d], in order; also return the mask of this rank's queries over them."""
    if mask.length is None:
        return k, mask
    axis = mesh.context_axis_of_size(mask.length // len(k))
    cut = Zigzag(mask.length, axis.size)
    keys = collectives.uneven_gather_with_scatter_backward(k, cut.position_counts_by_rank(), axis)[
        cut.sorting_permutation(range(cut.size), k.device)
    ]
    places, documents = cut.positions_of_rank(axis.rank, k.device), mask.documents
    query_documents = None if documents is None else documents[:, places]
    return keys, replace(mask, length=None, query_places=places, query_documents=query_documents)


@dataclass(frozen=True, slots=True)
class AllGatherAttention:
    """Attention that gathers all keys and values on every rank; their gradients are reduce-scattered."""

    kernel: Kernel
    axis: Axis

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMaskSpec,
        dropout: float = 0.0,
        scores: AttentionScoreModifiers = AttentionScoreModifiers(),
    ) -> Tensor:
        """q: [s/cp, b, n, d]; k: [s/cp, b, g, d]; v: [s/cp, b, g, dv]. Returns [s/cp, b, n * dv]."""
        cut = _zigzag_of(mask, scores, self.axis.size)
        order = cut.sorting_permutation(range(cut.size), q.device)
        both = collectives.uneven_gather_with_scatter_backward(
            torch.cat((k, v), dim=-1), cut.position_counts_by_rank(), self.axis
        )[order]
        k, v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
        # A rank without positions returns an empty tensor that depends on v, so that it takes part in the reduction of gradients.
        outputs = [v[:0].repeat_interleave(q.shape[2] // v.shape[2], dim=2).flatten(2)]
        for chunk, queries in zip(cut.chunk_ranges(self.axis.rank), cut.split(q, self.axis.rank), strict=True):
            if chunk:
                first, last = _visible_key_range(chunk, mask, cut.length)
                part = _mask_slice(mask, chunk, range(first, last), q.device)
                outputs.append(self.kernel(queries, k[first:last], v[first:last], part, dropout, scores))
        return torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class UlyssesRingAttention:
    """Attention with an all-to-all of positions and heads over the inner axis, and a ring over the outer one."""

    kernel: Kernel
    inner: Axis
    outer: Axis

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMaskSpec,
        dropout: float = 0.0,
        scores: AttentionScoreModifiers = AttentionScoreModifiers(),
    ) -> Tensor:
        """q: [s/cp, b, n, d]; k: [s/cp, b, g, d]; v: [s/cp, b, g, dv]. Returns [s/cp, b, n * dv]."""
        cut = _zigzag_of(mask, scores, self.inner.size * self.outer.size)
        size, block = self.inner.size, self.outer.rank * self.inner.size
        counts = cut.position_counts_by_rank()[block : block + size]
        order = cut.sorting_permutation(range(block, block + size), q.device)
        # If there are fewer key heads than ranks, heads are repeated; autograd sums their gradients.
        repeats = size // gcd(size, k.shape[2])
        k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
        if self.inner.group is not None:
            q, k, v = (positions_to_heads(x, self.inner, counts, order) for x in (q, k, v))
        sink = None if scores.sink is None else scores.sink.chunk(size)[self.inner.rank]
        output = self._attend_local_heads(
            q, k, v, replace(scores, sink=sink), mask, dropout, cut.with_merged_ranks(size)
        )
        return output if self.inner.group is None else heads_to_positions(output, self.inner, counts, order)

    def _attend_local_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: AttentionScoreModifiers,
        mask: AttentionMaskSpec,
        dropout: float,
        cut: Zigzag,
    ) -> Tensor:
        """Attend over this rank's heads, by the ring if the outer axis has several ranks. cut: positions over it."""
        if self.outer.group is None:
            return self.kernel(q, k, v, replace(mask, length=None, query_places=None), dropout, scores)
        seed = int(torch.randint(2**62, (), device=q.device)) if dropout else 0
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        ring = RingSettings(
            self.outer,
            cut,
            mask,
            scale,
            scores.softcap,
            dropout,
            seed,
            fused=self.kernel is not reference.softmax_attention,
        )
        return ring_attention(q, k, v, scores.sink, ring)


def _zigzag_of(mask: AttentionMaskSpec, scores: AttentionScoreModifiers, size: int) -> Zigzag:
    """Return the zigzag of the mask's sequence over `size` ranks."""
    assert mask.length is not None, "under context parallelism a mask holds the length of the whole sequence"
    assert scores.bias is None, "a bias of the scores is refused under context parallelism"
    return Zigzag(mask.length, size)


def _visible_key_range(queries: range, mask: AttentionMaskSpec, length: int) -> tuple[int, int]:
    """Return the first key that any of these queries may see, and one past the last."""
    left, right = mask.window or (-1, -1)
    first = max(0, queries.start - left) if left >= 0 else 0
    right = 0 if mask.causal else right
    return first, min(length, queries.stop + right) if right >= 0 else length


def _mask_slice(mask: AttentionMaskSpec, queries: range, keys: range, device: torch.device) -> AttentionMaskSpec:
    """Return the mask restricted to these queries and keys."""
    documents, padding = mask.documents, mask.padding
    part = replace(
        mask,
        length=None,
        query_places=None,
        documents=None if documents is None else documents[:, keys.start : keys.stop],
        query_documents=None if documents is None else documents[:, queries.start : queries.stop],
        padding=None if padding is None else padding[:, keys.start : keys.stop],
    )
    if mask.window is None:  # causal kernels without positions align the last query with the last key, which holds here
        return part
    return replace(
        part,
        query_places=torch.arange(queries.start, queries.stop, device=device),
        key_places=torch.arange(keys.start, keys.stop, device=device),
    )
