"""What goes through the layers of a stage beside the hidden states: one microbatch's masks and tables, and its context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.config.plan.layers import LayerPlan
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.transformer.context.cache import DecodingCache
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import RotaryTable


class _AttachLossGradient(Function):
    """Autograd function: return x unchanged; backward also sends the gradient `weight` to a scalar loss."""

    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor, weight: float | Tensor) -> Tensor:
        context.weight, context.like = weight, loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.ones_like(context.like) * context.weight, None


class MicrobatchContext:
    """Auxiliary losses and metrics that layers add for one microbatch, beside their output.

    weight: what a mean over this microbatch's tokens counts in the objective of the step, loss scale included. sample: number
    of the microbatch's first sample in the run. Layers keep a `MicrobatchContext` from their forward pass, so a recomputed pass finds the
    one of its own microbatch. token_masks: name in the batch -> bool [s or s/cp, b], False at padding; see `ForwardContext.token_mask`.
    metrics: name -> [sum, count]. routes: layer -> the experts that its tokens use, int64 [s, b, k], where they are given.
    """

    def __init__(
        self,
        weight: float | Tensor,
        *,
        training: bool,
        sample: int = 0,
        token_masks: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.weight, self.training, self.sample, self.token_masks = weight, training, sample, token_masks
        self.metrics: dict[str, Tensor] = {}
        self.routes: Mapping[int, Tensor] | None = None
        self._retained: dict[object, Any] = {}

    def add_loss(self, x: Tensor, loss: Tensor) -> Tensor:
        """Return x; in training, its backward pass also sends the gradient of weight * loss. loss: a scalar."""
        return _AttachLossGradient.apply(x, loss, self.weight) if self.training else x

    def compute_once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return make(), computed once a microbatch for `key`, without gradients; recomputed passes get the same."""
        if key not in self._retained:
            with torch.no_grad():
                self._retained[key] = make()
        return self._retained[key]

    @property
    def compute_once_results(self) -> tuple[Any, ...]:
        """Results of `compute_once` so far."""
        return tuple(self._retained.values())

    def add_metric(self, name: str, total: Tensor, count: float | Tensor = 1.0) -> None:
        """Add `total` (a scalar) and `count` to the metric `name`; recomputed forward passes are not counted twice.

        Reported is the sum of all totals over the sum of all counts, over all ranks: a rank that holds only a share of
        what others count gives a count of 0, and one that repeats what others report does not call this.
        """
        if torch.is_grad_enabled() == self.training:
            total = total.detach()
            pair = torch.stack((total, torch.ones_like(total) * count))
            self.metrics[name] = self.metrics[name] + pair if name in self.metrics else pair


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the layers of a stack share in the forward pass of one microbatch.

    mask: which keys each query sees; a layer with a window adds it. table: rotations, for layers that have them.
    memory: output of an encoder, for cross attention, [keys or keys/tp, b, h]; memory_mask: what it looks through. microbatch_context: where layers note losses; None when nobody listens.
    cache: what is known of the texts' beginnings, when they are decoded. depth: of multi-token prediction, from 1 on, 0 before
    it: one layer may serve several depths.
    """

    mask: AttentionMaskSpec
    table: RotaryTable | None = None
    memory: Tensor | None = None
    memory_mask: AttentionMaskSpec | None = None
    microbatch_context: MicrobatchContext | None = None
    cache: DecodingCache | None = None
    depth: int = 0

    @property
    def token_mask(self) -> Tensor | None:
        """Which tokens of the microbatch are not padding, bool [s or s/cp, b]; None: all, or nobody listens.

        At a depth of multi-token prediction, also where the token ahead that it reads is none.
        """
        if self.microbatch_context is None:
            return None
        name = f"mtp_{self.depth}_padding_mask" if self.depth else "padding_mask"
        return self.microbatch_context.token_masks.get(name)

    def rotations(self, plan: LayerPlan) -> RotaryTable | None:
        """Return the rotations of a layer, or None if it has none."""
        if self.table is None or not plan.rope:
            return None
        return self.table if plan.window is None else self.table.windowed or self.table

    def attention_kernel(self, build: LayerBuildContext, layer: int) -> Callable[..., Tensor]:
        """Return the attention kernel of the run ([s, b, n, d] in, [s, b, n * d] out); with a cache, one that attends
        to the cached keys too.

        layer: global index of the layer, for the cache.
        """
        kernel = build.kernels.attention
        return kernel if self.cache is None else self.cache.wrap_attention_kernel(layer, kernel)
