"""What may take part in a training step, and in what a run does between two steps: `trainer.add_hook(hook)`.

    begin_run
      reason_to_skip                an iteration whose data is passed over has no step
      begin_step -> forward and backward passes, with bucket_ready for each bucket -> before_update -> accept_update -> end_step
      after_iteration               log line, evaluation, save: before_save -> ... -> after_save, some steps later
    end_run

Hooks run in the order in which they were added, on every rank; only `end_run` is called in the opposite order. A hook inherits
from `StepHooks` and overrides what it needs. hooks/default.py has those of every run. Who trains without the loop (`train_step`
alone) has the calls of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron.core.distributed.buffers import Bucket
from megatron.core.tensor_parallel.low_precision import begin_low_precision_step

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saver import SaveOutcome


class RunStop(Exception):
    """Raised by a hook, or by the loop, when the run is to end with an error that every rank raises together.
    saves: the state is that before the step, and is saved to run the step again from.
    """

    saves = False


class RollBackRequest(RunStop):
    """Raised on all ranks when the run is to go back to its last checkpoint."""


class StepHooks:
    """Base class of hooks into a run; each method does nothing. work: the step's `StepWork` (step.py). session: the
    `TrainingSession` (loop.py), with the data, the writers, the checkpoints, and `is_due(interval)`.
    """

    def begin_run(self, session: Any) -> None:
        """Called before the first iteration, and again after the run went back to a checkpoint."""

    def reason_to_skip(self, iteration: int) -> str:
        """Return the flag for which this iteration's data is passed over, or "". The same on every rank."""
        return ""

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

    def after_iteration(self, session: Any) -> None:
        """Called after each iteration, when its counters are up to date, also if its data was passed over."""

    def interval_line(self, steps: int) -> str:
        """Return a line for the log, below the interval's log line, or "". Collective. steps: since the last interval."""
        return ""

    def before_save(self) -> None:
        """Called between two steps, before a checkpoint is made."""

    def after_save(self, outcome: SaveOutcome) -> None:
        """Called between two steps, after a save has ended, well or not."""

    def end_run(self, session: Any, reason: str) -> None:
        """Called after the last iteration, unless the run fails; the last hook first. reason: why the run stops early, or ""."""


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
