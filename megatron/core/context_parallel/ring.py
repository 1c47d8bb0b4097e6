"""Attention over keys and values that travel round a ring of ranks (Liu et al., 2023).

Every rank keeps its queries. In as many steps as there are ranks it meets the keys and values of every rank, which it hands
on while it computes, and merges what it finds by the log-sum-exp of the scores (`kernels/blockwise_attention.py`). On the way back keys
and values travel again, and their gradients behind them, one step later, until they are home.

Chunks are compared by the places where they begin and end, so that a pair of which the mask shows nothing costs nothing, and
one of which it shows everything needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.context_parallel.sequence import Zigzag
from megatron.core.kernels import blockwise_attention
from megatron.core.kernels.blockwise_attention import Block
from megatron.core.kernels.mask import MaskSpec
from megatron.core.kernels.reference import wide
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class Pair:
    """Some chunks of a rank's queries and of another's keys, as slices of their pieces.

    kind: all (every query sees every key), causal (the same places on both sides), some (the mask must be asked).
    """

    queries: slice
    keys: slice
    kind: str


@dataclass(frozen=True, slots=True)
class Ring:
    """How queries meet keys. mask: of the whole sequence. seed: of the dropout. fused: torch's own kernels may serve."""

    axis: Axis
    cut: Zigzag
    mask: MaskSpec
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    fused: bool

    def blocks(self, source: int, q: Tensor) -> Iterator[tuple[slice, slice, Block]]:
        """What there is to compute with the keys of the rank `source`. q: [b, n, queries, d]."""
        rank = self.axis.rank
        for number, pair in enumerate(pairs(self.cut.chunks(rank), self.cut.chunks(source), self.mask)):
            block = Block(self.scale, self.softcap, causal=pair.kind == "causal", fused=self.fused)
            rows, columns = _length(pair.queries), _length(pair.keys)
            if pair.kind == "some":
                block = replace(block, seen=self._seen(source, pair, q.device))
            if self.dropout:
                generator = torch.Generator(q.device).manual_seed((self.seed + 4 * source + number) % 2**62)
                drawn = torch.rand(
                    (*q.shape[:2], rows, columns), generator=generator, device=q.device, dtype=torch.float32
                )
                block = replace(block, kept=(drawn >= self.dropout) / (1 - self.dropout))
            yield pair.queries, pair.keys, block

    def _seen(self, source: int, pair: Pair, device: torch.device) -> Tensor:
        queries = self.cut.places(self.axis.rank, device)[pair.queries]
        keys = self.cut.places(source, device)[pair.keys]
        documents, padding = self.mask.documents, self.mask.padding
        part = replace(
            self.mask,
            query_places=queries,
            key_places=keys,
            query_documents=None if documents is None else documents[:, queries],
            documents=None if documents is None else documents[:, keys],
            padding=None if padding is None else padding[:, keys],
        )
        return part.visible(len(queries), len(keys), device)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: Ring) -> Tensor:
    """Attention of this rank's queries over all ranks' keys.

    q: [s/cp, b, n, d]; k: [s/cp, b, g, d]; v: [s/cp, b, g, dv]; sink: [n], as in `Scores`. Returns [s/cp, b, n * dv].
    """
    return _Ring.apply(q, k, v, sink, ring)


def pairs(queries: tuple[range, range], keys: tuple[range, range], mask: MaskSpec) -> list[Pair]:
    """The pairs of chunks of which the mask may show something, neighbours that are seen alike taken together."""
    rows: list[list[Pair]] = []
    for own, mine in zip(queries, _slices(queries), strict=True):
        row: list[Pair] = []
        for other, theirs in zip(keys, _slices(keys), strict=True):
            kind = _kind(own, other, mask)
            if row and kind == row[-1].kind != "causal":
                row[-1] = Pair(mine, slice(row[-1].keys.start, theirs.stop), kind)
            elif kind != "none":
                row.append(Pair(mine, theirs, kind))
        rows.append(row)
    first, second = rows
    alike = [(pair.keys, pair.kind) for pair in first] == [(pair.keys, pair.kind) for pair in second]
    if alike and not any(pair.kind == "causal" for pair in first):
        return [replace(pair, queries=slice(0, sum(map(len, queries)))) for pair in first]
    return first + second


def _kind(queries: range, keys: range, mask: MaskSpec) -> str:
    """What the mask shows these queries of these keys: all, causal, some or none."""
    if not queries or not keys:
        return "none"
    left, right = mask.window or (-1, -1)
    low = -left if left >= 0 else float("-inf")
    high = right if right >= 0 else float("inf")
    high = min(high, 0) if mask.causal else high
    nearest, farthest = keys.start - queries[-1], keys[-1] - queries.start  # places that keys are ahead of queries
    if farthest < low or nearest > high:
        return "none"
    if mask.documents is not None or mask.padding is not None or nearest < low:
        return "some"
    if farthest <= high:
        return "all"
    return "causal" if queries == keys and high == 0 else "some"


