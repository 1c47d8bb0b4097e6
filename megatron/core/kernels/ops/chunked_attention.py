"""Attention with dropout on CPUs, for which torch has no fused kernel: one chunk of queries at a time, forward and backward.

    S = scale q k^T + bias,  P = softmax(S),  O = (kept * P) v
    dv = (kept * P)^T dO,  dP = kept * (dO v^T),  dS = P * (dP - sum(P * dP)),  dq = scale dS k,  dk = scale dS^T q

A chunk reads only the keys that its queries may attend to. The probabilities P are not saved: the backward pass recomputes them, with the same random
numbers for dropout. A sink is one more score in every row. `kept` is 0 or 1 / (1 - dropout).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.reference import accumulation_dtype_of

_ROWS = 64  # queries at a time: their scores stay near the processor
_CHANCES = 2**16  # random numbers have 16 bits here: four come from one of torch's, which are most of dropout's time


def attention_by_query_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `reference.softmax_attention` without a soft cap, one chunk of queries at a time. dropout: rounded to a multiple
    of 1 / 65,536.

    q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g, dv]. Returns [queries, b, n * dv].
    """
    return _ChunkedAttention.apply(
        mask, dropout, replace(scores, bias=None, sink=None), q, k, v, scores.bias, scores.sink
    )


class _ChunkedAttention(torch.autograd.Function):
    """The autograd function of `attention`. All queries that share a key head are multiplied at once: [b * g, n/g
    * queries, d] by [b * g, keys, d].
    """

    @staticmethod
    def forward(
        context: Any, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers, *tensors: Any
    ) -> Tensor:
        context.settings, context.state = (mask, dropout, scores), torch.get_rng_state()
        context.save_for_backward(*tensors)
        work = _ChunkedAttentionCall(mask, dropout, scores, *tensors)
        output = work.q.new_empty((*work.q.shape[:3], work.v.shape[-1]))
        for part in work.query_chunks():
            shares, dropout_mask = (
                work.probabilities_with_sink(part)[..., : part.num_queries_and_keys[1]],
                work.draw_dropout_mask(part),
            )
            work.write_chunk_output(
                output, part, shares.mul_(dropout_mask).to(work.v.dtype) @ work.values[:, part.keys] * work.factor
            )
        return output.flatten(2)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(context.state)
            call = _ChunkedAttentionCall(*context.settings, *context.saved_tensors)
            return None, None, None, *call.input_gradients(gradient)


