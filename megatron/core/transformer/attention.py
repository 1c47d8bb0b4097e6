"""Self attention with grouped heads, and what it shares with cross attention.

    MHA: every query head has its own key/value head.  GQA: n/g query heads share one.  MQA: all share one.

The query, key and value matrices are one matrix [q | k | v]; each part is cut over the tensor ranks by itself. With
fewer key/value heads than tensor ranks, neighbouring ranks hold copies of the same head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.plan import LayerPlan
from megatron.core.kernels.mask import MaskSpec, Scores
from megatron.core.parallel.recompute import recompute
from megatron.core.parallel.spec import Part
from megatron.core.tensor_parallel.linear import ColumnLinear, RowLinear
from megatron.core.transformer.build import Build
from megatron.core.transformer.passing import Pass
from megatron.core.transformer.rope import RotaryTable


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, build: Build, plan: LayerPlan) -> None:
        super().__init__()
        model, tp = build.model, build.mesh.tp.size
        self.build, self.plan = build, plan
        self.head_size = model.kv_channels
        self.heads = model.num_attention_heads // tp
        self.groups = max(1, model.num_query_groups // tp)
        copies = max(1, tp // model.num_query_groups)
        key = Part(model.key_size, copies)
        self.linear_qkv = ColumnLinear(
            model.hidden_size, (Part(model.query_size), key, key), bias=model.add_bias_linear or model.add_qkv_bias,
            init=build.initial(), region=build.region, mesh=build.mesh, dtype=build.dtype)
        self.linear_proj = RowLinear(
            model.query_size, model.hidden_size, bias=model.add_bias_linear, init=build.initial_output(),
            region=build.region, mesh=build.mesh, dtype=build.dtype)
        # Each rank sees its own heads only, so their gradients are shares of a sum.
        self.q_layernorm = build.norm(self.head_size, sum_over=("tp",), kind="qk_norm") if model.qk_layernorm else None
        self.k_layernorm = build.norm(self.head_size, sum_over=("tp",), kind="qk_norm") if model.qk_layernorm else None

    def forward(self, x: Tensor, norm: nn.Module | None, one: Pass, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [s or s/tp, b, h], before its norm, if there is one; bias: [1, n/tp, s, s], added to the scores.

        Returns the attention's output and the normed input, both like x.
        """
        qkv, normed = self.build.normed_linear(norm, self.linear_qkv, x)
        q, k, v = self._heads(qkv)
        if one.table is not None and self.plan.rope:
            q, k = self._turn(q, one.table), self._turn(k, one.table)
        mask = one.mask.within(self.plan.window)
        return self.linear_proj(attend(self.build, q, k, v, mask, bias, training=self.training)), normed

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, (n + 2g)/tp * d] to q: [s, b, n/tp, d] and k, v: [s, b, g/tp, d]."""
        sizes = [self.heads, self.groups, self.groups]
        q, k, v = qkv.view(*qkv.shape[:2], -1, self.head_size).split(sizes, dim=2)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k, v

    def _turn(self, x: Tensor, table: RotaryTable) -> Tensor:
        return self.build.kernels.rotary(x, table.cos, table.sin, self.build.model.rope.rotary_interleaved)


def attend(build: Build, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, bias: Tensor | None, *, training: bool) -> Tensor:
    """The attention kernel as the run wants it: with its scale and dropout, recomputed if asked.

    q: [queries, b, n/tp, d]; k, v: [keys, b, g/tp, d]; bias: [1, n/tp, queries, keys]. Returns [queries, b, n/tp * d].
    """
    dropout = build.model.attention_dropout if training else 0.0

    def core(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        # "default" leaves the streams alone: without dropout nothing is drawn.
        with build.streams.use("cut" if dropout else "default"):
            return build.kernels.attention(q, k, v, mask, dropout, Scores(build.model.softmax_scale, bias=bias))

    return recompute(core, build.streams, q, k, v, bias) if build.recomputes("core_attn") else core(q, k, v, bias)


def positions_of(ids: Tensor) -> Tensor:
    """The positions [1, s] of a batch [b, s] whose samples count from zero."""
    return torch.arange(ids.shape[1], device=ids.device)[None]
