"""One transformer layer: what its LayerPlan says, in order."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.config.plan import LayerPlan
from megatron.core.kernels.mask import MaskSpec
from megatron.core.parallel.recompute import recompute
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.build import Build
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.rope import RotaryTable


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each with dropout before the sum."""

    def __init__(self, plan: LayerPlan, build: Build) -> None:
        super().__init__()
        self.build, self.plan = build, plan
        self.after_norm = build.model.apply_residual_connection_post_layernorm
        self.input_layernorm = build.norm(build.model.hidden_size)
        self.self_attention = SelfAttention(build, rope=plan.rope)
        self.pre_mlp_layernorm = build.norm(build.model.hidden_size)
        self.mlp = MLP(build)
        self.dropout = Dropout(build.model.hidden_dropout, build.streams, build.region.outside_stream)

    def forward(self, x: Tensor, mask: MaskSpec, table: RotaryTable | None) -> Tensor:
        """x: [s, b, h] ([s/tp, b, h] with sequence parallelism). Returns the same shape."""
        mixed, normed = self.self_attention(x, self.input_layernorm, mask, table)
        x = self._residual(x, normed) + self.dropout(mixed)
        if self.build.recomputes("mlp"):
            return recompute(self._mlp, self.build.streams, x)
        return self._mlp(x)

    def _mlp(self, x: Tensor) -> Tensor:
        thought, normed = self.mlp(x, self.pre_mlp_layernorm)
        return self._residual(x, normed) + self.dropout(thought)

    def _residual(self, x: Tensor, normed: Tensor) -> Tensor:
        """Where the residual starts, in the residual's format, which may be wider than the norm's."""
        return normed.to(x.dtype) if self.after_norm else x
