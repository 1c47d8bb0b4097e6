"""Which keys each query may attend to, and how scores are changed, described without tensors of all pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.kernels.ops.packed_document_starts import PackedDocumentStarts


@dataclass(frozen=True, slots=True)
class AttentionMaskSpec:
    """An attention mask, described without a tensor of all pairs. A query that attends to no key gets zeros.

    causal: no key after the query. window: (left, right), largest distance of keys before and after the query; -1:
    unlimited; None: no window. documents: numbers [b, keys]; a query attends only to keys of its own document. padding:
    bool [b, keys], False where there is no token. query_places, key_places: int64 [queries] and [keys], positions in
    the whole sequence; None: keys count from 0 and the last query is at the last key.
    query_documents: [b, queries], needed if the queries are not the last keys. starts: document starts, if they were
    computed on the host.

    length: length of the whole sequence, if queries and keys are only the shards of a context rank; query_places are
    then those of the shard, while documents and padding are of the whole sequence. `context_parallel` turns it into the
    masks that kernels get.
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    query_places: Tensor | None = None
    key_places: Tensor | None = None
    query_documents: Tensor | None = None
    length: int | None = None
    starts: PackedDocumentStarts | None = None

    @property
    def has_only_causality(self) -> bool:
        """Whether the mask is given by `causal` alone (causal or full), without documents, padding, window or query
        positions.
        """
        return self.documents is None and self.padding is None and self.window is None and self.query_places is None

    @property
    def every_query_sees_itself(self) -> bool:
        """Whether every query attends at least to the key at its own position: true without padding and without
        explicit positions.
        """
        places = (self.query_places, self.key_places, self.query_documents)
        return self.padding is None and all(one is None for one in places)

    def with_window(self, window: tuple[int, int] | None) -> AttentionMaskSpec:
        """Return this mask with the window (left, right) of a layer; unchanged for None and (-1, -1)."""
        return self if window is None or window == (-1, -1) else replace(self, window=window)

    def query_and_key_places(self, num_queries: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, int64 [queries] and [keys]."""
        queries, keys = self.query_places, self.key_places
        return (
            torch.arange(num_keys - num_queries, num_keys, device=device) if queries is None else queries,
            torch.arange(num_keys, device=device) if keys is None else keys,
        )

    def documents_of_queries(self, num_queries: int) -> Tensor | None:
        """Return the document numbers of the queries, [b, queries]; None without documents."""
        if self.query_documents is not None or self.documents is None:
            return self.query_documents
        return self.documents[:, -num_queries:]

    def of_query_rows(self, rows: slice, num_queries: int, num_keys: int, device: torch.device) -> AttentionMaskSpec:
        """Return the mask of a range of the queries over all keys."""
        places, _ = self.query_and_key_places(num_queries, num_keys, device)
        own = self.documents_of_queries(num_queries)
        return replace(self, query_places=places[rows], query_documents=None if own is None else own[:, rows])

    def as_bool_tensor(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """Return the mask as a bool tensor [b or 1, 1, queries, keys], True where the query attends to the key."""
        queries, keys = self.query_and_key_places(num_queries, num_keys, device)
        ahead = (keys[None, :] - queries[:, None])[None, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.causal:
            seen = ahead <= 0
        if self.window is not None:
            left, right = self.window
            seen = seen & (ahead >= -left) if left >= 0 else seen
            seen = seen & (ahead <= right) if right >= 0 else seen
        own = self.documents_of_queries(num_queries)
        if own is not None and self.documents is not None:
            seen = seen & (own[:, :, None] == self.documents[:, None, :])[:, None]
        if self.padding is not None:
            seen = seen & self.padding[:, None, None]
        return seen


@dataclass(frozen=True, slots=True)
class AttentionScoreModifiers:
    """How attention scores are changed before the softmax, in this order.

    scale: factor; None: 1/sqrt(head size). softcap: score -> softcap * tanh(score / softcap) (Gemma 2). bias: [1, n,
    queries, keys], added. sink: [n], an extra score of each head, which takes probability and contributes no value
    (gpt-oss).
    """

    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
