"""Every op in plain torch: readable, differentiable, on any device. These functions *define* the ops; all other kernels are compared with them.

Sums are accumulated in fp32 for fp16 and bf16 inputs, and in fp64 for fp64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers


def accumulation_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of `dtype` values are accumulated: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    dropout: float = 0.0,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
) -> Tensor:
    """Softmax attention of every query over the keys that the mask allows (Vaswani et al., 2017).

    q: [queries, b, n, d]; k: [keys, b, g, d]; v: [keys, b, g, dv]; each of the g key heads serves n/g query heads.
    dropout: probability with which an attention weight is dropped. scores: scale, soft cap, bias and sink of the
    scores. Returns [queries, b, n * dv]; zeros for a query that attends to no key.
    """
    queries, batch, heads, size = q.shape
    repeat = heads // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scored = (q @ k.transpose(-2, -1)).to(accumulation_dtype_of(q.dtype)) * (
        size**-0.5 if scores.scale is None else scores.scale
    )
    if scores.softcap is not None:
        scored = scores.softcap * torch.tanh(scored / scores.softcap)
    if scores.bias is not None:
        scored = scored + scores.bias
    seen = mask.as_bool_tensor(queries, k.shape[2], q.device)
    # The softmax of nothing is not a number.
    blind = None if mask.has_only_causality else ~seen.any(dim=-1, keepdim=True)
    scored = scored.masked_fill(~seen if blind is None else ~(seen | blind), float("-inf"))
    if scores.sink is not None:
        sink = scores.sink.to(scored.dtype).view(1, -1, 1, 1).expand(*scored.shape[:3], 1)
        scored = torch.cat((scored, sink), dim=-1)
    shares = scored.softmax(dim=-1)[..., : k.shape[2]]
    if blind is not None:
        shares = shares.masked_fill(blind, 0.0)
    weights = F.dropout(shares, dropout).to(v.dtype)
    return (weights @ v).permute(2, 0, 1, 3).reshape(queries, batch, heads * v.shape[-1])


def max_attention_scores(
    q: Tensor, k: Tensor, mask: AttentionMaskSpec, scale: float | None = None, block: int = 256
) -> Tensor:
    """Return the largest attention score (after scaling, before the softmax) of every head among the allowed pairs,
    [n]; -inf where no pair is allowed.

    q: [queries, b, n, d]; k: [keys, b, g, d]. scale: factor of the scores; None: 1/sqrt(d). The scores of `block`
    queries are held in memory at a time.
    """
    queries, _, heads, size = q.shape
    keys, groups = k.shape[0], k.shape[2]
    q = q.unflatten(2, (groups, heads // groups)).permute(1, 2, 3, 0, 4)
    k = k.permute(1, 2, 3, 0)[:, :, None]
    largest = q.new_full((groups, heads // groups), float("-inf"), dtype=accumulation_dtype_of(q.dtype))
    for start in range(0, queries, block):
        rows = slice(start, start + block)
        part = mask.of_query_rows(rows, queries, keys, q.device)
        some = (q[..., rows, :] @ k).to(largest.dtype) * (size**-0.5 if scale is None else scale)
        seen = part.as_bool_tensor(some.shape[-2], keys, q.device)[:, :, None]
        largest = torch.maximum(largest, some.masked_fill(~seen, float("-inf")).amax(dim=(0, 3, 4)))
    return largest.flatten()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension (Ba et al., 2016). x: [..., h]; weight, bias: [h]. Returns the shape of x."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Divide x [..., h] by its root mean square over the last dimension (Zhang and Sennrich, 2019), and multiply it by
    the weight [h], if given. epsilon is added to the mean square. Returns the shape of x.
    """
    wide_x = x.to(accumulation_dtype_of(x.dtype))
    normed = (wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return normed if weight is None else normed * weight


def residual_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return x + update, and the normalized sum: LayerNorm if there is a bias, RMSNorm if it is None. x, update: [...,
    h]; weight, bias: [h].
    """
    total = x + update
    return total, rms_norm(total, weight, epsilon) if bias is None else layer_norm(total, weight, bias, epsilon)


def activation(x: Tensor, name: str) -> Tensor:
    """Apply the activation called `name` to each element of x [...]: gelu, gelu_tanh, silu, quick_gelu (x *
    sigmoid(1.702 x)), relu or squared_relu.
    """
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
class GatedActivationOptions:
    """Extra settings of a gated activation, as gpt-oss uses them.

    clamp: upper limit of the gate half, and limit of the linear half in both directions; None: no limit.
    offset: added to the linear half.
    """

    clamp: float | None = None
    offset: float = 0.0


def gated_activation(x: Tensor, name: str, gating: GatedActivationOptions = GatedActivationOptions()) -> Tensor:
    """Return activation(gate) * (up + gating.offset), [..., f] (Shazeer, 2020). x: [..., 2 f], the gate half before the
    linear half; with `gating.clamp` both are clamped first. name: as in `activation`.
    """
    gate, up = x.chunk(2, dim=-1)
    if gating.clamp is not None:
        gate, up = gate.clamp(max=gating.clamp), up.clamp(-gating.clamp, gating.clamp)
    return activation(gate, name) * (up + gating.offset if gating.offset else up)


def bias_activation(
    x: Tensor, bias: Tensor, name: str, gating: GatedActivationOptions | None = None, counts: Tensor | None = None
) -> Tensor:
    """Return the activation called `name` of x + bias, [..., f]. x: [..., f]; bias: [f]. With `gating` the
    activation is gated: x [..., 2 f], bias [2 f].

    counts: [e], number of rows of each expert; x is then [n, ..], sorted by expert, and bias [e, ..] has one row for
    each expert.
    """
    x = x + bias if counts is None else add_bias_of_expert_rows(x, bias, counts)
    return activation(x, name) if gating is None else gated_activation(x, name, gating)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first r elements of every head by its token's position (Su et al., 2021).

    x: [s, b, n, d]; cos, sin: [s, b or 1, 1, r] in fp32. interleaved: elements 2i and 2i + 1 form a pair; else i and i
    + r/2. Returns the shape of x.
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
    """Split the output of a fused QKV projection into its parts, and rotate queries and keys by position.

    heads: [s, b, sum of counts, d], laid out [q | k | v], or with an output gate [q | gate | k | v]. counts: number of
    heads of each part. cos, sin, interleaved: as in `rotary`. Returns the parts in this order, each [s, b, count, d].
    """
    q, *gate, k, v = heads.split(counts, dim=2)
    return rotary(q, cos, sin, interleaved), *gate, rotary(k, cos, sin, interleaved), v


def split_qkv(heads: Tensor, counts: tuple[int, ...], bias: Tensor | None) -> tuple[Tensor, ...]:
    """Split the output of a fused QKV projection, to which its bias was added already, into its parts; the backward
    pass also computes the gradient of the bias.

    heads, counts: as in `rotary_qkv`; bias: [sum of counts * d], or None. Returns the parts, each [s, b, count, d].
    """
    if bias is not None:
        heads = heads + (bias - bias.detach()).view(heads.shape[2:])
    return heads.split(counts, dim=2)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [n, out], with the weight matrix and bias of each row's expert.

    x: [n, in], rows sorted by expert; weight: [e, out, in]; counts: int64 [e], number of rows of each expert;
    bias: [e, out] or None.
    """
    rows = x.split(counts.tolist())
    output = torch.cat([F.linear(own, matrix) for own, matrix in zip(rows, weight.unbind(0), strict=True)])
    return add_bias_of_expert_rows(output, bias, counts)


def add_bias_of_expert_rows(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Add to each row of `rows` [n, out], sorted by expert, the bias of its expert. bias: [e, out], or None to return
    the rows as they are; counts: [e], number of rows of each expert.
    """
    return rows if bias is None else rows + bias.index_select(0, expert_of_rows(rows, counts))


def expert_of_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Return the index of the expert of each row, [n], where rows [n, ...] are sorted by expert. counts: [e], number of
    rows of each expert.
    """
    experts = torch.arange(len(counts), device=counts.device)
    return experts.repeat_interleave(counts, output_size=len(rows))
