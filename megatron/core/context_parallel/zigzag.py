"""The zigzag order: which positions of a sequence each context-parallel rank holds.

A sequence is divided into twice as many chunks as there are ranks, and every rank takes one from each end:

    4 ranks, 8 chunks      rank 0: 0 7      rank 1: 1 6      rank 2: 2 5      rank 3: 3 4

Under a causal mask a late position sees more keys than an early one; with a chunk from each end, all ranks compute the
same number of scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Zigzag:
    """`length` positions sharded over `size` ranks; chunks differ by one where 2 * size does not divide the length."""

    length: int
    size: int

    def chunk_ranges(self, rank: int) -> tuple[range, range]:
        """Return the two ranges of positions that a rank holds, in its order."""
        return self._chunk_range(rank), self._chunk_range(2 * self.size - 1 - rank)

    def num_positions_of_rank(self, rank: int) -> int:
        """Return the number of positions that a rank holds."""
        return sum(len(chunk) for chunk in self.chunk_ranges(rank))

    def position_counts_by_rank(self) -> list[int]:
        """Return the number of positions of every rank."""
        return [self.num_positions_of_rank(rank) for rank in range(self.size)]

    def positions_of_rank(self, rank: int, device: torch.device) -> Tensor:
        """Return the positions that a rank holds, int64 [s/cp]."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunk_ranges(rank)])

    def shard(self, whole: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Return a rank's shard of a tensor with all positions along `dim`: [..., s, ...] to [..., s/cp, ...]."""
        parts = [whole.narrow(dim, chunk.start, len(chunk)) for chunk in self.chunk_ranges(rank)]
        return torch.cat(parts, dim=dim)

    def split(self, x: Tensor, rank: int) -> tuple[Tensor, ...]:
        """Split a rank's shard [s/cp, ...] into its two chunks."""
        return x.split([len(chunk) for chunk in self.chunk_ranges(rank)])

    def with_merged_ranks(self, factor: int) -> Zigzag:
        """Return the zigzag of blocks of `factor` neighbouring ranks as one rank each; factor divides their number."""
        return Zigzag(self.length, self.size // factor)

    def sorting_permutation(self, ranks: range, device: torch.device) -> Tensor:
        """Return the permutation that sorts these ranks' concatenated shards by position, int64 [positions]."""
        return torch.cat([self.positions_of_rank(rank, device) for rank in ranks]).argsort()

    def _chunk_range(self, number: int) -> range:
        """Return the positions of chunk `number` of 2 * size."""
        chunks = 2 * self.size
        return range(number * self.length // chunks, (number + 1) * self.length // chunks)
