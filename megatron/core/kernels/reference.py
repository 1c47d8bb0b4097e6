"""Every op in plain torch: readable, differentiable, on any device. These functions *define* the ops; all other kernels are compared with them.

Sums are accumulated in fp32 for fp16 and bf16 inputs, and in fp64 for fp64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.mask import MaskSpec, ScoreModifiers


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over `dtype` are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, dropout: float = 0.0, scores: ScoreModifiers = ScoreModifiers()
) -> Tensor:
    """Softmax attention of every query over the keys that the mask allows (Vaswani et al., 2017).

    q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g, dv], each of the g heads serving n/g query heads. Returns [queries, b, n * dv]; zeros for a query
    that attends to no key.
    """
    queries, batch, heads, size = q.shape
    repeat = heads // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scored = (q @ k.transpose(-2, -1)).to(accumulation_dtype(q.dtype)) * (
        size**-0.5 if scores.scale is None else scores.scale
    )
    if scores.softcap is not None:
        scored = scores.softcap * torch.tanh(scored / scores.softcap)
    if scores.bias is not None:
        scored = scored + scores.bias
    seen = mask.as_bool(queries, k.shape[2], q.device)
    blind = None if mask.is_plain else ~seen.any(dim=-1, keepdim=True)  # the softmax of nothing is not a number
    scored = scored.masked_fill(~seen if blind is None else ~(seen | blind), float("-inf"))
    if scores.sink is not None:
        sink = scores.sink.to(scored.dtype).view(1, -1, 1, 1).expand(*scored.shape[:3], 1)
        scored = torch.cat((scored, sink), dim=-1)
    shares = scored.softmax(dim=-1)[..., : k.shape[2]]
    if blind is not None:
        shares = shares.masked_fill(blind, 0.0)
    weights = F.dropout(shares, dropout).to(v.dtype)
    return (weights @ v).permute(2, 0, 1, 3).reshape(queries, batch, heads * v.shape[-1])


def largest_scores(q: Tensor, k: Tensor, mask: MaskSpec, scale: float | None = None, block: int = 256) -> Tensor:
    """Return the largest scaled score of every head among the allowed ones, [n]; -inf where none is allowed.

    q: [queries, b, n, d]; k: [keys, b, g, d]. The scores of `block` queries are held at a time.
    """
    queries, _, heads, size = q.shape
    keys, groups = k.shape[0], k.shape[2]
    places = torch.arange(keys - queries, keys, device=q.device) if mask.query_places is None else mask.query_places
    own = (
        mask.query_documents
        if mask.query_documents is not None or mask.documents is None
        else mask.documents[:, -queries:]
    )
    q = q.unflatten(2, (groups, heads // groups)).permute(1, 2, 3, 0, 4)
    k = k.permute(1, 2, 3, 0)[:, :, None]
    largest = q.new_full((groups, heads // groups), float("-inf"), dtype=accumulation_dtype(q.dtype))
    for start in range(0, queries, block):
        rows = slice(start, start + block)
        part = replace(mask, query_places=places[rows], query_documents=None if own is None else own[:, rows])
        some = (q[..., rows, :] @ k).to(largest.dtype) * (size**-0.5 if scale is None else scale)
        seen = part.as_bool(some.shape[-2], keys, q.device)[:, :, None]
        largest = torch.maximum(largest, some.masked_fill(~seen, float("-inf")).amax(dim=(0, 3, 4)))
    return largest.flatten()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension (Ba et al., 2016). x: [..., h]; weight, bias: [h]. Returns the shape of x."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """x over its root mean square along the last dimension (Zhang and Sennrich, 2019), times the weight [h] if there is one. Returns the shape of x."""
    wide_x = x.to(accumulation_dtype(x.dtype))
    normed = (wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return normed if weight is None else normed * weight


def residual_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return x + update, and its norm: LayerNorm with a bias, RMSNorm without. x, update: [..., h]."""
    total = x + update
    return total, rms_norm(total, weight, epsilon) if bias is None else layer_norm(total, weight, bias, epsilon)


