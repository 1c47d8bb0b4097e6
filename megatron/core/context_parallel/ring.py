"""Ring attention: keys and values circulate through a ring of ranks (Liu et al., 2023).

Every rank keeps its queries. In as many steps as there are ranks it receives the keys and values of every rank, sends
them on while it computes, and merges the partial results by the log-sum-exp of the scores
(`kernels/ops/blockwise_attention.py`). In the backward pass keys and values circulate again, followed by their gradients
one step later, until these are back at their owners.

Chunks are compared by their first and last positions, so a pair of chunks that the mask hides costs nothing, and a pair
that it shows entirely needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.ops import blockwise_attention
from megatron.core.kernels.ops.blockwise_attention import BlockwiseAttentionOptions
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


@dataclass(frozen=True, slots=True)
class QueryKeyChunkPair:
    """Chunks of a rank's queries and of another rank's keys, as slices of their shards.

    kind: all (every query sees every key), causal (the same positions on both sides), some (needs the explicit mask).
    """

    queries: slice
    keys: slice
    kind: str


@dataclass(frozen=True, slots=True)
class RingSettings:
    """Settings of a ring attention. mask: of the whole sequence. seed: of dropout. fused: allow torch's kernels."""

    axis: Axis
    cut: Zigzag
    mask: AttentionMaskSpec
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    fused: bool

    def visible_blocks(self, source: int, q: Tensor) -> Iterator[tuple[slice, slice, BlockwiseAttentionOptions]]:
        """Yield (query slice, key slice, block) of each visible pair with rank `source`. q: [b, n, queries, d]."""
        rank = self.axis.rank
        for number, pair in enumerate(
            visible_chunk_pairs(self.cut.chunk_ranges(rank), self.cut.chunk_ranges(source), self.mask)
        ):
            block = BlockwiseAttentionOptions(self.scale, self.softcap, causal=pair.kind == "causal", fused=self.fused)
            rows, columns = (part.stop - part.start for part in (pair.queries, pair.keys))
            if pair.kind == "some":
                block = replace(block, seen=self._visible_mask(source, pair, q.device))
            if self.dropout:
                generator = torch.Generator(q.device).manual_seed((self.seed + 4 * source + number) % 2**62)
                drawn = torch.rand(
                    (*q.shape[:2], rows, columns), generator=generator, device=q.device, dtype=torch.float32
                )
                block = replace(block, kept=(drawn >= self.dropout) / (1 - self.dropout))
            yield pair.queries, pair.keys, block

    def _visible_mask(self, source: int, pair: QueryKeyChunkPair, device: torch.device) -> Tensor:
        """Return which keys of a pair its queries see, as a boolean mask."""
        queries = self.cut.positions_of_rank(self.axis.rank, device)[pair.queries]
        keys = self.cut.positions_of_rank(source, device)[pair.keys]
        documents, padding = self.mask.documents, self.mask.padding
        part = replace(
            self.mask,
            query_places=queries,
            key_places=keys,
            query_documents=None if documents is None else documents[:, queries],
            documents=None if documents is None else documents[:, keys],
            padding=None if padding is None else padding[:, keys],
        )
        return part.as_bool_tensor(len(queries), len(keys), device)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: RingSettings) -> Tensor:
    """Attention of this rank's queries over all ranks' keys.

    q: [s/cp, b, n, d]; k: [s/cp, b, g, d]; v: [s/cp, b, g, dv]; sink: [n], as in `Scores`. Returns [s/cp, b, n * dv].
    """
    return _RingAttention.apply(q, k, v, sink, ring)


def visible_chunk_pairs(
    queries: tuple[range, range], keys: tuple[range, range], mask: AttentionMaskSpec
) -> list[QueryKeyChunkPair]:
    """Return the pairs of chunks that the mask does not hide; adjacent chunks of the same kind are merged."""
    rows: list[list[QueryKeyChunkPair]] = []
    for query_chunk, query_slice in zip(queries, _slices_of_two_chunks(queries), strict=True):
        row: list[QueryKeyChunkPair] = []
        for key_chunk, key_slice in zip(keys, _slices_of_two_chunks(keys), strict=True):
            kind = _chunk_visibility(query_chunk, key_chunk, mask)
            if row and kind == row[-1].kind != "causal":
                row[-1] = QueryKeyChunkPair(query_slice, slice(row[-1].keys.start, key_slice.stop), kind)
            elif kind != "none":
                row.append(QueryKeyChunkPair(query_slice, key_slice, kind))
        rows.append(row)
    first, second = rows
    same_keys = [(pair.keys, pair.kind) for pair in first] == [(pair.keys, pair.kind) for pair in second]
    if same_keys and not any(pair.kind == "causal" for pair in first):
        return [replace(pair, queries=slice(0, sum(map(len, queries)))) for pair in first]
    return first + second


def _chunk_visibility(queries: range, keys: range, mask: AttentionMaskSpec) -> str:
    """Return how much of these keys the mask shows to these queries: all, causal, some or none."""
    if not queries or not keys:
        return "none"
    left, right = mask.window or (-1, -1)
    low = -left if left >= 0 else float("-inf")
    high = right if right >= 0 else float("inf")
    high = min(high, 0) if mask.causal else high
    nearest, farthest = keys.start - queries[-1], keys[-1] - queries.start  # distance from query to key
    if farthest < low or nearest > high:
        return "none"
    if mask.documents is not None or mask.padding is not None or nearest < low:
        return "some"
    if farthest <= high:
        return "all"
    return "causal" if queries == keys and high == 0 else "some"


