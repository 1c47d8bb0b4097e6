"""One transformer layer: a class for each order in which norms, sublayers and sums may stand.

A layer has two sublayers: first a mixer of positions (attention, or what stands for it), then an MLP or experts; a layer of a hybrid has
one of them. `LayerPlan.block` names the order, a row of `BLOCKS`. Dropout stands before each sum, and a sum has the residual's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.parallel.recompute import recompute
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.sublayers import make_mixers, make_mlp


class Block(nn.Module):
    """One transformer layer: its sublayers; a subclass writes down the order of norm, sublayer and sum."""

    norms_before: ClassVar[bool] = True
    norms_behind: ClassVar[bool] = False
    attention_block: Callable[..., Tensor]  # the two halves, of (x, context, bias) and of (x, context)
    mlp_block: Callable[..., Tensor]

    def __init__(self, plan: LayerPlan, build: LayerBuildContext) -> None:
        super().__init__()
        self.plan, self.build = plan, build.for_layer(plan)
        self.make_first_half()
        self.pre_mlp_layernorm: Any = self.make_norm(self.norms_before and plan.mlp != "none", before=True)
        self.mlp: Any = make_mlp(plan, self.build)
        self.post_mlp_layernorm: Any = self.make_norm(self.norms_behind and self.mlp is not None)
        stream = self.build.tp_region.dropout_stream
        self.dropout = Dropout(self.build.model.hidden_dropout, self.build.streams, stream)

    def make_first_half(self) -> None:
        """Create what stands before the MLP, with its norms."""
        plan = self.plan
        self.input_layernorm: Any = self.make_norm(self.norms_before and plan.mixer != "none", before=True)
        build = self.build.with_context_parallel_attention(plan.index)
        self.mixer, self.self_attention = make_mixers(plan, build)
        self.post_attention_layernorm: Any = self.make_norm(self.norms_behind and plan.mixer != "none")

    def make_norm(self, exists: bool, *, before: bool = False) -> nn.Module | None:
        """Create a norm of the residual stream, if it `exists`; before a sublayer, one that can be recomputed."""
        return self.build.make_norm(self.build.model.hidden_size, before_matmul=before) if exists else None

    def forward(self, x: Tensor, context: ForwardContext, *, bias: Tensor | None = None) -> Tensor:
        """Run the layer. x: [s or s/tp, b, h]; bias: [1, n/tp, s, s], added to the scores. Returns the shape of x."""
        if self.token_mixer is not None:
            x = self.attention_block(x, context, bias)
        return x if self.mlp is None else self.run_mlp_block(x, context)

    def run_mlp_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Run the second half, recomputed if so configured. x: [s or s/tp, b, h]; returns the same shape."""
        if self.recomputes_mlp:
            return recompute(partial(self.mlp_block, context=context), self.build.streams, x)
        return self.mlp_block(x, context)

    @property
    def recomputes_mlp(self) -> bool:
        """Whether selective recomputation covers the MLP or MoE half of this layer."""
        return self.build.recomputes_module("moe" if self.plan.mlp == "moe" else "mlp")

    @property
    def token_mixer(self) -> Any:
        """The module or method that mixes positions: one mixer, or attention and Mamba-2 side by side; None without one."""
        if self.mixer is not None and self.self_attention is not None:
            return self._attention_plus_mamba
        return self.mixer if self.mixer is not None else self.self_attention

    def _attention_plus_mamba(self, normed: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Return attention(normed) + Mamba-2(normed), [s or s/tp, b, h] like normed."""
        assert self.self_attention is not None and self.mixer is not None, "this layer has both"
        return self.self_attention(normed, context, bias) + self.mixer(normed, context)


class PreNorm(Block):
    """x + attention(norm(x)), then x + mlp(norm(x)): GPT-2, Llama, Qwen, DeepSeek."""

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Return x + attention(norm(x)). See `Block.forward`."""
        return x + self.dropout(self.token_mixer(self.input_layernorm(x), context, bias))

    def mlp_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x + mlp(norm(x)). x: [s or s/tp, b, h]."""
        return x + self.dropout(self.mlp(self.pre_mlp_layernorm(x), context))


class PostNorm(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)): the published BERT."""

    norms_before, norms_behind = False, True

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Return norm(x + attention(x)). See `Block.forward`."""
        return self.post_attention_layernorm(x + self.dropout(self.token_mixer(x, context, bias)))

    def mlp_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return norm(x + mlp(x)). x: [s or s/tp, b, h]."""
        return self.post_mlp_layernorm(x + self.dropout(self.mlp(x, context)))


class Sandwich(Block):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): Gemma 2 and 3."""

    norms_behind = True

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Return x + norm(attention(norm(x))). See `Block.forward`."""
        return x + self.dropout(self.post_attention_layernorm(self.token_mixer(self.input_layernorm(x), context, bias)))

    def mlp_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x + norm(mlp(norm(x))). x: [s or s/tp, b, h]."""
        return x + self.dropout(self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x), context)))


class AfterSublayer(Block):
    """x + norm(attention(x)), then x + norm(mlp(x)): OLMo 2."""

    norms_before, norms_behind = False, True

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Return x + norm(attention(x)). See `Block.forward`."""
        return x + self.dropout(self.post_attention_layernorm(self.token_mixer(x, context, bias)))

    def mlp_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x + norm(mlp(x)). x: [s or s/tp, b, h]."""
        return x + self.dropout(self.post_mlp_layernorm(self.mlp(x, context)))


class NormedResidual(Block):
    """norm(x) + attention(norm(x)), then norm(x) + mlp(norm(x)): --apply-residual-connection-post-layernorm."""

    def attention_block(self, x: Tensor, context: ForwardContext, bias: Tensor | None = None) -> Tensor:
        """Return norm(x) + attention(norm(x)). See `Block.forward`."""
        normed = self.input_layernorm(x)
        return normed.to(x.dtype) + self.dropout(self.token_mixer(normed, context, bias))

    def mlp_block(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return norm(x) + mlp(norm(x)). x: [s or s/tp, b, h]."""
        normed = self.pre_mlp_layernorm(x)
        return normed.to(x.dtype) + self.dropout(self.mlp(normed, context))


class FusedPreNorm(PreNorm):
    """A PreNorm of two halves, between which one kernel makes the sum and its norm (--kernel residual_norm)."""

    def forward(self, x: Tensor, context: ForwardContext, *, bias: Tensor | None = None) -> Tensor:
        """Run the layer. See `Block.forward`."""
        update = self.dropout(self.token_mixer(self.input_layernorm(x), context, bias))
        x, normed = self.pre_mlp_layernorm.add_and_norm(x, update)
        return x + self.dropout(self.mlp(normed, context))


BLOCKS: Mapping[str, type[Block]] = MappingProxyType(
    {
        "pre_norm": PreNorm,
        "post_norm": PostNorm,
        "sandwich": Sandwich,
        "after_sublayer": AfterSublayer,
        "normed_residual": NormedResidual,
    }
)


def make_layer(plan: LayerPlan, build: LayerBuildContext) -> Block:
    """Create the layer that a plan describes, as a row of BLOCKS, or with the kernel for its middle if the run has one."""
    if build.has_fused_residual_norm and plan.mixer != "none" and plan.mlp != "none":
        return FusedPreNorm(plan, build)
    return BLOCKS[plan.block](plan, build)
