"""`torch.nn.attention.varlen.varlen_attn` in plain torch, on any device, as torch's documentation describes it; no number is read on the host.

It is written from the contract and not from our use of it: [tokens, heads, size], sequences of different lengths between the numbers of `cu_seq`, windows (left,
right) with -1 for no end and (-1, 0) for causality, counted from the last query and the last key of a sequence, groups only if they are asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OPTIONS: dict[str, Any] = {"scale": None, "window_size": (-1, -1), "enable_gqa": False}


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, **how: Any
) -> Tensor:
    """query: [tokens, n, d]; key, value: [tokens, g, d]; cu_seq_q, cu_seq_k: int32 [sequences + 1]; how: see OPTIONS. Returns [tokens, n, d]."""
    assert set(how) <= set(OPTIONS), f"unknown options {sorted(set(how) - set(OPTIONS))}"
    scale, window_size, enable_gqa = ({**OPTIONS, **how}[name] for name in OPTIONS)
    assert query.dim() == 3 and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32, "tokens, heads, size; int32"
    assert isinstance(max_q, int) and isinstance(max_k, int)
    assert enable_gqa or query.shape[1] == key.shape[1], "groups have to be asked for"
    repeats = query.shape[1] // key.shape[1]
    if query.device.type == "cpu":
        for starts, longest, tokens in ((cu_seq_q, max_q, len(query)), (cu_seq_k, max_k, len(key))):
            assert starts[0] == 0 and starts[-1] == tokens and starts.diff().max() <= longest, (
                "a sequence is longer than was said"
            )
    of_query, from_end_q = _places(cu_seq_q, len(query))
    of_key, from_end_k = _places(cu_seq_k, len(key))
    ahead = from_end_q[:, None] - from_end_k[None, :]
    seen = of_query[:, None] == of_key[None, :]
    left, right = window_size
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    k, v = key.repeat_interleave(repeats, 1).to(wide), value.repeat_interleave(repeats, 1).to(wide)
    scores = torch.einsum("qnd,knd->nqk", query.to(wide), k) * (query.shape[-1] ** -0.5 if scale is None else scale)
    blind = ~seen.any(-1)
    shares = scores.masked_fill(~(seen | blind[:, None]), float("-inf")).softmax(-1).masked_fill(blind[:, None], 0.0)
    return torch.einsum("nqk,knd->qnd", shares, v).to(query.dtype)


def _places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of every token, and how far it is from the sequence's end."""
    number = torch.arange(tokens, device=starts.device)
    sequence = (number[:, None] >= starts[None, 1:].to(torch.int64)).sum(1)
    return sequence, starts[1:].to(torch.int64)[sequence] - number
