"""Attention over a paged KV cache: the keys and values of a sequence lie in blocks of one pool (Kwon et al., 2023).

    pool     [slots, g, d]      slot of position p of row b: tables[b, p // size] * size + p % size
    tables   [b, blocks]        5 2 | 7 3 1 | 4
    lengths  [b]                keys of each row; its last query stands at the last of them

`attention` is the definition in plain torch, which gathers all keys first. kernels/triton/paged.py reads them where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.kernels.ops.mask import AttentionScoreModifiers
from megatron.core.kernels.ops.reference import accumulation_dtype_of

# Largest difference from the definition over the largest value that a kernel may show.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True, slots=True)
class CacheBlockTables:
    """Where the cached keys and values of b sequences lie in the pool.

    tables: int32 [b, blocks], block numbers of each sequence. lengths: int32 [b], number of keys of each sequence, its
    new tokens included; 0: none. size: slots (tokens) of a block. longest: upper limit of the lengths.
    """

    tables: Tensor
    lengths: Tensor
    size: int
    longest: int

    def slots_of_positions(self, places: Tensor) -> Tensor:
        """Return the pool slots of positions of each sequence, int64 [b, p]. places: int64 [b, p], positions, not
        negative.
        """
        blocks = self.tables.gather(1, places // self.size).to(torch.int64)
        return blocks * self.size + places % self.size

    def slots_of_last_positions(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the pool slots of the last `count` positions of each sequence, int64 [b, count], 0 for positions
        before its beginning, and bool [b, count], True where the position exists.
        """
        back = torch.arange(-count, 0, device=self.lengths.device)
        places = self.lengths[:, None] + back
        there = places >= 0
        return self.slots_of_positions(places.clamp(min=0)).masked_fill(~there, 0), there


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: CacheBlockTables,
    *,
    window: int | None = None,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute causal attention of the last tokens of every sequence over all cached keys of the sequence.

    q: [b, queries, n, d]; k: [slots, g, d]; v: [slots, g, dv], each of the g key heads serving n/g query heads.
    where: the slots of each sequence. window: number of keys before its own that a query attends to; None: all.
    Returns [b, queries, n * dv]; zeros for a query that attends to no key.
    """
    rows, queries, heads, size = q.shape
    keys = torch.arange(where.longest, device=q.device)
    at = where.lengths[:, None].to(torch.int64) - queries + torch.arange(queries, device=q.device)
    inside = keys < where.lengths[:, None]
    slots = where.slots_of_positions(
        keys.expand(rows, -1).minimum((where.lengths[:, None].to(torch.int64) - 1).clamp(min=0))
    )
    # What no row has may hold anything, and nothing times NaN is NaN.
    gathered_k, gathered_v = (x[slots].masked_fill(~inside[..., None, None], 0.0) for x in (k, v))
    grouped = q.unflatten(2, (k.shape[1], -1))
    scored = torch.einsum("bqgrd,bkgd->bgrqk", grouped, gathered_k).to(accumulation_dtype_of(q.dtype))
    scored = scored * (size**-0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        scored = scores.softcap * torch.tanh(scored / scores.softcap)
    ahead = keys - at[..., None]
    seen = (ahead <= 0) & inside[:, None]
    if window is not None:
        seen = seen & (ahead >= -window)
    seen = seen[:, None, None]
    blind = ~seen.any(dim=-1, keepdim=True)
    scored = scored.masked_fill(~(seen | blind), float("-inf"))
    if scores.sink is not None:
        sink = scores.sink.to(scored.dtype).view(1, k.shape[1], -1, 1, 1).expand(*scored.shape[:-1], 1)
        scored = torch.cat((scored, sink), dim=-1)
    shares = scored.softmax(dim=-1)[..., : where.longest].masked_fill(blind, 0.0).to(v.dtype)
    return torch.einsum("bgrqk,bkgd->bqgrd", shares, gathered_v).reshape(rows, queries, heads * v.shape[2])


def paged_kernel_error(
    kernel: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, *, heads: int, groups: int, size: int
) -> float:
    """Return the largest difference between the output of a paged attention kernel and `attention` in fp64, over the
    largest value; infinite if it is NaN.

    The trial has three sequences of 70, 9 and 0 keys with a window of 50: q [3, 1, heads, size], pools [96, groups,
    size].
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        for shape in ((3, 1, heads, size), (96, groups, size), (96, groups, size))
    )
    tables = torch.tensor([[3, 1, 5, 0, 4], [2, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.int32)
    where = CacheBlockTables(tables, torch.tensor([70, 9, 0], dtype=torch.int32), 16, 70)
    there = CacheBlockTables(tables.to(device), where.lengths.to(device), 16, 70)
    result = kernel(*(x.to(device) for x in (q, k, v)), there, window=50).cpu().double()
    expected = paged_attention(q.double(), k.double(), v.double(), where, window=50)
    gap = ((result - expected).abs().max() / expected.abs().max()).item()
    return gap if gap == gap else float("inf")
