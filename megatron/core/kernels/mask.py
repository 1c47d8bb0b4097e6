"""Which key each query may see, and what becomes of its score, said in a few facts; kernels decide how."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """causal: no key after the query. window: (left, right), no key more than so many places before or after the query;
    -1 for any number.

    documents: [b, keys] numbers; a query sees only keys of its own document. padding: bool [b, keys], False where there is no
    token. query_places, key_places: int64 [queries] and [keys], where in the whole sequence they stand; without them
    keys count from 0 and the last query stands at the last key. query_documents: [b, queries], where queries are not the
    last of the keys. A query that sees no key at all gets zero.

    length: places of the whole sequence, when queries and keys are only the pieces that a context rank holds; query_places are
    those of its piece then, documents and padding those of the whole. `context_parallel` makes of it the masks that kernels see.
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    query_places: Tensor | None = None
    key_places: Tensor | None = None
    query_documents: Tensor | None = None
    length: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether causality is all there is, so that kernels need no tensor."""
        return self.documents is None and self.padding is None and self.window is None and self.query_places is None

    def within(self, window: tuple[int, int] | None) -> MaskSpec:
        """This mask for a layer with a window, or without (None)."""
        return self if window is None or window == (-1, -1) else replace(self, window=window)

    def visible(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Boolean [b or 1, 1, queries, keys], True where the query may look."""
        keys = torch.arange(num_keys, device=device) if self.key_places is None else self.key_places
        queries = (
            torch.arange(num_keys - num_queries, num_keys, device=device)
            if self.query_places is None
            else self.query_places
        )
        ahead = (keys[None, :] - queries[:, None])[None, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.causal:
            seen = ahead <= 0
        if self.window is not None:
            left, right = self.window
            seen = seen & (ahead >= -left) if left >= 0 else seen
            seen = seen & (ahead <= right) if right >= 0 else seen
        if self.documents is not None:
            own = self.documents[:, -num_queries:] if self.query_documents is None else self.query_documents
            seen = seen & (own[:, :, None] == self.documents[:, None, :])[:, None]
        if self.padding is not None:
            seen = seen & self.padding[:, None, None]
        return seen


@dataclass(frozen=True, slots=True)
class Scores:
    """What happens to the scores of queries and keys before the softmax, in this order.

    scale: their factor; None: 1/sqrt(head size). softcap: they become softcap * tanh(score / softcap) (Gemma 2). bias: [1, n,
    queries, keys], added to them. sink: [n], one more score a head, which takes weight and gives nothing (gpt-oss).
    """

    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None

    @property
    def are_plain(self) -> bool:
        """Whether scores are scaled and no more."""
        return self.softcap is None and self.bias is None and self.sink is None
