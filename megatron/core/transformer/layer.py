"""One transformer layer: what its LayerPlan says, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.parallel.recompute import recompute
from megatron.core.parallel.spec import ParamSpec, constant_initializer, meta_parameter
from megatron.core.tensor_parallel.norm import Norm
from megatron.core.transformer.adapters import add_adapters_to_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.cross_attention import CrossAttention
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.mixers.attention import SelfAttention
from megatron.core.transformer.mixers.gated_delta_net import DeltaNetSizes, GatedDeltaNet
from megatron.core.transformer.mixers.mamba import MambaMixer, MambaSizes
from megatron.core.transformer.mixers.mla import MultiLatentAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import MoELayer

MIXERS: dict[str, Callable[[LayerBuildContext, LayerPlan], nn.Module]] = {
    "attention": SelfAttention,
    "mla": MultiLatentAttention,
    "mamba": lambda build, plan: MambaMixer(build, MambaSizes.from_model(build.model)),
    "gated_delta_net": lambda build, plan: GatedDeltaNet(build, DeltaNetSizes.from_model(build.model)),
}


class LayerScale(nn.Module):
    """x times a learned factor for each channel of the residual stream (Touvron et al., 2021). initial: of all factors."""

    def __init__(self, build: LayerBuildContext, initial: float) -> None:
        super().__init__()
        spec = ParamSpec(
            (build.model.hidden_size,),
            constant_initializer(initial),
            "vector",
            sum_over=build.tp_region.gradient_sum_axes,
        )
        self.weight = meta_parameter(spec, build.mesh, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the learned factor of each channel. x: [s or s/tp, b, h]."""
        return x * self.weight


