"""The layers of one pipeline stage, and how they are recomputed.

Layers sit under their global number, so a parameter's name never depends on the stage that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from megatron.core.config.plan import LayerPlan
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.recompute import recompute
from megatron.core.transformer.build import BuildContext
from megatron.core.transformer.layer import Layer
from megatron.core.transformer.passing import ForwardContext


class Stack(nn.Module):
    """Layers in order, then the final norm where the network ends."""

    def __init__(self, plans: Sequence[LayerPlan], build: BuildContext, *, final_norm: bool) -> None:
        super().__init__()
        self.build = build
        self.layers = nn.ModuleDict({str(plan.index): Layer(plan, build) for plan in plans})
        self.final_layernorm = build.norm(build.model.hidden_size) if final_norm else None
        self.offloading: Callable[[list[Layer]], AbstractContextManager] = lambda layers: (
            nullcontext()
        )  # around what recomputation keeps of them

    def forward(
        self, x: Tensor, context: ForwardContext, *, bias: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """x: [s, b, h] ([s/tp, b, h] with sequence parallelism). Returns the same shape.

        bias: [1, n/tp, s, s], added to the scores of every layer. memory: [keys or keys/tp, b, h], what cross attention
        looks at.
        """
        for group, drop in self._recompute_groups():
            run = _LayerSpan(group, context)
            if drop and self.training:
                with self.offloading(group):
                    x = recompute(run, self.build.streams, x, bias, memory, axis=self._saved_axis())
            else:
                x = run(x, bias, memory)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _recompute_groups(self) -> list[tuple[list[Layer], bool]]:
        """(layers, whether their activations are dropped), in order."""
        choice, layers = self.build.recompute, [layer for layer in self.layers.values() if isinstance(layer, Layer)]
        if choice.recompute_granularity != "full":
            return [(layers, False)]
        size = choice.recompute_num_layers or 1
        if choice.recompute_method == "block":
            return [([layer], place < size) for place, layer in enumerate(layers)]
        return [(layers[start : start + size], True) for start in range(0, len(layers), size)]

    def _saved_axis(self) -> Axis | None:
        return self.build.mesh.tp if self.build.recompute.distribute_saved_activations else None


class _LayerSpan:
    """Some layers one after the other, as a function of what has a gradient."""

    def __init__(self, layers: list[Layer], context: ForwardContext) -> None:
        self.layers, self.context = layers, context

    def __call__(self, x: Tensor, bias: Tensor | None, memory: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.context, bias=bias, memory=memory)
        return x
