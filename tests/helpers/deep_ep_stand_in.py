"""The calls of DeepEP that we use, as its documentation describes them, in plain torch over any process group.

It is written from the library's contract and not from our use of it: `dispatch` brings each token once to every rank that has
one of its experts, in the order of the ranks they come from; `combine` adds up what ranks say of a token, without weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    """The sizes that a tuned configuration asks for."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """deep_ep.Buffer."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes = group, num_nvl_bytes

    get_dispatch_config = get_combine_config = staticmethod(lambda num_ranks: Config())

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        ranks, here = self.group.size(), num_experts // self.group.size()
        chosen = topk_idx[topk_idx >= 0]
        goes = torch.stack([((topk_idx >= 0) & (topk_idx // here == rank)).any(1) for rank in range(ranks)], 1)
        return goes.sum(0).int(), None, torch.bincount(chosen, minlength=num_experts).int(), goes, None

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._travel(x, *handle), None, None, None, None, None
        assert topk_weights.dtype == torch.float32 and num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
        sources = [is_token_in_rank[:, rank].nonzero().flatten() for rank in range(self.group.size())]
        counts: list[Any] = [None] * self.group.size()
        dist.all_gather_object(counts, [len(places) for places in sources], group=self.group)
        handle = (sources, [row[self.group.rank()] for row in counts], len(x))
        here = len(num_tokens_per_expert) // self.group.size()
        first = self.group.rank() * here
        arrived, indices, weights = (self._travel(tensor, *handle) for tensor in (x, topk_idx, topk_weights))
        own = (indices >= first) & (indices < first + here)
        return (
            arrived,
            (indices - first).masked_fill(~own, -1),
            weights.masked_fill(~own, 0.0),
            num_tokens_per_expert[first : first + here].tolist(),
            handle,
            None,
        )

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        sources, arriving, size = handle

        def back(tensor: Tensor) -> Tensor:
            rows = tensor.new_empty((sum(map(len, sources)), *tensor.shape[1:]))
            dist.all_to_all_single(
                rows, tensor.contiguous(), [len(places) for places in sources], arriving, group=self.group
            )
            return tensor.new_zeros((size, *tensor.shape[1:])).index_add_(0, torch.cat(sources), rows)

        return back(x), None if topk_weights is None else back(topk_weights), None

    def _travel(self, tensor: Tensor, sources: list[Tensor], arriving: list[int], size: int) -> Tensor:
        assert len(tensor) == size
        coming = tensor.new_empty((sum(arriving), *tensor.shape[1:]))
        dist.all_to_all_single(
            coming, tensor[torch.cat(sources)], arriving, [len(places) for places in sources], group=self.group
        )
        return coming