def _make_mlp(plan: LayerPlan, build: LayerBuildContext) -> MoELayer | MLP | None:
    """Create the MLP or MoE layer of a plan, or None."""
    if plan.mlp == "none":
        return None
    return MoELayer(build, plan) if plan.mlp == "moe" else MLP(build)


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), each with dropout before the sum.

    A layer of a decoder with memory has x + cross_attention(norm(x), memory) between them. With norm_after_residual it is
    norm(x + attention(x)), then norm(x + mlp(x)); with sandwich_norm x + norm(attention(norm(x))), then x + norm(mlp(norm(x)));
    with norm_after_sublayer x + norm(attention(x)), then x + norm(mlp(x)). Another mixer may stand for attention, and a layer of a
    hybrid has one of the two halves only; Mamba-2 may stand beside attention, on the same norm.
    """

    def __init__(self, plan: LayerPlan, build: LayerBuildContext) -> None:
        super().__init__()
        build, model = build.for_layer(plan), build.model
        self.build, self.plan = build, plan
        self.after_norm, after_sum = model.apply_residual_connection_post_layernorm, model.norm_after_residual
        after_sublayer = model.has_norms_after_sublayer(plan.mixer)
        self.norms_updates = model.sandwich_norm or after_sublayer
        before, behind = not (after_sum or after_sublayer), after_sum or self.norms_updates
        mixes, has_mlp = plan.mixer != "none", plan.mlp != "none"
        self.input_layernorm = self._optional_norm(before and mixes)
        mixer_build = build.with_context_parallel_attention(plan.index)
        mixer = MIXERS[plan.mixer](mixer_build, plan) if mixes else None
        beside = MIXERS[plan.parallel_mixer](mixer_build, plan) if plan.parallel_mixer != "none" else None
        self.mixer = mixer if plan.mixer == "mamba" else beside  # Megatron's names
        self.self_attention = None if plan.mixer == "mamba" else mixer
        self.post_attention_layernorm = self._optional_norm(behind and mixes)
        self.pre_cross_attn_layernorm = self._optional_norm(plan.has_cross_attention)
        self.cross_attention = CrossAttention(build) if plan.has_cross_attention else None
        self.pre_mlp_layernorm = self._optional_norm(before and has_mlp)
        self.mlp = _make_mlp(plan, build)
        self.post_mlp_layernorm = self._optional_norm(behind and has_mlp)
        self.attention_scale = self._optional_layer_scale(mixes)
        self.mlp_scale = self._optional_layer_scale(has_mlp)
        self.dropout = Dropout(model.hidden_dropout, build.streams, build.tp_region.dropout_stream)
        add_adapters_to_layer(self, plan, build)

    def _optional_norm(self, requested: bool) -> Norm | None:
        return self.build.make_norm(self.build.model.hidden_size) if requested else None

    def _optional_layer_scale(self, requested: bool) -> LayerScale | None:
        first = self.build.model.layer_scale
        return LayerScale(self.build, first) if requested and first is not None else None

    def forward(
        self, x: Tensor, context: ForwardContext, *, bias: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """Run the layer. x: [s, b, h] ([s/tp, b, h] with sequence parallelism); returns the same shape.

        bias: [1, n/tp, s, s], added to the attention scores. memory: output of the encoder, for cross attention.
        """
        mixer = self.token_mixer
        if (
            self.build.has_fused_residual_norm
            and self.pre_mlp_layernorm is not None
            and self.mlp is not None
            and mixer is not None
        ):
            update, _ = mixer(x, self.input_layernorm, context, bias)
            x, normed = self.pre_mlp_layernorm.add_and_norm(x, self.dropout(update))
            return x + self.dropout(self.mlp(normed, None, context)[0])
        if mixer is not None:
            x = self.attention_block(x, context, bias)
        if self.cross_attention is not None:
            assert memory is not None and context.memory_mask is not None, (
                "a layer with cross attention has something to look at"
            )
            update, normed = self.cross_attention(
                x, self.pre_cross_attn_layernorm, memory, context.memory_mask, context.cache
            )
            x = self._add_residual(x, normed, update, None)
        if self.mlp is None:
            return x
        if self.recomputes_mlp:
            return recompute(partial(self.mlp_block, context=context), self.build.streams, x)
        return self.mlp_block(x, context=context)

    @property
    def token_mixer(self) -> Any:
        """The module (or method) that mixes positions: attention, Mamba-2 or gated delta net, or attention and Mamba-2
        side by side; None in a layer with an MLP only.
        """
        if self.mixer is not None and self.self_attention is not None:
            return self._attention_plus_mamba
        return self.mixer if self.mixer is not None else self.self_attention

    @property
    def recomputes_mlp(self) -> bool:
        """Whether selective recomputation covers the MLP or MoE half of this layer."""
        return self.build.recomputes_module("moe" if self.plan.mlp == "moe" else "mlp")

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None) -> Tensor:
        """Return x + attention(norm(x)) (or another mixer), [s or s/tp, b, h]: the first half. bias: see `forward`."""
        mixed, normed = self.token_mixer(x, self.input_layernorm, context, bias)
        mixed = mixed if self.attention_scale is None else self.attention_scale(mixed)
        return self._add_residual(x, normed, mixed, self.post_attention_layernorm)

    def _attention_plus_mamba(
        self, x: Tensor, norm: nn.Module | None, context: ForwardContext, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return attention(norm(x)) + Mamba-2(norm(x)), and norm(x); all [s or s/tp, b, h]."""
        assert self.self_attention is not None and self.mixer is not None, "this layer has both"
        normed = x if norm is None else norm(x)
        attended, _ = self.self_attention(normed, None, context, bias)
        return attended + self.mixer(normed, None, context)[0], normed

    def mlp_block(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        """Return x + mlp(norm(x)) (or experts), [s or s/tp, b, h]: the second half of a layer."""
        assert self.mlp is not None, "this layer has an MLP"
        thought, normed = self.mlp(x, self.pre_mlp_layernorm, context)
        thought = thought if self.mlp_scale is None else self.mlp_scale(thought)
        return self._add_residual(x, normed, thought, self.post_mlp_layernorm)

    def _add_residual(self, x: Tensor, normed: Tensor, update: Tensor, norm: nn.Module | None) -> Tensor:
        """Return residual + dropout(update), in the residual's dtype.

        norm: applied to the update before the sum or to the sum, as the layer's kind is; None: no norm. With post-norm
        residuals (see `after_norm`) the residual is `normed`, not x.
        """
        if self.norms_updates and norm is not None:
            update, norm = norm(update), None
        total = (normed.to(x.dtype) if self.after_norm else x) + self.dropout(update)
        return total if norm is None else norm(total)
