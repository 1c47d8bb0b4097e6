"""Attention by `torch.nn.attention.varlen`: packed documents and windows without a mask, keys and values of groups as they are.

A mask of s x s is never made: documents are sequences of different lengths, laid end to end (`documents.py`), a window is two numbers. torch has it
from 2.11 on, by its own build of flash-attn.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels import fused
from megatron.core.kernels.documents import starts_of
from megatron.core.kernels.mask import MaskSpec, Scores

# Imported here and not in a call, where torch's compiler would stop.
_LIBRARY: Any = import_module("torch.nn.attention.varlen") if find_spec("torch.nn.attention.varlen") else None


def is_there() -> bool:
    """Whether this torch has it, with windows and groups."""
    names = inspect.signature(_LIBRARY.varlen_attn).parameters if _LIBRARY is not None else {}
    return {"window_size", "enable_gqa", "scale"} <= set(names)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float = 0.0, scores: Scores = Scores()
) -> Tensor:
    """Compute `reference.attention`. q: [s, b, n, d]; k, v: [s, b, g, d]. Returns [s, b, n * d].

    Documents must be contiguous. Masks that only generation needs (queries that are not all keys, missing keys) are left to `fused`.
    """
    others = (mask.padding, mask.query_places, mask.key_places, mask.query_documents)
    if len(q) != len(k) or any(one is not None for one in others):
        return fused.attention(q, k, v, mask, dropout, scores)
    assert not dropout and (scores.softcap, scores.bias, scores.sink) == (None, None, None), (
        "the table offers it without"
    )
    length, batch = q.shape[:2]
    if mask.documents is None:
        starts, longest = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device), length
    else:
        known = starts_of(mask.documents, mask.starts)
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
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return output.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)


def unfit(*, device: str, dtype: torch.dtype, head_sizes: tuple[int, int], dropout: float, lacks: str) -> str:
    """Return why it cannot compute attention; an empty string if it can. head_sizes: of keys and values; lacks: required features that it has not."""
    if device != "cuda":
        return "it needs a CUDA device"
    if not is_there():
        return "torch has it with windows and groups from 2.11 on"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "it needs a GPU from Ampere on"
    if dtype not in (torch.float16, torch.bfloat16):
        return "it needs fp16 or bf16"
    if head_sizes[0] != head_sizes[1]:
        return "it needs values of the size of keys"
    if max(head_sizes) > 256:
        return f"its heads have at most 256 sizes, not {max(head_sizes)}"
    return "it has no dropout" if dropout > 0 else lacks