def activation(x: Tensor, name: str) -> Tensor:
    """Apply gelu, gelu_tanh, silu, quick_gelu (x * sigmoid(1.702 x)), relu or squared_relu to each element of x [...]."""
    if name == "gelu":
        return F.gelu(x)
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    if name == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    assert name == "squared_relu", f"no activation is called {name}"
    return F.relu(x).square()


@dataclass(frozen=True, slots=True)
class GatingOptions:
    """What a gated MLP does besides its activation (gpt-oss).

    clamp: upper limit of the gate, and limit of the linear half in both directions. offset: added to the linear half.
    """

    clamp: float | None = None
    offset: float = 0.0


def gated_activation(x: Tensor, name: str, gating: GatingOptions = GatingOptions()) -> Tensor:
    """Return activation(gate) * (up + offset), [..., f] (Shazeer, 2020). x: [..., 2 f], gate and up one after the other."""
    gate, up = x.chunk(2, dim=-1)
    if gating.clamp is not None:
        gate, up = gate.clamp(max=gating.clamp), up.clamp(-gating.clamp, gating.clamp)
    return activation(gate, name) * (up + gating.offset if gating.offset else up)


def bias_activation(
    x: Tensor, bias: Tensor, name: str, gating: GatingOptions | None = None, counts: Tensor | None = None
) -> Tensor:
    """Return the activation of x + bias; gating: it is gated. x: [..., f] or [..., 2 f]; bias: [f] or [2 f]; returns [..., f].

    counts: [e], rows of each expert: x is [n, ..], sorted by expert, and bias one of each expert, [e, ..].
    """
    x = x + bias if counts is None else with_expert_bias(x, bias, counts)
    return activation(x, name) if gating is None else gated_activation(x, name, gating)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first r elements of every head by position (Su et al., 2021).

    x: [s, b, n, d]; cos, sin: [s, b or 1, 1, r] in fp32. interleaved: pairs are neighbours; else the two halves. Returns the shape of x.
    """
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    wide_x = turned.to(cos.dtype)
    if interleaved:
        across = torch.stack((-wide_x[..., 1::2], wide_x[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = wide_x.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    turned = (wide_x * cos + across * sin).to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def rotary_qkv(
    heads: Tensor, counts: tuple[int, ...], cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, ...]:
    """Split the heads of a fused projection, and rotate queries and keys by position.

    heads: [s, b, sum of counts, d], [q | k | v], or with a gate [q | gate | k | v], so many heads each; cos, sin: as in `rotary`. Returns the parts [s, b, count, d].
    """
    q, *gate, k, v = heads.split(counts, dim=2)
    return rotary(q, cos, sin, interleaved), *gate, rotary(k, cos, sin, interleaved), v


def split_qkv(heads: Tensor, counts: tuple[int, ...], bias: Tensor | None) -> tuple[Tensor, ...]:
    """Split the heads of a fused projection, whose bias is already in them and gets its gradient here.

    heads, counts: as in `rotary_qkv`; bias: [sum of counts * d]. Returns the parts [s, b, count, d].
    """
    if bias is not None:
        heads = heads + (bias - bias.detach()).view(heads.shape[2:])
    return heads.split(counts, dim=2)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with the matrix and bias of each row's expert; rows of x are sorted by expert.

    x: [n, in]; weight: [e, out, in]; counts: [e] int64, rows of each expert; bias: [e, out]. Returns [n, out].
    """
    rows = x.split(counts.tolist())
    output = torch.cat([F.linear(own, matrix) for own, matrix in zip(rows, weight.unbind(0), strict=True)])
    return with_expert_bias(output, bias, counts)


def with_expert_bias(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Return each row [n, out] plus the bias [e, out] of its expert. counts: [e]."""
    return rows if bias is None else rows + bias.index_select(0, expert_of_rows(rows, counts))


def expert_of_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the expert of each row, [n]. counts: [e], rows of each expert."""
    experts = torch.arange(len(counts), device=counts.device)
    return experts.repeat_interleave(counts, output_size=len(rows))