@dataclass(frozen=True, slots=True)
class _QueryChunk:
    """A range of queries, and the range of keys that any of them attends to. seen: mask [b or 1, 1, 1, queries, keys];
    None: the plain mask, causal or full, applies.
    """

    queries: slice
    keys: slice
    seen: Tensor | None

    @property
    def num_queries_and_keys(self) -> tuple[int, int]:
        """Number of queries and number of keys of the chunk."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


class _ChunkedAttentionCall:
    """Inputs and settings of one attention call, with keys and values in the layout of its matmuls [b * g, keys, d];
    computes its chunks, forward and backward.
    """

    def __init__(
        self,
        mask: AttentionMaskSpec,
        dropout: float,
        scores: AttentionScoreModifiers,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
    ) -> None:
        self.mask, self.q, self.k, self.v, self.bias, self.sink = mask, q, k, v, bias, sink
        self.scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        self.dropped = min(round(dropout * _CHANCES), _CHANCES - 1)
        self.factor = _CHANCES / (_CHANCES - self.dropped)
        self.keys, self.values = (x.permute(1, 2, 0, 3).flatten(0, 1) for x in (k, v))
        self.heads = q.shape[1], k.shape[2], q.shape[2] // k.shape[2]  # b, g, n/g

    def query_chunks(self) -> Iterator[_QueryChunk]:
        """Yield chunks of consecutive queries that together cover all queries, in order."""
        queries, keys, mask = len(self.q), len(self.k), self.mask
        ordered = mask.query_places is mask.key_places is None
        for start in range(0, queries, _ROWS):
            rows = slice(start, min(start + _ROWS, queries))
            columns = self._reachable_keys(rows) if ordered else slice(0, keys)
            if mask.has_only_causality and ordered and (not mask.causal or start + keys - queries >= 0):
                yield _QueryChunk(rows, columns, None)
            else:
                visible = self._mask_spec_of_chunk(rows, columns).as_bool_tensor(
                    rows.stop - start, columns.stop - columns.start, self.q.device
                )
                yield _QueryChunk(rows, columns, visible[:, :, None])

    def _reachable_keys(self, rows: slice) -> slice:
        """Return the smallest range of keys that causality and window allow for a range of queries; the queries are the
        last positions of the keys.
        """
        keys, mask = len(self.k), self.mask
        left, right = (-1, -1) if mask.window is None else mask.window
        first, last = rows.start + keys - len(self.q), rows.stop + keys - len(self.q)  # positions among the keys
        ahead = 0 if mask.causal else right
        low = max(0, first - left) if left >= 0 else 0
        return slice(low, max(low, min(keys, last + ahead)) if ahead >= 0 else keys)

    def _mask_spec_of_chunk(self, rows: slice, columns: slice) -> AttentionMaskSpec:
        """Return the part of the mask for a range of queries and a range of keys."""
        mask = self.mask.of_query_rows(rows, len(self.q), len(self.k), self.q.device)
        _, places = mask.query_and_key_places(rows.stop - rows.start, len(self.k), self.q.device)
        return replace(
            mask,
            key_places=places[columns],
            documents=None if mask.documents is None else mask.documents[:, columns],
            padding=None if mask.padding is None else mask.padding[:, columns],
        )

    def draw_dropout_mask(self, part: _QueryChunk) -> Tensor:
        """Draw the dropout mask of a chunk's probabilities: bool [b * g, n/g * queries, keys], True where kept."""
        batch, groups, each = self.heads
        shape = (batch * groups, each * part.num_queries_and_keys[0], part.num_queries_and_keys[1])
        count = batch * groups * each * part.num_queries_and_keys[0] * part.num_queries_and_keys[1]
        draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
        return (draws >= self.dropped - _CHANCES // 2).view(shape)

    def write_chunk_output(self, whole: Tensor, part: _QueryChunk, result: Tensor) -> None:
        """Write a chunk's result [b * g, n/g * queries, d] into its queries of `whole` [queries, b, n, d]."""
        batch, groups, each = self.heads
        whole[part.queries].view(-1, batch, groups, each, result.shape[-1]).copy_(
            result.view(batch, groups, each, part.num_queries_and_keys[0], -1).permute(3, 0, 1, 2, 4)
        )

    def input_gradients(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, bias and sink (None for those that were not given) from the gradient of the
        output.
        """
        exact = accumulation_dtype_of(self.q.dtype)
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros_like(x, dtype=exact) for x in (self.keys, self.values))
        dbias, dsink = (None if x is None else torch.zeros_like(x, dtype=exact) for x in (self.bias, self.sink))
        arriving = gradient.view(*self.q.shape[:3], -1) * self.factor
        for part in self.query_chunks():
            whole = self.probabilities_with_sink(part)
            shares, dropout_mask = whole[..., : part.num_queries_and_keys[1]], self.draw_dropout_mask(part)
            rows = self._queries_of_chunk(arriving, part)
            _accumulate_matmul(dv[:, part.keys], (shares * dropout_mask).to(self.v.dtype).transpose(1, 2), rows)
            dshares = (rows @ self.values[:, part.keys].transpose(1, 2)).to(exact).mul_(dropout_mask)
            if dsink is not None:
                dshares = torch.nn.functional.pad(dshares, (0, 1))
            dscores = torch._softmax_backward_data(dshares, whole, -1, exact)
            if dsink is not None:
                dsink += dscores[..., -1].reshape(*self.heads, -1).sum((0, 3)).flatten()
                dscores = dscores[..., :-1]
            if dbias is not None:
                batch, groups, each = self.heads
                dbias[..., part.queries, part.keys] += dscores.reshape(
                    batch, groups * each, *part.num_queries_and_keys
                ).sum(0)
            dscores = (dscores * self.scale).to(self.q.dtype)
            self.write_chunk_output(dq, part, dscores @ self.keys[:, part.keys])
            _accumulate_matmul(dk[:, part.keys], dscores.transpose(1, 2), self._queries_of_chunk(self.q, part))
        batch, groups, _ = self.heads
        dk, dv = (
            total.view(batch, groups, *total.shape[1:]).permute(2, 0, 1, 3).to(self.q.dtype) for total in (dk, dv)
        )
        more = (
            None if total is None or given is None else total.to(given.dtype)
            for total, given in ((dbias, self.bias), (dsink, self.sink))
        )
        return dq, dk, dv, *more

    def _queries_of_chunk(self, x: Tensor, part: _QueryChunk) -> Tensor:
        """Return a chunk's queries of x [queries, b, n, d] as [b * g, n/g * queries, d]."""
        batch, groups, each = self.heads
        return x[part.queries].permute(1, 2, 0, 3).reshape(batch * groups, each * part.num_queries_and_keys[0], -1)

    def probabilities_with_sink(self, part: _QueryChunk) -> Tensor:
        """Return the attention probabilities of a chunk before dropout, [b * g, n/g * queries, keys]; if there is a
        sink, its probability as one more column.
        """
        batch, groups, each = self.heads
        scores = (
            (self._queries_of_chunk(self.q, part) @ self.keys[:, part.keys].transpose(1, 2))
            .to(accumulation_dtype_of(self.q.dtype))
            .mul_(self.scale)
        )
        apart = scores.view(batch, groups, each, *part.num_queries_and_keys)
        if self.bias is not None:
            apart += self.bias[..., part.queries, part.keys].unflatten(1, (groups, each))
        if part.seen is not None:
            apart.masked_fill_(~part.seen, float("-inf"))
        elif self.mask.causal:
            count = part.num_queries_and_keys[0]  # the last keys are those of the queries' own places
            apart[..., -count:].masked_fill_(torch.ones((count, count), dtype=torch.bool).triu(1), float("-inf"))
        if self.sink is not None:
            sink = (
                self.sink.to(scores.dtype)
                .view(groups, each, 1, 1)
                .expand(batch, -1, -1, part.num_queries_and_keys[0], 1)
            )
            return torch.cat((scores, sink.reshape(*scores.shape[:2], 1)), dim=-1).softmax(-1)
        shares = scores.softmax(-1)
        if part.seen is not None:  # the softmax of nothing is not a number
            shares.view_as(apart).masked_fill_(~part.seen.any(-1, keepdim=True), 0.0)
        return shares


def _accumulate_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` in place, in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total += left @ right
