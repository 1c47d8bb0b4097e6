"""Which places of a sequence each context rank holds.

A sequence is cut into twice as many chunks as there are ranks, and every rank takes one from each end:

    4 ranks, 8 chunks      rank 0: 0 7      rank 1: 1 6      rank 2: 2 5      rank 3: 3 4

Under a causal mask a late place looks at more keys than an early one; with a chunk from each end, all ranks have the same
number of pairs to score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Zigzag:
    """The cut of `length` places over `size` ranks. Where 2 * size does not divide the length, chunks differ by a place."""

    length: int
    size: int

    def chunks(self, rank: int) -> tuple[range, range]:
        """The places that a rank holds, in its order."""
        return self._chunk(rank), self._chunk(2 * self.size - 1 - rank)

    def count(self, rank: int) -> int:
        """How many places a rank holds."""
        return sum(len(chunk) for chunk in self.chunks(rank))

    def counts(self) -> list[int]:
        """How many places each rank holds."""
        return [self.count(rank) for rank in range(self.size)]

    def places(self, rank: int, device: torch.device) -> Tensor:
        """The places that a rank holds, int64 [s/cp]."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunks(rank)])

    def piece(self, whole: Tensor, rank: int, dim: int = 0) -> Tensor:
        """What a rank holds of a tensor with all places along a dimension."""
        parts = [whole.narrow(dim, chunk.start, len(chunk)) for chunk in self.chunks(rank)]
        return torch.cat(parts, dim=dim)

    def coarser(self, factor: int) -> Zigzag:
        """The cut over every `factor` neighbouring ranks taken as one: together, these hold the chunks of that cut."""
        return Zigzag(self.length, self.size // factor)

    def in_order(self, ranks: range, device: torch.device) -> Tensor:
        """Where to find the places of some ranks, lowest first, among the pieces of these ranks laid end to end."""
        return torch.cat([self.places(rank, device) for rank in ranks]).argsort()

    def _chunk(self, number: int) -> range:
        chunks = 2 * self.size
        return range(number * self.length // chunks, (number + 1) * self.length // chunks)