def _slices(chunks: tuple[range, range]) -> tuple[slice, slice]:
    first, both = len(chunks[0]), len(chunks[0]) + len(chunks[1])
    return slice(0, first), slice(first, both)


def _length(part: slice) -> int:
    return part.stop - part.start


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Keys and values, or their gradients, as one flat tensor: one message instead of two."""

    key: tuple[int, ...]
    value: tuple[int, ...]

    def sizes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a piece of `count` places."""
        return (*self.key[:2], count, self.key[3]), (*self.value[:2], count, self.value[3])

    def empty(self, like: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Room for a piece of `count` places."""
        key, value = self.sizes(count)
        return like.new_empty(torch.Size(key).numel() + torch.Size(value).numel(), dtype=dtype)

    def open(self, flat: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Views of the two parts."""
        key, value = self.sizes(count)
        split = torch.Size(key).numel()
        return flat[:split].view(key), flat[split:].view(value)


class _Ring(Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: Ring) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
        rows = q.shape[:3]
        output = q.new_zeros((*rows, v.shape[-1]), dtype=wide(q.dtype))
        lse = output.new_full(rows, float("-inf"))
        for source, key, value in _around(k, v, ring):
            for own, theirs, block in ring.blocks(source, q):
                result = blockwise_attention.forward(q[:, :, own], key[:, :, theirs], value[:, :, theirs], block)
                output[:, :, own], lse[:, :, own] = blockwise_attention.merge(
                    output[:, :, own], lse[:, :, own], *result
                )
        if (
            sink is not None
        ):  # one more score, which takes weight and gives nothing; those who see nothing keep their zero
            with_sink = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
            output = output * (lse - with_sink).exp()[..., None]
            lse = with_sink
        output = output.to(v.dtype)
        context.save_for_backward(q, k, v, output, lse, sink)
        context.ring = ring
        return output.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, output, lse, sink = context.saved_tensors
        ring: Ring = context.ring
        gradient = gradient.unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3).contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        parcel, counts = _Parcel(k.shape, v.shape), ring.cut.counts()
        works: list[Any] = []
        arriving: Tensor | None = None
        for step, (source, key, value) in enumerate(_around(k, v, ring)):
            count = counts[source]
            flat = parcel.empty(k, count, lse.dtype).zero_()
            dk, dv = parcel.open(flat, count)
            for own, theirs, block in ring.blocks(source, q):
                gradients = blockwise_attention.backward(
                    gradient[:, :, own],
                    q[:, :, own],
                    key[:, :, theirs],
                    value[:, :, theirs],
                    output[:, :, own],
                    lse[:, :, own],
                    block,
                )
                dq[:, :, own] += gradients[0]
                dk[:, :, theirs] += gradients[1]
                dv[:, :, theirs] += gradients[2]
            _wait(works)
            if arriving is not None:  # what the ranks before found for these keys
                flat += arriving
            sent = flat  # must stay as it is until it has arrived
            following = counts[(ring.axis.rank - step - 1) % ring.axis.size]
            arriving = parcel.empty(k, following, lse.dtype)
            works = collectives.start_ring_shift(arriving, sent, ring.axis)
        _wait(works)
        assert arriving is not None, "a ring has at least one rank"
        dk, dv = parcel.open(arriving, k.shape[2])
        dsink = None
        if sink is not None:
            mean = (gradient.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
            dsink = -(mean * (sink.to(lse.dtype)[:, None] - lse).exp()).sum((0, 2)).to(sink.dtype)
        dq, dk, dv = (x.to(q.dtype).permute(2, 0, 1, 3) for x in (dq, dk, dv))
        return dq, dk, dv, dsink, None


def _around(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rank, its keys, its values) of every rank, this one first. The next are on their way while these are used."""
    axis, counts, parcel = ring.axis, ring.cut.counts(), _Parcel(k.shape, v.shape)
    flat = torch.cat((k.flatten(), v.flatten()))
    for step in range(axis.size):
        source, following = (axis.rank - step) % axis.size, (axis.rank - step - 1) % axis.size
        arriving, works = flat, []
        if step < axis.size - 1:
            arriving = parcel.empty(k, counts[following], k.dtype)
            works = collectives.start_ring_shift(arriving, flat, axis)
        yield source, *parcel.open(flat, counts[source])
        _wait(works)
        flat = arriving


def _wait(works: list[Any]) -> None:
    while works:  # a work that is done still holds its tensors
        collectives.wait(works.pop())