def _slices_of_two_chunks(chunks: tuple[range, range]) -> tuple[slice, slice]:
    """Return the slices of two consecutive chunks in a shard."""
    first, both = len(chunks[0]), len(chunks[0]) + len(chunks[1])
    return slice(0, first), slice(first, both)


@dataclass(frozen=True, slots=True)
class _PackedKeyValue:
    """Packs keys and values, or their gradients, into one flat tensor to send at once. key, value: their shapes."""

    key: tuple[int, ...]
    value: tuple[int, ...]

    def shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of keys and values for a shard of `count` positions."""
        return (*self.key[:2], count, self.key[3]), (*self.value[:2], count, self.value[3])

    def empty_buffer(self, like: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return an empty flat tensor for a shard of `count` positions."""
        key, value = self.shapes(count)
        return like.new_empty(torch.Size(key).numel() + torch.Size(value).numel(), dtype=dtype)

    def unpack(self, flat: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and the values in a flat tensor of a shard of `count` positions."""
        key, value = self.shapes(count)
        split = torch.Size(key).numel()
        return flat[:split].view(key), flat[split:].view(value)


class _RingAttention(Function):
    """Autograd function of `ring_attention`."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, ring: RingSettings) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
        rows = q.shape[:3]
        output = q.new_zeros((*rows, v.shape[-1]), dtype=accumulation_dtype_of(q.dtype))
        lse = output.new_full(rows, float("-inf"))
        for source, key, value in _ring_steps(k, v, ring):
            for query_slice, key_slice, block in ring.visible_blocks(source, q):
                result = blockwise_attention.block_attention_forward(
                    q[:, :, query_slice], key[:, :, key_slice], value[:, :, key_slice], block
                )
                output[:, :, query_slice], lse[:, :, query_slice] = blockwise_attention.merge_attention_blocks(
                    output[:, :, query_slice], lse[:, :, query_slice], *result
                )
        if sink is not None:  # the sink adds a score without a value; queries that see no key keep their zero
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
        ring: RingSettings = context.ring
        gradient = gradient.unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0, 3).contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        packed, counts = _PackedKeyValue(k.shape, v.shape), ring.cut.position_counts_by_rank()
        works: list[Any] = []
        received: Tensor | None = None
        for step, (source, key, value) in enumerate(_ring_steps(k, v, ring)):
            count = counts[source]
            flat = packed.empty_buffer(k, count, lse.dtype).zero_()
            dk, dv = packed.unpack(flat, count)
            for query_slice, key_slice, block in ring.visible_blocks(source, q):
                gradients = blockwise_attention.block_attention_backward(
                    gradient[:, :, query_slice],
                    q[:, :, query_slice],
                    key[:, :, key_slice],
                    value[:, :, key_slice],
                    output[:, :, query_slice],
                    lse[:, :, query_slice],
                    block,
                )
                dq[:, :, query_slice] += gradients[0]
                dk[:, :, key_slice] += gradients[1]
                dv[:, :, key_slice] += gradients[2]
            _wait_all(works)
            if received is not None:  # gradients of these keys from the previous ranks
                flat += received
            sent = flat  # must not change until the message is complete
            next_count = counts[(ring.axis.rank - step - 1) % ring.axis.size]
            received = packed.empty_buffer(k, next_count, lse.dtype)
            works = collectives.start_ring_shift(received, sent, ring.axis)
        _wait_all(works)
        assert received is not None, "a ring has at least one rank"
        dk, dv = packed.unpack(received, k.shape[2])
        dsink = None
        if sink is not None:
            mean = (gradient.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
            dsink = -(mean * (sink.to(lse.dtype)[:, None] - lse).exp()).sum((0, 2)).to(sink.dtype)
        dq, dk, dv = (x.to(q.dtype).permute(2, 0, 1, 3) for x in (dq, dk, dv))
        return dq, dk, dv, dsink, None


def _ring_steps(k: Tensor, v: Tensor, ring: RingSettings) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (rank, its keys, its values) of every rank, this one first; the next are in flight while these are used."""
    axis, counts, packed = ring.axis, ring.cut.position_counts_by_rank(), _PackedKeyValue(k.shape, v.shape)
    flat = torch.cat((k.flatten(), v.flatten()))
    for step in range(axis.size):
        source, next_source = (axis.rank - step) % axis.size, (axis.rank - step - 1) % axis.size
        received, works = flat, []
        if step < axis.size - 1:
            received = packed.empty_buffer(k, counts[next_source], k.dtype)
            works = collectives.start_ring_shift(received, flat, axis)
        yield source, *packed.unpack(flat, counts[source])
        _wait_all(works)
        flat = received


def _wait_all(works: list[Any]) -> None:
    """Wait for all works and remove them from the list."""
    while works:  # a completed work still references its tensors
        collectives.wait(works.pop())
