"""What may take part in a training step: `trainer.add_hook(hook)`.

    begin_step -> forward and backward passes, with bucket_ready for each bucket -> before_update -> accept_update -> end_step

Hooks run in the order in which they were added, on every rank. A hook inherits from `StepHooks` and overrides what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.buffers import Bucket
from megatron.core.tensor_parallel.low_precision import open_step


class StepHooks:
    """Called at the points of one training step. work: its `StepWork` (step.py), which holds the microbatches and the trainer."""

    def begin_step(self, work: Any) -> None:
        """Gradients are zero, and no microbatch was read yet."""
        return None

    def bucket_ready(self, bucket: Bucket) -> None:
        """The gradients of a bucket are complete on this rank, and not reduced yet. FSDP2 has no buckets."""
        return None

    def before_update(self) -> None:
        """Gradients are reduced; weights and optimizer state are about to change."""
        return None

    def accept_update(self, work: Any, losses: Mapping[str, Tensor], norm: Tensor) -> bool:
        """Whether the weights may be updated; every rank must return the same. The update is made if all hooks accept it.

        losses: [2] each, sum and count of this rank. norm: [], of the whole gradient.
        """
        return True

    def end_step(self, *, updated: bool) -> None:
        """The step is over. updated: whether weights have changed."""
        return None

    def before_save(self) -> None:
        """Between two steps: a checkpoint is about to be made, for whatever reason."""
        return None


class ModuleHooks(StepHooks):
    """Opens a step for layers of low precision, and calls `after_step` of the modules that have it, all modules of a class at once.

    weights_stay: weights lie where they are for a whole step. weights_wait: they may arrive as the first forward pass needs them.
    """

    def __init__(self, stages: Sequence[nn.Module], *, weights_stay: bool = False, weights_wait: bool = False) -> None:
        self.stages, self.weights_stay, self.weights_wait = stages, weights_stay, weights_wait

    def begin_step(self, work: Any) -> None:
        """As the protocol says."""
        open_step(self.stages, weights_stay=self.weights_stay, weights_wait=self.weights_wait)

    def end_step(self, *, updated: bool) -> None:
        """As the protocol says."""
        classes: dict[type[nn.Module], list[nn.Module]] = {}
        for stage in self.stages:
            for module in stage.modules():
                if hasattr(module, "after_step"):
                    classes.setdefault(type(module), []).append(module)
        for kind, modules in classes.items():
            kind.after_step(modules, stepped=updated)  # type: ignore[attr-defined]
