"""Kernels that come with torch: fused attention and norms.

Torch's scaled dot product attention knows neither windows nor sinks; both are expressed by what it has.

A window much shorter than the sequence is a band. Queries are split into blocks, each of which attends to its own range of keys:

    keys     0 1 2 3 4 5 6 7 8 9 ..        window (2, 0), blocks of 4
    block 0  [. . 0 1 2 3]
    block 1      [2 3 4 5 6 7]             the work grows with block + window, not with the sequence
    block 2              [6 7 8 9 ..]

A query that sees no key would make NaN in some backends' backward passes, for the whole sequence. It is shown all keys, and its output is
replaced by zeros.

A sink of score z is an extra key whose value is zero. To make its score the same for every query, heads get extra elements: z in the queries, one in the
sink's key, zero in all other keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megatron.core.kernels.ops import chunked_attention, reference
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers

_CAPPED = 256  # queries whose scores are held at a time where they have a soft cap
_PLANNED = 64  # tokens: lengths are rounded up to its multiples for cuDNN, which builds a plan for every new one
_BLOCK = 128  # queries: below it, the many small matmuls of a band cost more than they save


def attention_by_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `reference.softmax_attention` by torch's scaled dot product attention, with the best of its backends for this
    device.

    q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g, dv]. Returns [queries, b, n * dv]. The backward
    pass keeps no scores: soft-capped attention, and attention with dropout on a CPU, for which torch has no such
    kernel, are computed in chunks or again in the backward pass.
    """
    if scores.softcap is not None:
        return _softcapped_attention(q, k, v, mask, dropout, scores)
    if dropout and q.device.type == "cpu":
        if torch.compiler.is_compiling():
            return checkpoint(_sdpa_or_banded_attention, q, k, v, mask, dropout, scores, use_reentrant=False)
        return chunked_attention.attention_by_query_chunks(q, k, v, mask, dropout, scores)
    return _sdpa_or_banded_attention(q, k, v, mask, dropout, scores)


def _softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    """Compute `attention` with a soft cap, which torch's kernels lack: by the formula, one block of queries at a time;
    the backward pass recomputes the scores of each block.
    """
    queries, keys = len(q), len(k)
    if queries <= _CAPPED:
        return reference.softmax_attention(q, k, v, mask, dropout, scores)
    parts = []
    for start in range(0, queries, _CAPPED):
        rows = slice(start, start + _CAPPED)
        part = mask.of_query_rows(rows, queries, keys, q.device)
        change = scores if scores.bias is None else replace(scores, bias=scores.bias[:, :, rows])
        given = (q[rows], k, v, part, dropout, change)
        parts.append(
            checkpoint(reference.softmax_attention, *given, use_reentrant=False, preserve_rng_state=dropout > 0)
        )
    return torch.cat(parts)


def _sdpa_or_banded_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    """Compute `attention` without a soft cap: in bands of keys if the window is short, else by one call of torch's
    scaled dot product attention. Same shapes as `attention`.
    """
    if scores.bias is None and (band := _band_of_short_window(mask, q.shape[0], k.shape[0])):
        return _banded_attention(q, k, v, mask, band, dropout, scores)
    queries, keys = q.shape[0], k.shape[0]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    plain = scores.bias is None and mask.has_only_causality and (not mask.causal or queries == keys)
    seen = None if plain else mask.as_bool_tensor(queries, keys, q.device)
    blind = None if seen is None or mask.every_query_sees_itself else ~seen.any(-1, keepdim=True)
    if seen is not None and blind is not None:
        seen = seen | blind
    if scores.bias is not None and seen is not None:
        seen = scores.bias.to(q.dtype).masked_fill(~seen, float("-inf"))
    output = _sdpa(q, k, v, seen, plain and mask.causal, dropout, scores)
    return _merge_heads(output if blind is None else output.masked_fill(blind, 0.0))


def attention_by_sdpa_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `attention` by torch's flash backend only (Dao, 2023). q: [queries, b, n, d]; k: [keys, b, g, d]; v:
    [keys, b, g, dv]. Returns [queries, b, n * dv].
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attention_by_sdpa(q, k, v, mask, dropout, scores)


def cudnn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `attention` by torch's cuDNN backend only; key heads are repeated, since it needs as many as query heads.

    q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g, dv]. Returns [queries, b, n * dv]. Plain causal sequences
    are padded to a multiple of 64 tokens, since cuDNN builds a plan for each new length.
    """
    repeats, length = q.shape[2] // k.shape[2], len(q)
    k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
    if mask.causal and mask.has_only_causality and length == len(k) and scores.bias is None:
        # What is added stands behind all queries, so causality hides it.
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, -length % _PLANNED)) if length % _PLANNED else x for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attention_by_sdpa(q, k, v, mask, dropout, scores)[:length]


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Compute `reference.rms_norm` by torch's kernel. x: [..., h]; weight: [h]."""
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, dropout: float, scores: AttentionScoreModifiers
) -> Tensor:
    """Call torch's scaled dot product attention for q [b, n, queries, d] and k, v [b, g, keys, d], with a sink if
    `scores` has one. seen: bool mask, or float tensor that is added to the scores, [b or 1, n or 1, queries, keys];
    None: no mask but `causal`. Returns [b, n, queries, dv].
    """
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    size = v.shape[-1]
    if scores.sink is not None:
        q, k, v, seen = _add_sink_key(
            q, k, v, seen, scores.sink.to(reference.accumulation_dtype_of(q.dtype)) / scale, causal
        )
    repeats = q.shape[1] // k.shape[1]
    if seen is not None and q.is_cuda:  # with a mask, only the slow backend takes groups there
        k, v, repeats = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), 1
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=repeats > 1
    )
    if scores.sink is not None:
        output = output[:, :, int(causal) :, :size]
    return output


