"""The attention of Transformer Engine, as its documentation describes it, in plain torch on any device.

It is written from the library's contract and not from our use of it: heads in order [s, b, h, d] or sequences of different lengths
end to end [t, h, d]; causality counted from the first key, or with `bottom_right` from the last; windows (left, right) with -1 for
no end, on the right nothing but 0 or -1 where the mask is causal; the output's heads in one dimension.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)

OPTIONS = {
    "attention_mask",
    "qkv_format",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "max_seqlen_q",
    "max_seqlen_kv",
    "attn_mask_type",
    "window_size",
}


class DotProductAttention(nn.Module):
    """One layer's attention, without weights."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert not attention_dropout, "the stand-in draws nothing"
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.sizes = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.scale = self.sizes[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.usual = {"qkv_format": qkv_format, "attn_mask_type": attn_mask_type, "window_size": window_size}

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **options: Any) -> Tensor:
        """query_layer: [s, b, h, d], or [t, h, d] for thd. Returns [s, b, h * dv], or [t, h * dv]."""
        assert set(options) <= OPTIONS, f"unknown options {sorted(set(options) - OPTIONS)}"
        how = {**self.usual, **{name: given for name, given in options.items() if given is not None}}
        kind, window = how["attn_mask_type"], how["window_size"] or (-1, 0 if "causal" in how["attn_mask_type"] else -1)
        assert kind in MASKS and ("causal" not in kind or window[1] in (0, -1)), (
            "a causal mask has nothing on the right"
        )
        assert (query_layer.shape[-2:], key_layer.shape[-2:]) == (
            (self.heads, self.sizes[0]),
            (self.groups, self.sizes[0]),
        )
        assert value_layer.shape[-2:] == (self.groups, self.sizes[1])
        if how["qkv_format"] == "sbhd":
            assert "padding" not in kind and query_layer.dim() == 4
            rows = [
                self._one(*row, kind, window)
                for row in zip(*(x.unbind(1) for x in (query_layer, key_layer, value_layer)), strict=True)
            ]
            return torch.stack(rows, 1).flatten(2)
        queries, keys = how["cu_seqlens_q"], how["cu_seqlens_kv"]
        assert "padding" in kind and query_layer.dim() == 3 and queries.dtype == keys.dtype == torch.int32
        assert int(queries.diff().max()) <= how["max_seqlen_q"] and int(keys.diff().max()) <= how["max_seqlen_kv"]
        pieces = [
            x.split(starts.diff().tolist())
            for x, starts in ((query_layer, queries), (key_layer, keys), (value_layer, keys))
        ]
        return torch.cat([self._one(*piece, kind, window) for piece in zip(*pieces, strict=True)]).flatten(1)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, kind: str, window: tuple[int, int]) -> Tensor:
        k, v = (x.repeat_interleave(self.heads // self.groups, 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q.double(), k.double()) * self.scale
        from_the_last = "bottom_right" in kind or "causal" not in kind
        places = torch.arange(len(q)) + (len(k) - len(q) if from_the_last else 0)
        distance = torch.arange(len(k))[None, :] - places[:, None]
        hidden = (distance > 0) if "causal" in kind else torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance < -window[0]) if window[0] >= 0 else False
        hidden |= (distance > window[1]) if window[1] >= 0 else False
        return torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v.double()).to(
            q.dtype
        )


def package() -> dict[str, Any]:
    """What stands in sys.modules where the library is installed."""
    whole, inner = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    inner.DotProductAttention = DotProductAttention
    whole.pytorch = inner
    return {"transformer_engine": whole, "transformer_engine.pytorch": inner}
