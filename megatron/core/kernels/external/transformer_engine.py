"""Attention by NVIDIA's Transformer Engine, where it is installed: cuDNN's and flash-attn's kernels, and its choice between them.

Of that library only attention is used, which has neither weights nor scales. Its linear layers and norms own parameters, which our layers do; low-precision products
come from torch's own calls to the same hardware (fp8_native.py).
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from megatron.core.kernels.external import import_problem
from megatron.core.kernels.ops import fused
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.packed_document_starts import document_starts_from_ids
from megatron.core.kernels.ops.requirements import HALF_FORMATS, KernelRequirements, first_reason


def is_te_installed() -> bool:
    """Whether the package transformer_engine is installed."""
    return find_spec("transformer_engine") is not None


def attention_by_te(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `reference.attention` by Transformer Engine. q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g,
    dv]. Returns [queries, b, n * dv].

    The tokens of a document must be contiguous. No bias, sink or soft cap. Masks with padding or explicit positions,
    and documents where queries are not all keys, are passed to `fused.attention`.
    """
    apart = mask.documents is not None
    if (
        mask.padding is not None
        or mask.query_places is not None
        or (apart and (len(q) != len(k) or mask.query_documents is not None))
    ):
        return fused.attention_by_sdpa(q, k, v, mask, dropout, scores)
    assert scores.bias is None and scores.sink is None and scores.softcap is None, (
        "the table offers it for none of these"
    )
    module = _te_attention_module(q.shape[2], k.shape[2], (q.shape[3], v.shape[3]), dropout, scores.scale)
    how: dict[str, Any] = (
        {} if mask.window is None else {"window_size": (mask.window[0], 0) if mask.causal else mask.window}
    )
    if mask.documents is None:
        kind = ("causal" if len(q) == len(k) else "causal_bottom_right") if mask.causal else "no_mask"
        return module(q, k, v, qkv_format="sbhd", attn_mask_type=kind, **how)
    known, batch = document_starts_from_ids(mask.documents, mask.starts), q.shape[1]
    starts, longest = known.places, known.longest
    flat = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    output = module(
        *flat,
        qkv_format="thd",
        attn_mask_type="padding_causal" if mask.causal else "padding",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **how,
    )
    return output.unflatten(0, (batch, -1)).transpose(0, 1)


@lru_cache(maxsize=16)  # a module holds nothing but these choices
def _te_attention_module(heads: int, groups: int, sizes: tuple[int, int], dropout: float, scale: float | None) -> Any:
    """Return Transformer Engine's attention module. heads, groups: numbers of query heads and of key heads; sizes: head
    sizes of keys and of values; scale: factor of scores, None: its default.
    """
    library = import_module("transformer_engine.pytorch")
    return library.DotProductAttention(
        heads,
        sizes[0] if sizes[0] == sizes[1] else sizes,
        num_gqa_groups=groups,
        attention_dropout=dropout,
        attn_mask_type="no_mask",
        softmax_scale=scale,
    )


def te_unsupported_reason(need: KernelRequirements) -> str:
    """Return why attention of Transformer Engine cannot be used; "" if it can."""
    if need.device != "cuda":
        return "it needs a CUDA device"
    if not is_te_installed():
        return "the package transformer_engine is not installed (github.com/NVIDIA/TransformerEngine)"
    lack = first_reason(
        {
            "it needs fp16 or bf16": need.dtype not in HALF_FORMATS,
            "padding is left out by a mask tensor": need.padding,
            "it has no cap on scores": need.softcap,
            "it adds nothing to scores": need.biased_scores,
            "its sinks are its own": need.sinks,
            "sequences are cut over context ranks": need.pieces,
        }
    )
    return lack or import_problem("transformer_engine.pytorch")
