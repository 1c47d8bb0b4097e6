"""Kernels that come with torch itself: fused attention and norms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.kernels import reference
from megatron.core.kernels.mask import MaskSpec, Scores


def attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float = 0.0, scores: Scores = Scores()) -> Tensor:
    """`reference.attention` by torch's scaled dot product attention: the best of its backends for this device.

    q: [queries, b, n, d]; k, v: [keys, b, g, d]. Returns [queries, b, n * dv].
    """
    if scores.softcap is not None or scores.sink is not None:
        return reference.attention(q, k, v, mask, dropout, scores)
    queries, batch, heads, _ = q.shape
    grouped = heads != k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    plain = scores.bias is None and mask.is_plain and (not mask.causal or queries == k.shape[2])
    seen = None if plain else mask.visible(queries, k.shape[2], q.device)
    if scores.bias is not None:
        seen = scores.bias.to(q.dtype).masked_fill(~seen, float("-inf"))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=plain and mask.causal,
                                            scale=scores.scale, enable_gqa=grouped)
    return output.permute(2, 0, 1, 3).reshape(queries, batch, heads * v.shape[-1])


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float = 0.0, scores: Scores = Scores()) -> Tensor:
    """Like `attention`, by torch's flash backend only (Dao, 2023)."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attention(q, k, v, mask, dropout, scores)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`reference.rms_norm` by torch's kernel."""
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)
