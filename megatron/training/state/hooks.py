"""What may take part in a training step: `trainer.add_hook(hook)`.

    begin_step -> forward and backward passes, with bucket_ready for each bucket -> before_update -> accept_update -> end_step

Hooks run in the order in which they were added, on every rank. A hook inherits from `StepHooks` and overrides what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.buffers import Bucket
from megatron.core.tensor_parallel.low_precision import begin_low_precision_step


class StepHooks:
    """Base class of hooks into a training step; each method does nothing. work: the step's `StepWork` (step.py)."""

    def begin_step(self, work: Any) -> None:
        """Called when gradients are zero and no microbatch has been read."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """Called when a bucket's gradients are complete on this rank and not yet reduced. FSDP2 has no buckets."""

    def before_update(self) -> None:
        """Called when gradients are reduced, before weights and optimizer state change."""

    def accept_update(self, work: Any, losses: Mapping[str, Tensor], norm: Tensor) -> bool:
        """Return whether the weights may be updated, the same on every rank. The update is made if all hooks accept it.
        losses: [2] each, sum and count of this rank. norm: [], of the whole gradient.
        """
        return True

    def end_step(self, *, updated: bool) -> None:
        """Called after the step. updated: whether weights have changed."""

    def before_save(self) -> None:
        """Called between two steps, before a checkpoint is made."""


class LowPrecisionAndAfterStepHook(StepHooks):
    """Opens each step for low-precision layers, and calls the class method `after_step` once for a class's modules.
    weights_stay: weights lie where they are for a step. weights_wait: they may arrive as the forward pass needs them.
    """

    def __init__(self, stages: Sequence[nn.Module], *, weights_stay: bool = False, weights_wait: bool = False) -> None:
        self.stages, self.weights_stay, self.weights_wait = stages, weights_stay, weights_wait

    def begin_step(self, work: Any) -> None:
        """Open the step for low-precision layers."""
        begin_low_precision_step(self.stages, weights_stay=self.weights_stay, weights_wait=self.weights_wait)

    def end_step(self, *, updated: bool) -> None:
        """Call `after_step` of the modules that have it, all modules of a class at once."""
        classes: dict[type[nn.Module], list[nn.Module]] = {}
        for stage in self.stages:
            for module in stage.modules():
                if hasattr(module, "after_step"):
                    classes.setdefault(type(module), []).append(module)
        for kind, modules in classes.items():
            kind.after_step(modules, stepped=updated)  # type: ignore[attr-defined]