def _add_sink_key(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sink: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v and mask of `_sdpa` with one more key in front, whose score is sink [n] for every query and whose
    value is zero.

    sink: divided by the scale of the scores already. Torch aligns causal masks at the first query and the first key, so
    with `causal` an unused first query is added, too.
    """
    high = sink.to(q.dtype)
    parts = torch.stack((high, (sink - high.to(sink.dtype)).to(q.dtype)), dim=-1)  # a half format alone would round it
    q = torch.cat((q, parts[None, :, None].expand(q.shape[0], -1, q.shape[2], -1)), dim=-1)
    k, v = F.pad(k, (0, 2, 1, 0)), F.pad(v, (0, 2, 1, 0))  # backends want values as wide as keys
    k[:, :, 0, -2:] = 1.0
    if seen is not None:
        seen = F.pad(seen, (1, 0), value=True if seen.dtype == torch.bool else 0.0)
    return (F.pad(q, (0, 0, 1, 0)) if causal else q), k, v, seen


def _band_of_short_window(mask: AttentionMaskSpec, queries: int, keys: int) -> tuple[int, int] | None:
    """Return how many positions before and after its own a query attends to, if the window is so short that attention
    in bands saves work; else None.
    """
    if (
        mask.window is None
        or queries != keys
        or not (mask.query_places is mask.key_places is mask.query_documents is None)
    ):
        return None
    left, right = mask.window
    ahead = 0 if mask.causal else right
    fits = left >= 0 and ahead >= 0 and 2 * (max(_BLOCK, left + ahead) + left + ahead) <= keys
    return (left, ahead) if fits else None


def _banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    band: tuple[int, int],
    dropout: float,
    scores: AttentionScoreModifiers,
) -> Tensor:
    """Compute `attention` with a short window in blocks of queries, each over only the keys that it can attend to.
    band: positions before and after a query's own. Same shapes as `attention`.
    """
    (left, ahead), (length, batch) = band, q.shape[:2]
    block = max(_BLOCK, left + ahead)
    count = -(-length // block)
    slab, rest = block + left + ahead, count * block - length

    def unfold_overlapping_key_blocks(x: Tensor, value: float = 0.0) -> Tensor:
        """Cut x [b, g, s, d] into one range of keys for each block of queries, [b * blocks, g, range, d]; ranges
        overlap, positions outside the sequence get `value`.
        """
        padded = F.pad(x, (0, 0, left, ahead + rest), value=value)
        return padded.unfold(2, slab, block).permute(0, 2, 1, 4, 3).flatten(0, 1)

    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    queries = F.pad(heads[0], (0, 0, 0, rest)).unflatten(2, (count, block)).transpose(1, 2).flatten(0, 1)
    offset = torch.arange(slab, device=q.device)[None] - left - torch.arange(block, device=q.device)[:, None]
    near = (offset >= -left) & (offset <= ahead)
    places = torch.arange(length, device=q.device).view(1, 1, length, 1)
    there = unfold_overlapping_key_blocks(places, -1) >= 0
    seen = (near & there.view(count, 1, slab))[None]
    if mask.padding is not None:
        seen = seen & (unfold_overlapping_key_blocks(mask.padding[:, None, :, None].int()) > 0).view(-1, count, 1, slab)
    if mask.documents is not None:
        own = F.pad(mask.documents, (0, rest), value=-1).view(-1, count, block, 1)
        seen = seen & (
            own == unfold_overlapping_key_blocks(mask.documents[:, None, :, None], -1).view(-1, count, 1, slab)
        )
    seen = seen.expand(batch, -1, -1, -1).flatten(0, 1)[:, None]
    blind = ~seen.any(-1, keepdim=True)  # those of the padding behind the sequence are
    keys, values = map(unfold_overlapping_key_blocks, heads[1:])
    output = _sdpa(queries, keys, values, seen | blind, False, dropout, scores)
    output = output.masked_fill(blind, 0.0)
    output = output.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)
    return _merge_heads(output[:, :, :length])


def _merge_heads(output: Tensor) -> Tensor:
    """Reshape [b, n, s, d] to [s, b, n * d]."""
    return output.permute(2, 0, 1, 3).flatten(2)
