"""Chunked attention with dropout on CPUs, for which torch has no kernel: a chunk of queries at a time, forward and backward.

    S = scale q k^T + bias,  P = softmax(S),  O = (kept * P) v
    dv = (kept * P)^T dO,  dP = kept * (dO v^T),  dS = P * (dP - sum(P * dP)),  dq = scale dS k,  dk = scale dS^T q

A chunk reads only the keys that its queries may see. Probabilities P are not saved: the backward pass recomputes them, with the
same random numbers for dropout. A sink is one more score in every row. `kept` is 0 or 1 / (1 - dropout).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.mask import MaskSpec, Scores
from megatron.core.kernels.reference import wide

_ROWS = 64  # queries at a time: their scores stay near the processor
_CHANCES = 2**16  # random numbers have 16 bits here: four come from one of torch's, which are most of dropout's time


def attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float, scores: Scores = Scores()) -> Tensor:
    """`reference.attention` without a cap. dropout is taken to the next of 65,536 steps.

    q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g, dv]. Returns [queries, b, n * dv].
    """
    return _Rows.apply(mask, dropout, replace(scores, bias=None, sink=None), q, k, v, scores.bias, scores.sink)


class _Rows(torch.autograd.Function):
    """Inside, [b * g, n/g * queries, d] meets [b * g, keys, d]: all queries that share a key head, in one matmul."""

    @staticmethod
    def forward(context: Any, mask: MaskSpec, dropout: float, scores: Scores, *tensors: Any) -> Tensor:
        context.settings, context.state = (mask, dropout, scores), torch.get_rng_state()
        context.save_for_backward(*tensors)
        work = _Work(mask, dropout, scores, *tensors)
        output = work.q.new_empty((*work.q.shape[:3], work.v.shape[-1]))
        for part in work.parts():
            shares, kept = work.shares(part), work.kept(part)
            work.put(output, part, shares.mul_(kept).to(work.v.dtype) @ work.values[:, part.keys] * work.factor)
        return output.flatten(2)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(context.state)
            return None, None, None, *_Work(*context.settings, *context.saved_tensors).gradients(gradient)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries, and all keys that one of them sees. seen: [b or 1, 1, 1, queries, keys]; None: as `ahead` has it."""

    queries: slice
    keys: slice
    seen: Tensor | None

    @property
    def size(self) -> tuple[int, int]:
        """How many queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


class _Work:
    """One call: its tensors as its matmuls want them."""

    def __init__(
        self,
        mask: MaskSpec,
        dropout: float,
        scores: Scores,
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

    def parts(self) -> Iterator[_Part]:
        """All queries, in order."""
        queries, keys, mask = len(self.q), len(self.k), self.mask
        own = (
            mask.query_documents
            if mask.query_documents is not None or mask.documents is None
            else mask.documents[:, -queries:]
        )
        ordered = mask.query_places is mask.key_places is None
        places = torch.arange(keys - queries, keys) if mask.query_places is None else mask.query_places
        left, right = (-1, -1) if mask.window is None else mask.window
        for start in range(0, queries, _ROWS):
            rows = slice(start, min(start + _ROWS, queries))
            first, last = start + keys - queries, rows.stop + keys - queries  # where these queries stand among the keys
            low = max(0, first - left) if ordered and left >= 0 else 0
            ahead = 0 if mask.causal else right
            high = max(low, min(keys, last + ahead)) if ordered and ahead >= 0 else keys
            columns = slice(low, high)
            if mask.is_plain and ordered and (not mask.causal or first >= 0):
                yield _Part(rows, columns, None)
                continue
            there = torch.arange(keys)[columns] if mask.key_places is None else mask.key_places[columns]
            cut: dict[str, Any] = {
                name: None if whole is None else whole[:, columns]
                for name, whole in (("documents", mask.documents), ("padding", mask.padding))
            }
            part = replace(
                mask,
                query_places=places[rows],
                key_places=there,
                query_documents=None if own is None else own[:, rows],
                **cut,
            )
            yield _Part(rows, columns, part.visible(rows.stop - start, high - low, self.q.device)[:, :, None])

    def shares(self, part: _Part) -> Tensor:
        """P of these rows, [b * g, n/g * queries, keys], before dropout."""
        return self._shares_and_sink(part)[..., : part.size[1]]

    def kept(self, part: _Part) -> Tensor:
        """What dropout keeps of these rows' shares, 0 or 1."""
        batch, groups, each = self.heads
        shape = (batch * groups, each * part.size[0], part.size[1])
        count = batch * groups * each * part.size[0] * part.size[1]
        draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
        return (draws >= self.dropped - _CHANCES // 2).view(shape)

    def put(self, whole: Tensor, part: _Part, found: Tensor) -> None:
        """Write [b * g, n/g * queries, d] to where it belongs in [queries, b, n, d]."""
        batch, groups, each = self.heads
        whole[part.queries].view(-1, batch, groups, each, found.shape[-1]).copy_(
            found.view(batch, groups, each, part.size[0], -1).permute(3, 0, 1, 2, 4)
        )

    def gradients(self, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Of q, k, v, bias and sink."""
        exact = wide(self.q.dtype)
        dq, dk, dv = (
            torch.empty_like(self.q, memory_format=torch.contiguous_format),
            *(torch.zeros_like(x, dtype=exact) for x in (self.keys, self.values)),
        )
        dbias, dsink = (None if x is None else torch.zeros_like(x, dtype=exact) for x in (self.bias, self.sink))
        arriving = gradient.view(*self.q.shape[:3], -1) * self.factor
        for part in self.parts():
            whole = self._shares_and_sink(part)
            shares, kept, rows = whole[..., : part.size[1]], self.kept(part), self._rows(arriving, part)
            _add(dv[:, part.keys], (shares * kept).to(self.v.dtype).transpose(1, 2), rows)
            dshares = (rows @ self.values[:, part.keys].transpose(1, 2)).to(exact).mul_(kept)
            if dsink is not None:
                dshares = torch.nn.functional.pad(dshares, (0, 1))
            dscores = torch._softmax_backward_data(dshares, whole, -1, exact)
            if dsink is not None:
                dsink += dscores[..., -1].reshape(*self.heads, -1).sum((0, 3)).flatten()
                dscores = dscores[..., :-1]
            if dbias is not None:
                batch, groups, each = self.heads
                dbias[..., part.queries, part.keys] += dscores.reshape(batch, groups * each, *part.size).sum(0)
            dscores = (dscores * self.scale).to(self.q.dtype)
            self.put(dq, part, dscores @ self.keys[:, part.keys])
            _add(dk[:, part.keys], dscores.transpose(1, 2), self._rows(self.q, part))
        batch, groups, _ = self.heads
        dk, dv = (
            total.view(batch, groups, *total.shape[1:]).permute(2, 0, 1, 3).to(self.q.dtype) for total in (dk, dv)
        )
        return (
            dq,
            dk,
            dv,
            *(
                None if total is None or given is None else total.to(given.dtype)
                for total, given in ((dbias, self.bias), (dsink, self.sink))
            ),
        )

    def _rows(self, x: Tensor, part: _Part) -> Tensor:
        """These queries of [queries, b, n, d], as [b * g, n/g * queries, d]."""
        batch, groups, each = self.heads
        return x[part.queries].permute(1, 2, 0, 3).reshape(batch * groups, each * part.size[0], -1)

    def _shares_and_sink(self, part: _Part) -> Tensor:
        """`shares`, and in the last column what the sink takes, if there is one."""
        batch, groups, each = self.heads
        scores = (
            (self._rows(self.q, part) @ self.keys[:, part.keys].transpose(1, 2)).to(wide(self.q.dtype)).mul_(self.scale)
        )
        apart = scores.view(batch, groups, each, *part.size)
        if self.bias is not None:
            apart += self.bias[..., part.queries, part.keys].unflatten(1, (groups, each))
        if part.seen is not None:
            apart.masked_fill_(~part.seen, float("-inf"))
        elif self.mask.causal:
            count = part.size[0]  # the last keys are those of the queries' own places
            apart[..., -count:].masked_fill_(torch.ones((count, count), dtype=torch.bool).triu(1), float("-inf"))
        if self.sink is not None:
            sink = self.sink.to(scores.dtype).view(groups, each, 1, 1).expand(batch, -1, -1, part.size[0], 1)
            return torch.cat((scores, sink.reshape(*scores.shape[:2], 1)), dim=-1).softmax(-1)
        shares = scores.softmax(-1)
        if part.seen is not None:  # the softmax of nothing is not a number
            shares.view_as(apart).masked_fill_(~part.seen.any(-1, keepdim=True), 0.0)
        return shares


def _add(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the format of the total."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total += left @ right
