"""Attention of a sequence that is cut over the context ranks, behind the signature of any attention kernel.

    a2a         each rank trades places for heads: all places of n/cp heads, for whatever kernel there is
    p2p         each rank keeps its queries; keys and values travel round (ring.py)
    a2a+p2p     a2a among neighbours, p2p between the blocks of neighbours
    allgather   each rank keeps its queries and collects all keys and values

The first three are one: a2a over an inner axis, p2p over an outer one, either of which may have a single rank. Queries, keys
and values are pieces in the zigzag of `sequence.py`; the mask speaks of the whole sequence, and says how long that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from megatron.core.context_parallel.ring import Ring, ring_attention
from megatron.core.context_parallel.sequence import Zigzag
from megatron.core.kernels import reference
from megatron.core.kernels.mask import MaskSpec, Scores
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh

Kernel = Callable[..., Tensor]


def over_context(kernel: Kernel, mesh: Mesh, kind: str) -> Kernel:
    """An attention kernel whose queries, keys and values are this rank's pieces. kind: a value of --cp-comm-type."""
    if mesh.hybrid_cp:
        return BySize(
            {
                1: kernel,
                **{axis.size: _over(kernel, axis, kind, mesh) for axis in mesh.hybrid_cp if axis.group is not None},
            }
        )
    return kernel if mesh.cp.group is None else _over(kernel, mesh.cp, kind, mesh)


def _over(kernel: Kernel, axis: Axis, kind: str, mesh: Mesh) -> Kernel:
    if kind in ("allgather", "all_gather"):
        return Gathered(kernel, axis)
    alone = Axis("alone", ranks=axis.ranks[axis.rank : axis.rank + 1])
    inner, outer = {"a2a": (axis, alone), "p2p": (alone, axis), "a2a+p2p": (mesh.cp_inner, mesh.cp_outer)}[kind]
    return Travelling(kernel, inner, outer)


@dataclass(frozen=True, slots=True)
class BySize:
    """Sequences that are cut over different numbers of ranks, each by the kernel for that number."""

    kernels: dict[int, Kernel]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float = 0.0, scores: Scores = Scores()
    ) -> Tensor:
        """q: [s/cp, b, n, d]; k: [s/cp, b, g, d]; v: [s/cp, b, g, dv]. Returns [s/cp, b, n * dv]."""
        size = 1 if mask.length is None else mask.length // len(q)
        return self.kernels[size](q, k, v, mask, dropout, scores)


