"""Attention over one block of keys, such that the results over several blocks can be merged (ring attention).

    a block gives      output = softmax(scores) v   and   lse = log(sum(exp(scores)))
    two blocks merge   lse = log(exp(lse1) + exp(lse2)),   output = exp(lse1 - lse) output1 + exp(lse2 - lse) output2

(Milakov and Gimelshein, 2018). The backward pass of a block needs only the output and lse over all keys, since exp(scores - lse) are
the true probabilities (Dao et al., 2022). Here heads come before positions: q [b, n, queries, d], k [b, g, keys, d], v [b, g, keys, dv], output
[b, n, queries, dv], lse [b, n, queries]; lse is -inf for a query that attends to no key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.ops.reference import accumulation_dtype_of

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class BlockwiseAttentionOptions:
    """How the attention scores of a block of queries and keys are computed and masked.

    scale, softcap: as in `AttentionScoreModifiers`. seen: bool [b or 1, 1, queries, keys], True where a query attends
    to a key; None: everywhere. causal: each query attends to keys up to its own position; there are as many keys as
    queries. kept: dropout factors [b, n, queries, keys], 0 or 1 / (1 - p). fused: whether torch's own kernels may be
    used.
    """

    scale: float
    softcap: float | None = None
    seen: Tensor | None = None
    causal: bool = False
    kept: Tensor | None = None
    fused: bool = True

    def fits_cpu_flash_kernel(self, q: Tensor) -> bool:
        """Return whether torch's flash attention kernel for CPUs can compute this block: q is on a CPU, and there is no
        soft cap, mask tensor or dropout. q: [b, n, s, d].
        """
        return (
            self.fused and q.device.type == "cpu" and self.softcap is None and self.seen is None and self.kept is None
        )


def block_attention_forward(q: Tensor, k: Tensor, v: Tensor, block: BlockwiseAttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the attention output over one block of keys [b, n, sq, dv], and the log-sum-exp of the scores [b, n, sq],
    both in accumulation dtype.

    q: [b, n, sq, d]; k: [b, g, sk, d]; v: [b, g, sk, dv]. Where torch's flash kernel computes it, the output was
    rounded to q's dtype.
    """
    if block.fits_cpu_flash_kernel(q):
        output, lse = _flash(*_equalize_heads_for_flash(q, k, v), 0.0, block.causal, scale=block.scale)
        return output[..., : v.shape[-1]].to(lse.dtype), lse
    scores, _ = _block_scores(q, k, block)
    lse = scores.logsumexp(dim=-1)
    shares = (scores - _finite_lse(lse)[..., None]).exp()
    if block.kept is not None:
        shares = shares * _group_heads(block.kept, k.shape[1])
    output = _flatten_group_queries(shares.to(v.dtype)) @ v
    return output.to(lse.dtype).reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def block_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, block: BlockwiseAttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through one block of keys, in their shapes and in accumulation dtype.

    q: [b, n, sq, d]; k: [b, g, sk, d]; v: [b, g, sk, dv]. gradient and output [b, n, sq, dv], in v's dtype, and lse [b,
    n, sq] are those of attention over all keys, not just this block.
    """
    if block.fits_cpu_flash_kernel(q):
        made, size = _equalize_heads_for_flash(q, k, v), max(q.shape[-1], v.shape[-1])
        dq, dk, dv = _flash_backward(
            _pad_last_dim(gradient, size), *made, _pad_last_dim(output, size), lse, 0.0, block.causal, scale=block.scale
        )
        repeats = q.shape[1] // k.shape[1]
        dk, dv = (x.to(lse.dtype).unflatten(1, (-1, repeats)).sum(2) for x in (dk, dv))
        return dq.to(lse.dtype)[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
    groups = k.shape[1]
    scores, slope = _block_scores(q, k, block)
    shares = (scores - _finite_lse(_group_heads(lse, groups))[..., None]).exp()
    rows = _flatten_group_queries(_group_heads(gradient, groups))
    dropout_mask = None if block.kept is None else _group_heads(block.kept, groups)
    dropped = shares if dropout_mask is None else shares * dropout_mask
    dv = _flatten_group_queries(dropped.to(v.dtype)).transpose(-2, -1) @ rows
    dshares = (rows @ v.transpose(-2, -1)).to(scores.dtype).view_as(shares)
    if dropout_mask is not None:
        dshares = dshares * dropout_mask
    mean = (gradient.to(lse.dtype) * output.to(lse.dtype)).sum(-1, keepdim=True)
    dscores = shares * (dshares - _group_heads(mean, groups)) * block.scale
    if slope is not None:
        dscores = dscores * slope
    flat = _flatten_group_queries(dscores.to(q.dtype))
    dq, dk = flat @ k, flat.transpose(-2, -1) @ _flatten_group_queries(_group_heads(q, groups))
    return dq.to(lse.dtype).reshape(q.shape), dk.to(lse.dtype), dv.to(lse.dtype)


def merge_attention_blocks(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: given output [b, n, s, dv] and lse [b, n, s] of each, return
    those over the union of the keys.
    """
    both = torch.logaddexp(lse, more_lse)
    finite = _finite_lse(both)
    return (lse - finite).exp()[..., None] * output + (more_lse - finite).exp()[..., None] * more, both


def _block_scores(q: Tensor, k: Tensor, block: BlockwiseAttentionOptions) -> tuple[Tensor, Tensor | None]:
    """Return the scores [b, g, n/g, queries, keys], -inf where masked, and the derivative of the soft cap at each
    score; None if there is no cap.
    """
    groups, slope = k.shape[1], None
    rows = _flatten_group_queries(_group_heads(q, groups)) @ k.transpose(-2, -1)
    scores = rows.to(accumulation_dtype_of(q.dtype)).unflatten(2, (-1, q.shape[2])) * block.scale
    if block.softcap is not None:
        capped = torch.tanh(scores / block.softcap)
        scores, slope = block.softcap * capped, 1 - capped.square()
    if block.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if block.seen is not None:
        scores = scores.masked_fill(~block.seen[:, :, None], float("-inf"))
    return scores, slope


def _finite_lse(lse: Tensor) -> Tensor:
    """Return lse with 0 for queries that attend to nothing, so that their probabilities exp(-inf - 0) are 0."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _group_heads(x: Tensor, groups: int) -> Tensor:
    """Reshape [b, n, ...] to [b, g, n/g, ...]."""
    return x.unflatten(1, (groups, -1))


def _flatten_group_queries(x: Tensor) -> Tensor:
    """Reshape [b, g, n/g, queries, ...] to [b, g, n/g * queries, ...]: all queries that share a key head, for one matmul."""
    return x.flatten(2, 3)


def _equalize_heads_for_flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with equal numbers of heads and equal head sizes, as torch's flash kernel requires: key heads
    are repeated, heads are padded with zeros, which changes no result.
    """
    repeats, size = q.shape[1] // k.shape[1], max(q.shape[-1], v.shape[-1])
    k, v = (_pad_last_dim(x, size).repeat_interleave(repeats, dim=1) for x in (k, v))
    return _pad_last_dim(q, size), k, v


def _pad_last_dim(x: Tensor, size: int) -> Tensor:
    """Pad the last dimension with zeros up to `size`."""
    return F.pad(x, (0, size - x.shape[-1]))
