"""Self attention with grouped heads, and what it shares with cross attention.

    MHA: every query head has its own key/value head.  GQA: n/g query heads share one.  MQA: all share one.

The query, key and value matrices are one matrix [q | k | v], or with a gate of the output [q | gate | k | v]; each part is cut over the tensor ranks by
itself. With fewer key/value heads than tensor ranks, neighbouring ranks hold copies of the same head.

On top, as asked: norms or unit length of query and key heads, windows, sinks, caps on scores, and a gate of the output.
"""

from __future__ import annotations

from collections.abc import Callable
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
from megatron.core.transformer.context.layer_build_context import LayerBuildContext, multiply_unless_one
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
        factors = model.multipliers
        self.input_factor, self.output_factor = factors.attention_in_multiplier, factors.attention_out_multiplier
        self.key_factor = factors.key_multiplier
        self.linear_qkv = build.make_column_linear(
            model.hidden_size, (query, *((query,) if self.has_gate else ()), key, key), bias=model.has_qkv_bias
        )
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

    def forward(
        self, x: Tensor, norm: nn.Module | None, context: ForwardContext, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend within the sequence.

        x: [s or s/tp, b, h], before its norm, if there is one; bias: [1, n/tp, s, s], added to the scores. Returns the
        attention's output and the normed input, both like x.
        """
        table = context.table if self.plan.rope else None
        split = self._select_split_qkv_kernel(table)
        linear = self.linear_qkv if split is None else partial(self.linear_qkv, skip_bias_gradient=True)
        qkv, normed = self.build.apply_norm_then_linear(norm, linear, x)
        q, k, v, gate = self._split_qkv_heads(qkv, table, split)
        if self.build.model.qk_l2_norm:
            q, k = self._rms_normalize_heads(q), self._rms_normalize_heads(k)
        mask = context.mask.with_window(self.plan.window)
        if self.peaks is not None and self.training:
            self.peaks.update(
                q, *gather_context_parallel_keys(k, mask, self.build.mesh), self.build.model.softmax_scale
            )
        mixed = attend(
            self.build,
            q,
            k,
            v,
            mask,
            AttentionScoreModifiers(bias=bias, sink=self._attention_sink_logits(q)),
            training=self.training,
            kernel=context.attention_kernel(self.build, self.plan.index),
        )
        if gate is not None:
            mixed = (mixed * torch.sigmoid(gate.to(accumulation_dtype_of(gate.dtype)))).to(mixed.dtype)
        return multiply_unless_one(self.linear_proj(mixed), self.output_factor), normed

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

    @property
    def _has_qk_norms(self) -> bool:
        """Whether queries and keys are normed."""
        return self.q_layernorm is not None and self.k_layernorm is not None

    def _select_split_qkv_kernel(self, table: RotaryTable | None) -> Callable[..., tuple[Tensor, ...]] | None:
        """Return the kernel that splits unrotated heads and computes the gradient of the projection's bias; None if
        torch splits them, or another kernel that rotates them. table: rotary table, or None.
        """
        is_rotated = table is not None and not self._has_qk_norms
        return None if is_rotated or self.input_factor != 1.0 else self.build.kernels.split_qkv

    def _split_qkv_heads(
        self, qkv: Tensor, table: RotaryTable | None, split: Callable[..., tuple[Tensor, ...]] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[s, b, (n + 2g)/tp * d] to q: [s, b, n/tp, d], k, v: [s, b, g/tp, d], and with 2n the gate: [s, b, n/tp * d].

        Queries and keys are normed, if they have norms, and rotated by a table, if there is one. split: see
        `_select_split_qkv_kernel`.
        """
        counts = self.heads, *((self.heads,) if self.has_gate else ()), self.groups, self.groups
        heads = multiply_unless_one(qkv, self.input_factor).view(*qkv.shape[:2], -1, self.head_size)
        if split is not None:
            bias = self.linear_qkv.bias
            q, *gate, k, v = split(heads, counts, bias if bias is not None and bias.requires_grad else None)
        elif table is not None and not self._has_qk_norms:
            pairs = self.build.model.has_interleaved_rotary
            q, *gate, k, v = self.build.kernels.rotary_qkv(heads, counts, table.cos, table.sin, pairs)
        else:
            q, *gate, k, v = heads.split(counts, dim=2)
        k = multiply_unless_one(k, self.key_factor)  # a rotation is linear: before it or behind it
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
            if table is not None:
                q, k = self._apply_rotary_to_tensor(q, table), self._apply_rotary_to_tensor(k, table)
        return q, k, v, gate[0].flatten(2) if gate else None

    def _rms_normalize_heads(self, x: Tensor) -> Tensor:
        """Return heads [s, b, heads, d] divided by their root mean square (RMSNorm without a weight)."""
        return self.build.kernels.rms_norm(x, None, self.build.model.norm_epsilon)

    def _attention_sink_logits(self, q: Tensor) -> Tensor | None:
        """Return the sink logit of each head, [n/tp]: zeros (off-by-one), learned ones, or None without sinks."""
        return q.new_zeros(self.heads) if self.build.model.softmax_type == "off-by-one" else self.softmax_offset

    def _apply_rotary_to_tensor(self, x: Tensor, table: RotaryTable) -> Tensor:
        return self.build.kernels.rotary(x, table.cos, table.sin, self.build.model.has_interleaved_rotary)


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
