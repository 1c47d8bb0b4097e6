"""FlexAttention as torch documents it, in plain torch with gradients, which torch itself has on GPUs only.

A query's score with a key is scaled first and then changed by `score_mod`; keys that the mask hides take no part; a query that
sees none gives zero and a logarithm of -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest


def create_block_mask(
    mask_mod: Callable[..., Tensor], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = "cuda"
) -> Tensor:
    """The whole mask, [B or 1, H or 1, queries, keys]."""
    places = _places(B or 1, H or 1, Q_LEN, KV_LEN)
    return mask_mod(*places).expand(B or 1, H or 1, Q_LEN, KV_LEN)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_aux: AuxRequest | None = None,
) -> Any:
    """query: [b, n, queries, d]; key, value: [b, g, keys, d]."""
    repeats = query.shape[1] // key.shape[1]
    assert repeats == 1 or enable_gqa, "as many key heads as query heads, unless it is said"
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *_places(*scores.shape))
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask, float("-inf"))
    lse = scores.logsumexp(-1)
    finite = torch.where(lse == float("-inf"), 0.0, lse)
    output = (scores - finite[..., None]).exp() @ value
    return output if return_aux is None else (output, AuxOutput(lse=lse))


def _places(*sizes: int) -> list[Tensor]:
    """The number of each row, head, query and key, that broadcast to all pairs."""
    return [torch.arange(size).view([-1 if at == dim else 1 for at in range(4)]) for dim, size in enumerate(sizes)]
