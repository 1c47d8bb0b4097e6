"""One transformer layer: what its LayerPlan says, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megatron.core.config.plan import LayerPlan
from megatron.core.parallel.recompute import recompute
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.transformer.adapters import add_adapters
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.build import Build
from megatron.core.transformer.cross_attention import CrossAttention
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.gated_delta_net import DeltaNetSizes, GatedDeltaNet
from megatron.core.transformer.layer_scale import LayerScale
from megatron.core.transformer.mamba import MambaMixer, MambaSizes
from megatron.core.transformer.mla import MultiLatentAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.passing import ForwardContext

MIXERS: dict[str, Callable[[Build, LayerPlan], nn.Module]] = {
    "attention": SelfAttention,
    "mla": MultiLatentAttention,
    "mamba": lambda build, plan: MambaMixer(build, MambaSizes.of(build.model)),
    "gated_delta_net": lambda build, plan: GatedDeltaNet(build, DeltaNetSizes.of(build.model)),
}


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each with dropout before the sum.

    A layer of a decoder with memory has x + cross_attention(norm(x), memory) between them. With norm_after_residual it is
    norm(x + attention(x)), then norm(x + mlp(x)); with sandwich_norm x + norm(attention(norm(x))), then x + norm(mlp(norm(x)));
    with norm_after_sublayer x + norm(attention(x)), then x + norm(mlp(x)). A layer of a hybrid has one of the two alone.
    """

    def __init__(self, plan: LayerPlan, build: Build) -> None:
        super().__init__()
        build, model = build.of_layer(plan), build.model
        self.build, self.plan = build, plan
        self.after_norm, after_sum = model.apply_residual_connection_post_layernorm, model.norm_after_residual
        self.norms_updates = model.sandwich_norm or model.norm_after_sublayer
        before, behind = not (after_sum or model.norm_after_sublayer), after_sum or self.norms_updates
        mixes, has_mlp = plan.mixer != "none", plan.mlp != "none"
        self.input_layernorm = _norm(build, before and mixes)
        self.self_attention = MIXERS[plan.mixer](build.over_context(plan.index), plan) if mixes else None
        self.post_attention_layernorm = _norm(build, behind and mixes)
        self.pre_cross_attn_layernorm = _norm(build, plan.cross)
        self.cross_attention = CrossAttention(build) if plan.cross else None
        self.pre_mlp_layernorm = _norm(build, before and has_mlp)
        self.mlp = (MoELayer(build, plan) if plan.mlp == "moe" else MLP(build)) if has_mlp else None
        self.post_mlp_layernorm = _norm(build, behind and has_mlp)
        self.attention_scale = LayerScale(build, model.layer_scale) if model.layer_scale is not None else None
        self.mlp_scale = LayerScale(build, model.layer_scale) if model.layer_scale is not None else None
        self.dropout = Dropout(model.hidden_dropout, build.streams, build.region.outside_stream)
        add_adapters(self, plan, build)

    def forward(
        self, x: Tensor, context: ForwardContext, *, bias: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """x: [s, b, h] ([s/tp, b, h] with sequence parallelism). Returns the same shape.

        bias: [1, n/tp, s, s], added to the scores. memory: what cross attention looks at.
        """
        if self.self_attention is None or self.mlp is None:
            return self._half(x, context, bias)
        if self.build.sums_in_norms and self.pre_mlp_layernorm is not None:
            update, _ = self.self_attention(x, self.input_layernorm, context, bias)
            x, normed = self.pre_mlp_layernorm.of_sum(x, self.dropout(update))
            return x + self.dropout(self.mlp(normed, None, context)[0])
        x = self.attention_block(x, context, bias)
        if self.cross_attention is not None:
            assert memory is not None and context.memory_mask is not None, (
                "a layer with cross attention has something to look at"
            )
            update, normed = self.cross_attention(
                x, self.pre_cross_attn_layernorm, memory, context.memory_mask, context.cache
            )
            x = self._add_residual(x, normed, update, None)
        if self.recomputes_mlp:
            return recompute(partial(self.mlp_block, context=context), self.build.streams, x)
        return self.mlp_block(x, context=context)

    def _half(self, x: Tensor, context: ForwardContext, bias: Tensor | None) -> Tensor:
        """A layer with one half alone."""
        if self.self_attention is not None:
            return self.attention_block(x, context, bias)
        if self.recomputes_mlp:
            return recompute(partial(self.mlp_block, context=context), self.build.streams, x)
        return self.mlp_block(x, context=context)

    @property
    def recomputes_mlp(self) -> bool:
        """Whether the second half is recomputed."""
        return self.build.recomputes("moe" if self.plan.mlp == "moe" else "mlp")

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None) -> Tensor:
        """Return x plus what attention adds to it, [s or s/tp, b, h]: the first half of a layer."""
        assert self.self_attention is not None, "a layer whose mixer is called has one"
        mixed, normed = self.self_attention(x, self.input_layernorm, context, bias)
        mixed = mixed if self.attention_scale is None else self.attention_scale(mixed)
        return self._add_residual(x, normed, mixed, self.post_attention_layernorm)

    def mlp_block(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        """Return x plus what the MLP or the experts add to it, [s or s/tp, b, h]: the second half of a layer."""
        assert self.mlp is not None, "a layer whose MLP is called has one"
        thought, normed = self.mlp(x, self.pre_mlp_layernorm, context)
        thought = thought if self.mlp_scale is None else self.mlp_scale(thought)
        return self._add_residual(x, normed, thought, self.post_mlp_layernorm)

    def _add_residual(self, x: Tensor, normed: Tensor, update: Tensor, norm: nn.Module | None) -> Tensor:
        """The residual and its update, of which one is normed if so. The residual's format may be wider than the norm's."""
        if self.norms_updates and norm is not None:
            update, norm = norm(update), None
        total = (normed.to(x.dtype) if self.after_norm else x) + self.dropout(update)
        return total if norm is None else norm(total)


def _norm(build: Build, has_one: bool) -> Norm | None:
    return build.norm(build.model.hidden_size) if has_one else None
