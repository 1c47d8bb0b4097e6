"""Self attention with grouped heads, and what it shares with cross attention.

    MHA: every query head has its own key/value head.  GQA: n/g query heads share one.  MQA: all share one.

With fewer key/value heads than tensor ranks, neighbouring ranks hold copies of the same head. `SelfAttention.forward` reads from top to
bottom: projection, rotation, scores, output; what few networks have (norms of heads, sinks, a gate of the output) stands where it acts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.context_parallel.attention import gather_context_parallel_keys
from megatron.core.kernels.ops.mask import AttentionMaskSpec, AttentionScoreModifiers
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.parallel import collectives
from megatron.core.parallel.recompute import recompute
from megatron.core.parallel.spec import (
    FusedWeightSegment,
    ParamSpec,
    ShardedDim,
    constant_initializer,
    meta_parameter,
    normal_initializer,
)
from megatron.core.tensor_parallel.norm import effective_norm_weight
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import RotaryTable
from megatron.core.transformer.mixers.qk_clip import MaxAttentionScoreTracker


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, build: LayerBuildContext, plan: LayerPlan) -> None:
        super().__init__()
        model, tp = build.model, build.mesh.tp.size
        self.build, self.plan = build, plan
        self.head_size = model.kv_channels
        self.heads = model.num_attention_heads // tp
        self.groups = max(1, model.num_query_groups // tp)
        copies = max(1, tp // model.num_query_groups)
        key = FusedWeightSegment(model.key_projection_width, copies)
        query = FusedWeightSegment(model.query_projection_width)
        self.has_gate = model.attention_output_gate
        gate = (query,) if self.has_gate else ()
        # of this rank, by part of the matrix
        self.counts = (self.heads, *(self.heads for _ in gate), self.groups, self.groups)
        self.linear_qkv = build.make_column_linear(model.hidden_size, (query, *gate, key, key), bias=model.has_qkv_bias)
        self.linear_proj = build.make_row_linear(model.query_projection_width, bias=model.add_bias_linear)
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if model.qk_layernorm_across_heads:
            self.q_layernorm = NormAcrossHeads(build, query)
            self.k_layernorm = NormAcrossHeads(build, key)
        elif model.qk_layernorm:  # each rank sees its own heads only, so their gradients are shares of a sum
            self.q_layernorm = build.make_norm(self.head_size, sum_over=("tp",), kind="qk_norm")
            self.k_layernorm = build.make_norm(self.head_size, sum_over=("tp",), kind="qk_norm")
        self.softmax_offset = attention_sink_parameter(build) if model.softmax_type == "learnable" else None
        self.peaks = MaxAttentionScoreTracker() if model.qk_clip else None

    def forward(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Attend within the sequence. normed: [s or s/tp, b, h]; bias: [1, n/tp, s, s], added to the scores. Returns like it."""
        model, kernels = self.build.model, self.build.kernels
        table = context.rotations(self.plan)  # None: this layer has none
        # If nothing stands between projection and rotation, one kernel splits and rotates.
        rotation = table if self.q_layernorm is None else None
        # Another one splits what is not rotated yet; it computes the gradient of the bias along with its own.
        split = kernels.split_qkv if rotation is None else None
        linear = self.linear_qkv if split is None else partial(self.linear_qkv, skip_bias_gradient=True)
        # One matrix for all: [q | k | v], or [q | gate | k | v]; each part is cut over the tensor ranks by itself.
        qkv = self.build.project(linear, normed)  # [s, b, (n + 2g)/tp * d]
        # q: [s, b, n/tp, d]; k, v: [s, b, g/tp, d]; gate, if there is one, like q
        q, *gate, k, v = self.split_heads(qkv, rotation)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
            if table is not None:
                pairs = model.has_interleaved_rotary
                q, k = (kernels.rotary(one, table.cos, table.sin, pairs) for one in (q, k))
        if model.qk_l2_norm:  # heads of unit mean square: RMSNorm without a weight
            q, k = (kernels.rms_norm(one, None, model.norm_epsilon) for one in (q, k))
        mask = context.mask.with_window(self.plan.window)
        if self.peaks is not None and self.training:  # --qk-clip: the largest score of each head
            self.peaks.update(q, *gather_context_parallel_keys(k, mask, self.build.mesh), model.softmax_scale)
        # The kernel is the run's: fused, flash, a ring over context ranks, or one that reads the decoding cache.
        kernel = context.attention_kernel(self.build, self.plan.index)
        scores = AttentionScoreModifiers(bias=bias, sink=self._attention_sink_logits(q))
        mixed = attend(self.build, q, k, v, mask, scores, training=self.training, kernel=kernel)  # [s, b, n/tp * d]
        if gate:
            opened = gate[0].flatten(2).to(accumulation_dtype_of(mixed.dtype)).sigmoid()
            mixed = (mixed * opened).to(mixed.dtype)
        return self.linear_proj(mixed)  # sums over the tensor ranks

    def split_heads(self, qkv: Tensor, rotation: RotaryTable | None) -> Sequence[Tensor]:
        """Split [s, b, (n + 2g)/tp * d] into q, perhaps the gate, k and v, each [s, b, heads, d]; rotate q and k by a table."""
        kernels = self.build.kernels
        heads = qkv.view(*qkv.shape[:2], -1, self.head_size)
        if rotation is not None:
            pairs = self.build.model.has_interleaved_rotary
            return kernels.rotary_qkv(heads, self.counts, rotation.cos, rotation.sin, pairs)
        if kernels.split_qkv is not None:
            bias = self.linear_qkv.bias
            return kernels.split_qkv(heads, self.counts, bias if bias is not None and bias.requires_grad else None)
        return heads.split(self.counts, dim=2)

    def qk_clip_weight_factors(self, shrink: Tensor, alpha: float) -> dict[nn.Parameter, Tensor]:
        """Return of the qkv matrix (and its bias) the factor of each local row, [rows]; 1 for values and gates.

        shrink: factor of the scores of every head of the network, [n]; queries take shrink^alpha, keys shrink^(1 -
        alpha).
        """
        model, tp = self.build.model, self.build.mesh.tp
        groups = shrink.view(model.num_query_groups, -1).amin(dim=1)
        first = tp.rank * self.heads // (model.num_attention_heads // model.num_query_groups)
        keys = groups[first : first + self.groups]
        queries = keys.repeat_interleave(self.heads // self.groups)
        gates = torch.ones_like(queries) if self.has_gate else queries[:0]
        rows = torch.cat((queries**alpha, gates, keys ** (1.0 - alpha), torch.ones_like(keys))).repeat_interleave(
            self.head_size
        )
        linear = self.linear_qkv
        return {linear.weight: rows} if linear.bias is None else {linear.weight: rows, linear.bias: rows}

    def _attention_sink_logits(self, q: Tensor) -> Tensor | None:
        """Return the sink logit of each head, [n/tp]: zeros (off-by-one), learned ones, or None without sinks."""
        return q.new_zeros(self.heads) if self.build.model.softmax_type == "off-by-one" else self.softmax_offset


class NormAcrossHeads(nn.Module):
    """RMSNorm over the channels of all heads of a position, which the tensor ranks share (OLMo 2).

    part: those channels; a rank that holds copies of other ranks' heads sees their squares in the sum as often.
    """

    def __init__(self, build: LayerBuildContext, part: FusedWeightSegment) -> None:
        super().__init__()
        self.build, self.part, self.one_plus = build, part, build.model.apply_layernorm_1p
        spec = ParamSpec(
            (part.size,),
            constant_initializer(0.0 if self.one_plus else 1.0),
            "qk_norm",
            (ShardedDim(0, "tp", (part,)),),
        )
        self.weight = meta_parameter(spec, build.mesh, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [s, b, heads of this rank, d]. Returns the same shape."""
        flat, tp, epsilon = x.flatten(2), self.build.mesh.tp, self.build.model.norm_epsilon
        scale = effective_norm_weight(self.weight, x.dtype, one_plus=self.one_plus)
        if tp.size == 1:
            return self.build.kernels.rms_norm(flat.to(scale.dtype), scale, epsilon).to(x.dtype).view_as(x)
        own = flat.to(accumulation_dtype_of(x.dtype))
        total = collectives.reduce_with_identity_backward(own.square().sum(-1, keepdim=True), tp)
        mean = collectives.identity_with_reduce_backward(total, tp) / (self.part.size * self.part.replicas)
        return ((own * torch.rsqrt(mean + epsilon)).to(scale.dtype) * scale).to(x.dtype).view_as(x)


def attention_sink_parameter(build: LayerBuildContext) -> nn.Parameter:
    """Create the learned sink logit of every head (on the meta device), cut over the tensor ranks as heads are."""
    heads = build.model.num_attention_heads
    spec = ParamSpec(
        (heads,),
        normal_initializer(build.model.init_method_std),
        "vector",
        (ShardedDim(0, "tp", (FusedWeightSegment(heads),)),),
    )
    return meta_parameter(spec, build.mesh, build.dtype)


def attend(
    build: LayerBuildContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMaskSpec,
    scores: AttentionScoreModifiers = AttentionScoreModifiers(),
    *,
    training: bool,
    kernel: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Run the attention kernel with the network's scale, softcap and dropout, recomputed if so configured.

    q: [queries, b, n/tp, d]; k, v: [keys, b, g/tp, d]; scores: only its bias [1, n/tp, queries, keys] and sink [n/tp]
    are used. kernel: in place of the run's. Returns [queries, b, n/tp * d].
    """
    model = build.model
    dropout = model.attention_dropout if training else 0.0
    kernel = kernel or build.kernels.attention

    def core_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None) -> Tensor:
        # "default" leaves the streams alone: without dropout nothing is drawn.
        with build.streams.fork("cut" if dropout else "default"):
            own = AttentionScoreModifiers(
                model.softmax_scale, softcap=model.attention_logit_softcap, bias=bias, sink=sink
            )
            return kernel(q, k, v, mask, dropout, own)

    tensors = q, k, v, scores.bias, scores.sink
    if build.recomputes_module("core_attn"):
        return recompute(core_attention, build.streams, *tensors)
    return core_attention(*tensors)


def default_position_ids(ids: Tensor) -> Tensor:
    """Return the positions 0 to s - 1, [1, s], for ids [b, s]."""
    return torch.arange(ids.shape[1], device=ids.device)[None]
