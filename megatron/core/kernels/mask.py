"""Which key each query may see, said in a few facts; kernels decide whether a tensor is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """causal: no key after the query. documents: [b, s] numbers; a query sees only keys of its own document.

    padding: bool [b, keys], False where there is no token; every sample has one, so every query sees a key.
    """

    causal: bool = True
    documents: Tensor | None = None
    padding: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether causality is all there is, so that kernels need no tensor."""
        return self.documents is None and self.padding is None

    def visible(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Boolean [b or 1, 1, queries, keys], True where the query may look. The last query is at the last key."""
        seen = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen.tril(num_keys - num_queries)
        if self.documents is not None:
            same = self.documents[:, -num_queries:, None] == self.documents[:, None, :]
            seen = seen & same[:, None]
        if self.padding is not None:
            seen = seen & self.padding[:, None, None]
        return seen
