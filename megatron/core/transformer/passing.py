"""What goes through the layers of a stage beside the hidden states: one microbatch's masks and tables, and its side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.mask import MaskSpec
from megatron.core.transformer.rope import RotaryTable


class _Join(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor, weight: float | Tensor) -> Tensor:
        context.weight, context.like = weight, loss.new_empty(())
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.ones_like(context.like) * context.weight, None


class Side:
    """What layers say of one microbatch beside their output: losses that join the objective, and figures to report.

    weight: what a mean over this microbatch's tokens counts in the objective of the step, loss scale included. Layers keep
    a `Side` from their forward pass, so a recomputed pass finds the one of its own microbatch.
    """

    def __init__(self, weight: float | Tensor, *, training: bool) -> None:
        self.weight, self.training = weight, training
        self.notes: dict[str, list[Tensor]] = {}

    def join(self, x: Tensor, loss: Tensor) -> Tensor:
        """x; its backward pass also brings the gradient of weight * loss, a scalar."""
        return _Join.apply(x, loss, self.weight) if self.training else x

    def note(self, name: str, value: Tensor) -> None:
        """Keep a detached figure under a name. A pass that is recomputed is heard once."""
        if torch.is_grad_enabled() == self.training:
            self.notes.setdefault(name, []).append(value.detach())


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch on its way through a stack.

    mask: which keys each query sees; a layer with a window adds it. table: rotations, for layers that have them.
    memory_mask: what cross attention looks through. side: where layers note losses; None when nobody listens.
    """

    mask: MaskSpec
    table: RotaryTable | None = None
    memory_mask: MaskSpec | None = None
    side: Side | None = None