@torch.no_grad()
def all_keys(k: Tensor, mask: MaskSpec, mesh: Mesh) -> tuple[Tensor, MaskSpec]:
    """The keys of all ranks, [s, b, g, d], lowest place first, and the mask of this rank's queries over them."""
    if mask.length is None:
        return k, mask
    axis = mesh.sequence_axis(mask.length // len(k))
    cut = Zigzag(mask.length, axis.size)
    whole = collectives.uneven_gather_then_scatter(k, cut.counts(), axis)[cut.in_order(range(cut.size), k.device)]
    places, documents = cut.places(axis.rank, k.device), mask.documents
    own = None if documents is None else documents[:, places]
    return whole, replace(mask, length=None, query_places=places, query_documents=own)


@dataclass(frozen=True, slots=True)
class Gathered:
    """All keys and values on every rank; their gradients are summed and scattered."""

    kernel: Kernel
    axis: Axis

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float = 0.0, scores: Scores = Scores()
    ) -> Tensor:
        """q: [s/cp, b, n, d]; k: [s/cp, b, g, d]; v: [s/cp, b, g, dv]. Returns [s/cp, b, n * dv]."""
        cut = _cut(mask, scores, self.axis.size)
        order = cut.in_order(range(cut.size), q.device)
        both = collectives.uneven_gather_then_scatter(torch.cat((k, v), dim=-1), cut.counts(), self.axis)[order]
        k, v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
        # A rank without places gives nothing, but nothing made of v, so that it takes part in the sum of gradients.
        outputs = [v[:0].repeat_interleave(q.shape[2] // v.shape[2], dim=2).flatten(2)]
        for chunk, queries in zip(cut.chunks(self.axis.rank), _halves(q, cut, self.axis.rank), strict=True):
            if chunk:
                first, last = _reach(chunk, mask, cut.length)
                part = _of_places(mask, chunk, range(first, last), q.device)
                outputs.append(self.kernel(queries, k[first:last], v[first:last], part, dropout, scores))
        return torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class Travelling:
    """Places traded for heads over the inner axis, and a ring over the outer one."""

    kernel: Kernel
    inner: Axis
    outer: Axis

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float = 0.0, scores: Scores = Scores()
    ) -> Tensor:
        """q: [s/cp, b, n, d]; k: [s/cp, b, g, d]; v: [s/cp, b, g, dv]. Returns [s/cp, b, n * dv]."""
        cut = _cut(mask, scores, self.inner.size * self.outer.size)
        size, block = self.inner.size, self.outer.rank * self.inner.size
        counts = cut.counts()[block : block + size]
        order = cut.in_order(range(block, block + size), q.device)
        # Too few key heads to share out are repeated until there are enough; their gradients are summed.
        repeats = size // gcd(size, k.shape[2])
        k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
        q, k, v = (self._to_places(x, counts, order) for x in (q, k, v))
        sink = None if scores.sink is None else scores.sink.chunk(size)[self.inner.rank]
        output = self._attend(q, k, v, replace(scores, sink=sink), mask, dropout, cut.coarser(size))
        return self._to_heads(output, counts, order)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: MaskSpec, dropout: float, cut: Zigzag
    ) -> Tensor:
        if self.outer.group is None:
            return self.kernel(q, k, v, replace(mask, length=None, query_places=None), dropout, scores)
        seed = int(torch.randint(2**62, (), device=q.device)) if dropout else 0
        scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        ring = Ring(
            self.outer, cut, mask, scale, scores.softcap, dropout, seed, fused=self.kernel is not reference.attention
        )
        return ring_attention(q, k, v, scores.sink, ring)

    def _to_places(self, x: Tensor, counts: list[int], order: Tensor) -> Tensor:
        """[s/cp, b, n, d] to [s/outer, b, n/inner, d], lowest place first."""
        if self.inner.group is None:
            return x
        heads = x.unflatten(2, (self.inner.size, -1)).movedim(2, 0).flatten(0, 1)
        return collectives.all_to_all(heads, [len(x)] * self.inner.size, counts, self.inner)[order]

    def _to_heads(self, x: Tensor, counts: list[int], order: Tensor) -> Tensor:
        """[s/outer, b, n/inner * dv] to [s/cp, b, n * dv]."""
        if self.inner.group is None:
            return x
        own = counts[self.inner.rank]
        places = collectives.all_to_all(x[order.argsort()], counts, [own] * self.inner.size, self.inner)
        return places.unflatten(0, (self.inner.size, own)).movedim(0, 2).flatten(2)


def _cut(mask: MaskSpec, scores: Scores, size: int) -> Zigzag:
    assert mask.length is not None, "under context parallelism a mask says how long the whole sequence is"
    assert scores.bias is None, "a bias of the scores is refused under context parallelism"
    return Zigzag(mask.length, size)


def _halves(q: Tensor, cut: Zigzag, rank: int) -> tuple[Tensor, ...]:
    return q.split([len(chunk) for chunk in cut.chunks(rank)])


def _reach(queries: range, mask: MaskSpec, length: int) -> tuple[int, int]:
    """The first key that any of these queries may see, and one past the last."""
    left, right = mask.window or (-1, -1)
    first = max(0, queries.start - left) if left >= 0 else 0
    right = 0 if mask.causal else right
    return first, min(length, queries.stop + right) if right >= 0 else length


def _of_places(mask: MaskSpec, queries: range, keys: range, device: torch.device) -> MaskSpec:
    """The mask of these queries and keys alone."""
    documents, padding = mask.documents, mask.padding
    part = replace(
        mask,
        length=None,
        query_places=None,
        documents=None if documents is None else documents[:, keys.start : keys.stop],
        query_documents=None if documents is None else documents[:, queries.start : queries.stop],
        padding=None if padding is None else padding[:, keys.start : keys.stop],
    )
    if mask.window is None:  # under causality the last query stands at the last key, as kernels take it without places
        return part
    return replace(
        part,
        query_places=torch.arange(queries.start, queries.stop, device=device),
        key_places=torch.arange(keys.start, keys.stop, device=device),
    )
