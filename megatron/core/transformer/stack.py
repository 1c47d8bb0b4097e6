"""The layers of one pipeline stage, and how they are recomputed.

Layers sit under their global number, so a parameter's name never depends on the stage that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.recompute import recompute
from megatron.core.transformer.adapters import add_adapters_to_layer
from megatron.core.transformer.blocks import Block, make_layer
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


class TransformerStack(nn.Module):
    """Layers in order, then the final norm where the network ends."""

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        build: LayerBuildContext,
        *,
        final_norm: bool,
        make_layer: Callable[[LayerPlan, LayerBuildContext], Block] = make_layer,
    ) -> None:
        """make_layer: left out, rows of `BLOCKS`; a network with layers of its own gives another."""
        super().__init__()
        self.build = build
        layers = [make_layer(plan, build) for plan in plans]
        for layer in layers:
            add_adapters_to_layer(layer)
        self.layers = nn.ModuleDict({str(layer.plan.index): layer for layer in layers})
        self.final_layernorm = build.make_norm(build.model.hidden_size) if final_norm else None
        # around what recomputation keeps of them
        self.offloading: Callable[[list[Block]], AbstractContextManager] = lambda layers: nullcontext()

    def forward(self, x: Tensor, context: ForwardContext, *, bias: Tensor | None = None) -> Tensor:
        """Run the layers. x: [s, b, h] ([s/tp, b, h] with sequence parallelism). Returns the same shape.

        bias: [1, n/tp, s, s], added to the scores of every layer.
        """
        for group, drop in self._recompute_groups():
            run = partial(_run_layers, group, context)
            if drop and self.training:
                with self.offloading(group):
                    axis = self._saved_activation_mesh_axis()
                    x = recompute(run, self.build.streams, x, bias, context.memory, axis=axis)
            else:
                x = run(x, bias, context.memory)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _recompute_groups(self) -> list[tuple[list[Block], bool]]:
        """Return groups of layers in order, each with whether its activations are dropped and recomputed."""
        choice = self.build.recompute
        layers = [layer for layer in self.layers.values() if isinstance(layer, Block)]
        if choice.recompute_granularity != "full":
            return [(layers, False)]
        size = choice.recompute_num_layers or 1
        if choice.recompute_method == "block":
            return [([layer], place < size) for place, layer in enumerate(layers)]
        return [(layers[start : start + size], True) for start in range(0, len(layers), size)]

    def _saved_activation_mesh_axis(self) -> Axis | None:
        """Return the axis over which saved layer inputs are sharded (--distribute-saved-activations), or None."""
        return self.build.mesh.tp if self.build.recompute.distribute_saved_activations else None


def _run_layers(
    layers: list[Block], context: ForwardContext, x: Tensor, bias: Tensor | None, memory: Tensor | None
) -> Tensor:
    """Run consecutive layers, for `recompute` as one function of the tensors that need gradients."""
    context = replace(context, memory=memory)
    for layer in layers:
        x = layer(x, context, bias=bias)
    return x
