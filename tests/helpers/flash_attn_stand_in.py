"""The calls of flash-attn 2 and 3 that we use, as their documentation describes them, in plain torch on any device.

It is written from the libraries' contract and not from our use of it: rows before heads, sequences of different lengths laid end
to end between the numbers of `cu_seqlens`, causality and windows counted from the last query and the last key, -1 for no end of
a window, 0.0 for no cap. Version 3 has no dropout, and gives the logarithms of the sums beside its output.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def _one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One sequence. q: [queries, n, d]; k, v: [keys, g, d]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1).double(), v.repeat_interleave(repeats, 1).double()
    scores = torch.einsum("qnd,knd->nqk", q.double(), k) * (
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window_size
    distance = torch.arange(k.shape[0])[None, :] - torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance > 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).to(q.dtype)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    assert q.dim() == 4 and q.shape[0] == k.shape[0], "batch, places, heads, size"
    return torch.stack([_one(*row, softmax_scale, causal, window_size, softcap) for row in zip(q, k, v, strict=True)])


def _packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, how: tuple) -> Tensor:
    assert q.dim() == 3 and starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == len(q), (
        "starts are int32, from 0 to the end"
    )
    sizes = (starts[1:] - starts[:-1]).tolist()
    assert max(sizes) <= longest, "a sequence is longer than was said"
    return torch.cat([_one(*some, *how) for some in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)])


_DENSE = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False}
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_VERSION_2 = {"dropout_p": 0.0, "alibi_slopes": None, "return_attn_probs": False}
_VERSION_3 = {"num_splits": 1, "pack_gqa": None, "sm_margin": 0}


def _options(known: dict[str, Any], given: dict[str, Any]) -> tuple[Any, ...]:
    """The options that change what is computed, in the order of `_one`; unknown ones are refused as a call would."""
    assert set(given) <= set(known), f"unknown options {sorted(set(given) - set(known))}"
    found = {**known, **given}
    assert not found.get("dropout_p"), "the stand-in draws nothing"
    return tuple(found[name] for name in ("softmax_scale", "causal", "window_size", "softcap"))


def _module(name: str, more: dict[str, Any], *, tells_sums: bool) -> ModuleType:
    module, known = ModuleType(name), {**_DENSE, **more}

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        output = _dense(q, k, v, *_options(known, given))
        return (output, None) if tells_sums else output

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        starts, same, longest, also = (given.pop(length) for length in _LENGTHS)
        assert torch.equal(starts, same) and longest == also, "queries and keys are the same tokens"
        output = _packed(q, k, v, starts, longest, _options(known, given))
        return (output, None) if tells_sums else output

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    return module


def version_2() -> ModuleType:
    """The module flash_attn."""
    return _module("flash_attn", _VERSION_2, tells_sums=False)


def version_3() -> ModuleType:
    """The module flash_attn_interface."""
    return _module("flash_attn_interface", _VERSION_3, tells_sums=True)
