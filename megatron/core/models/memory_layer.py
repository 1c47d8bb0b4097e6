"""Layers of a decoder that looks at what an encoder made of another text: self attention, cross attention, MLP (T5).

In cross attention queries come from the sequence, keys and values from the memory, which has no norm of its own here: the
encoder's final norm has been there. The key and value matrices are one matrix [k | v].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.parallel.spec import FusedWeightSegment
from megatron.core.transformer.blocks import Block, NormedResidual, PreNorm
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.mixers.attention import attend


class CrossAttention(nn.Module):
    """Attention of a decoder's positions to the encoder's output (memory), without rotary positions."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        model, tp = build.model, build.mesh.tp.size
        self.build, self.head_size = build, model.kv_channels
        copies = max(1, tp // model.num_query_groups)
        key, bias = FusedWeightSegment(model.key_projection_width, copies), model.add_bias_linear or model.add_qkv_bias
        query = FusedWeightSegment(model.query_projection_width)
        self.linear_q = build.make_column_linear(model.hidden_size, (query,), bias=bias)
        self.linear_kv = build.make_column_linear(model.hidden_size, (key, key), bias=bias)
        self.linear_proj = build.make_row_linear(model.query_projection_width, bias=model.add_bias_linear)

    def forward(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """Attend to the memory of the context. normed: [s or s/tp, b, h]; returns like it."""
        memory, mask, cache = context.memory, context.memory_mask, context.cache
        assert memory is not None and mask is not None, "a layer with cross attention has something to look at"
        q = self.build.project(self.linear_q, normed)

        def make() -> Tensor:
            return self.linear_kv(memory.to(self.linear_kv.weight.dtype))

        k, v = (make() if cache is None else cache.cached_cross_attention_kv(self, make)).chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in (q, k, v))
        return self.linear_proj(attend(self.build, q, k, v, mask, training=self.training))


class MemoryBlock(Block):
    """A layer with cross attention between its two halves; a subclass says how it is added."""

    cross_attention_block: Callable[[Tensor, ForwardContext], Tensor]

    def make_first_half(self) -> None:
        """Create self attention and cross attention, each with its norm."""
        super().make_first_half()
        self.pre_cross_attn_layernorm: Any = self.make_norm(True, before=True)
        self.cross_attention = CrossAttention(self.build)

    def forward(self, x: Tensor, context: ForwardContext, *, bias: Tensor | None = None) -> Tensor:
        """Run the layer. See `Block.forward`."""
        x = self.cross_attention_block(self.attention_block(x, context, bias), context)
        return self.run_mlp_block(x, context)


class MemoryPreNorm(MemoryBlock, PreNorm):
    """x + attention(norm(x)), then x + cross_attention(norm(x), memory), then x + mlp(norm(x))."""

    def cross_attention_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x + cross_attention(norm(x)). x: [s or s/tp, b, h]."""
        return x + self.dropout(self.cross_attention(self.pre_cross_attn_layernorm(x), context))


class MemoryNormedResidual(MemoryBlock, NormedResidual):
    """The same with norm(x) in the place of each x outside (--apply-residual-connection-post-layernorm)."""

    def cross_attention_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return norm(x) + cross_attention(norm(x)). x: [s or s/tp, b, h]."""
        normed = self.pre_cross_attn_layernorm(x)
        return normed.to(x.dtype) + self.dropout(self.cross_attention(normed, context))


_BLOCKS: Mapping[str, type[MemoryBlock]] = MappingProxyType(
    {"pre_norm": MemoryPreNorm, "normed_residual": MemoryNormedResidual}
)


def make_memory_layer(plan: LayerPlan, build: LayerBuildContext) -> MemoryBlock:
    """Create the layer with cross attention that a plan describes."""
    return _BLOCKS[plan.block](plan, build)
