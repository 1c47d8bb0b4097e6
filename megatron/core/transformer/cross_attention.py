"""Attention of a sequence to another one: a decoder's to what its encoder made of the text.

Queries come from the sequence, keys and values from the memory, which has no norm of its own here: the encoder's final
norm has been there. The key and value matrices are one matrix [k | v].
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel.spec import FusedWeightSegment
from megatron.core.transformer.context.cache import DecodingCache
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

    def forward(
        self, x: Tensor, norm: nn.Module | None, memory: Tensor, mask: AttentionMaskSpec, cache: DecodingCache | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the memory.

        x: [s or s/tp, b, h], before its norm; memory: [keys or keys/tp, b, h]. cache: keeps the keys and values of the
        memory. Returns the attention's output and the normed input, both like x.
        """
        q, normed = self.build.apply_norm_then_linear(norm, self.linear_q, x)

        def project_keys_and_values() -> Tensor:
            return self.linear_kv(memory.to(self.linear_kv.weight.dtype))

        make = project_keys_and_values
        k, v = (make() if cache is None else cache.cached_cross_attention_kv(self, make)).chunk(2, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)) for part in (q, k, v))
        return self.linear_proj(attend(self.build, q, k, v, mask, training=self.training)), normed
