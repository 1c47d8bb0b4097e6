"""Attention by `torch.nn.attention.varlen`: packed documents and windows without a mask, keys and values of groups as they are.

A mask of s x s is never made: documents are sequences of different lengths, laid end to end (`packed_document_starts.py`), a window is two numbers. torch has it
from 2.11 on, by its own build of flash-attn.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.ops import fused
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.packed_document_starts import document_starts_from_ids

# Imported here and not in a call, where torch's compiler would stop; and only by runs that take it, since it imports that compiler.
_LIBRARY: Any = import_module("torch.nn.attention.varlen")
# torch 2.11 gives flash-attn the groups that it gets, later ones want to be told.
_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(_LIBRARY.varlen_attn).parameters


def attention_by_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Compute `reference.softmax_attention` by torch's attention for sequences of different lengths. q: [s, b, n, d]; k,
    v: [s, b, g, d]. Returns [s, b, n * d].

    The tokens of a document must be contiguous. No dropout, soft cap, bias or sink. Masks with padding or explicit
    positions, and queries that are not all keys, are passed to `fused.attention`.
    """
    others = (mask.padding, mask.query_places, mask.key_places, mask.query_documents)
    if len(q) != len(k) or any(one is not None for one in others):
        return fused.attention_by_sdpa(q, k, v, mask, dropout, scores)
    assert not dropout and (scores.softcap, scores.bias, scores.sink) == (None, None, None), (
        "the table offers it without"
    )
    length, batch = q.shape[:2]
    if mask.documents is None:
        starts, longest = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device), length
    else:
        known = document_starts_from_ids(mask.documents, mask.starts)
        starts, longest = known.places, known.longest
    left, right = mask.window or (-1, -1)
    output = _LIBRARY.varlen_attn(
        *(x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)),
        starts,
        starts,
        longest,
        longest,
        scale=scores.scale,
        window_size=(left, 0 if mask.causal else right),
        **({"enable_gqa": q.shape[2] != k.shape[2]} if _ASKS_FOR_GROUPS else {}),
    )
    return output.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)
