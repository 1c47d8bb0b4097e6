"""Multi-token prediction: layers behind the last one, each of which predicts one token further (DeepSeek-V3, 2024).

    tokens           t1 t2 t3 t4 ..        the network reads t_i and predicts t_i+1
    depth 1          t2 t3 t4 ..           state of i, after the final norm, and embedding of t_i+1    ->  predicts t_i+2
    depth 2          t3 t4 ..              state of i at depth 1, after its norm, and that of t_i+2    ->  predicts t_i+3

    norm(embedding of the token), norm(state) -> concat -> eh_proj -> one layer like the last, or those of a pattern -> norm -> the network's output layer

The embedding is the network's, of which the stage holds a copy if it is not the first stage. The caller provides the
tokens ahead, since a rank may hold only a shard of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan, mtp_depth_layer_plans
from megatron.core.parallel.recompute import recompute
from megatron.core.parallel.spec import FusedWeightSegment
from megatron.core.transformer.blocks import make_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


@dataclass(frozen=True, slots=True)
class MTPInputs:
    """Inputs of multi-token prediction, one of each for every depth.

    ids, labels: [b, s] each, the ids and labels k positions ahead of each token; arbitrary where the text ends. states:
    of the depths, [s or s/tp, b, h] each, if the previous stage computed them.
    """

    ids: tuple[Tensor, ...] = ()
    labels: tuple[Tensor, ...] = ()
    states: tuple[Tensor, ...] = ()


class MTPLosses(NamedTuple):
    """The loss of every token, [b, s]: of the next token, and of the tokens ahead, one for each depth."""

    next: Tensor
    ahead: tuple[Tensor, ...]


class MultiTokenPrediction(nn.Module):
    """The layers of all depths, or the single layer that serves them all."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        model = build.model
        self.build, self.depths = build, model.mtp.mtp_num_layers or 0
        stored = 1 if model.mtp.mtp_use_repeated_layer else self.depths
        self.layers = nn.ModuleList(MTPLayer(build, depth) for depth in range(stored))

    def forward(
        self,
        x: Tensor,
        ids: tuple[Tensor, ...],
        positions: Tensor,
        embed: Callable[[Tensor, Tensor], Tensor],
        context: ForwardContext,
    ) -> tuple[Tensor, ...]:
        """Return the states of all depths, each of x's shape.

        x: [s or s/tp, b, h], after the network's final norm. ids: of the tokens ahead, [b, s] for each depth.
        positions: of the tokens themselves, [b or 1, s]. embed: the network's embedding.
        """
        detached, outputs = self.build.model.mtp.mtp_detach_heads, []
        # The detached input requires a gradient, since a recomputed layer gets gradients only if one of its inputs does.
        x = x.detach().requires_grad_(torch.is_grad_enabled()) if detached else x
        for depth, ids_of_depth in enumerate(ids, start=1):
            x = self.run_depth(depth, x, ids_of_depth, positions, embed, context)
            outputs.append(x)
        return tuple(outputs)

    def run_depth(
        self,
        depth: int,
        x: Tensor,
        ids: Tensor,
        positions: Tensor,
        embed: Callable[[Tensor, Tensor], Tensor],
        context: ForwardContext,
    ) -> Tensor:
        """Return the states of one depth (from 1), of the shape of x.

        x: states of the previous depth, [s or s/tp, b, h]. ids: [b, s], the tokens `depth` positions ahead.
        positions: of the tokens themselves. embed: the network's embedding.
        """
        vectors = embed(ids, (positions + depth).clamp(max=self.build.model.max_position_embeddings - 1))
        layer = self.layers[min(depth, len(self.layers)) - 1]
        return layer(
            x, vectors.detach() if self.build.model.mtp.mtp_detach_heads else vectors, replace(context, depth=depth)
        )


class MTPTransformerLayers(nn.Module):
    """Consecutive layers, numbered from 0: those of one MTP depth of a hybrid network."""

    def __init__(self, plans: Sequence[LayerPlan], build: LayerBuildContext) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(plan, build) for plan in plans)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Run the layers. x: [s or s/tp, b, h]; returns the same shape."""
        for layer in self.layers:
            x = layer(x, context)
        return x


class MTPLayer(nn.Module):
    """The module of one MTP depth: norms, projection, one layer (of a hybrid several), final norm."""

    def __init__(self, build: LayerBuildContext, depth: int) -> None:
        super().__init__()
        model, size = build.model, build.model.hidden_size
        self.build = build
        self.enorm, self.hnorm = build.make_norm(size), build.make_norm(size)
        self.eh_proj = build.make_column_linear(2 * size, (FusedWeightSegment(size),), bias=False)
        rows = mtp_depth_layer_plans(model, depth)
        self.mtp_model_layer = MTPTransformerLayers(rows, build) if model.is_hybrid else make_layer(rows[0], build)
        self.final_layernorm = build.make_norm(size)

    def forward(self, x: Tensor, vectors: Tensor, context: ForwardContext) -> Tensor:
        """Return this depth's states, [s or s/tp, b, h]. x: the previous depth's; vectors: embeddings ahead, like x."""

        def combine_and_run_layers(x: Tensor, vectors: Tensor) -> Tensor:
            both = torch.cat((self.enorm(vectors), self.hnorm(x)), dim=-1)
            joined = self.build.tp_region.gather_columns_from_region(self.eh_proj(both)).to(self.build.residual_dtype)
            return self.final_layernorm(self.mtp_model_layer(joined, context))

        choice = self.build.recompute
        if choice.recompute_granularity == "full" and choice.recompute_method == "uniform" and self.training:
            return recompute(combine_and_run_layers, self.build.streams, x, vectors)
        return combine_and_run_layers(x, vectors)
