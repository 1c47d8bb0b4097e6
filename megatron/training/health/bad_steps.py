"""Step validation, before the update: from losses and a gradient norm that are equal on all ranks, so that all decide alike.

    validator.begin_step(work)             keeps the random states, in case the step has to be repeated
    validator.accept_update(losses, norm)  False: the update is skipped, weights and optimizer state stay as they were
    validator.after_iteration(session)     the bad step is logged, and what follows is decided (`--on-bad-step`)

Bad is a loss or gradient norm that is not finite; with --check-for-spiky-loss a loss far from what the last steps let
expect; with --check-for-large-grads a gradient norm ten times the largest of theirs (Megatron's factor). To ask costs a
wait for the device in every step; a run that does not ask finds out at its next report.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.config.settings.run import RunConfig
from megatron.core.distributed.buffers import Bucket
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.training.health.failure_dump import write_failure_dump
from megatron.training.health.failures import failure_folder, rank_and_node_text
from megatron.training.state.hooks import RollBackRequest, RunStop, StepHooks
from megatron.training.state.step import StepWork

if TYPE_CHECKING:
    from megatron.training.session import TrainingSession

_KEPT, _NEEDED = 100, 20  # good steps that are remembered, and without which nothing counts as unusual
_LARGE = 10.0  # times the largest
_SPIKE = 10.0  # deviations above the median
_SHOWN = 4  # ranks in a message
_SCALE = 1.4826  # of the median of deviations, for the standard deviation of a normal distribution


class BadStepError(RunStop):
    """A step's loss or gradient norm is bad, and the run ends."""


class StepHistory:
    """Losses and gradient norms of the last good steps, against which a new step is judged."""

    def __init__(self, *, finite: bool, spikes: bool, large: bool) -> None:
        """finite: losses and norm must be finite; spikes: no loss spikes; large: no large gradient norm."""
        self._finite, self._spikes, self._large = finite, spikes, large
        self._losses: deque[float] = deque(maxlen=_KEPT)
        self._norms: deque[float] = deque(maxlen=_KEPT)

    def find_problem(self, losses: Mapping[str, float], norm: float) -> str:
        """Return what is wrong with a step, in words, or "" and remember it. losses: means; norm: of the gradient."""
        values = {**losses, "gradient norm": norm}
        problem = (
            [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)] if self._finite else []
        )
        loss = losses.get("lm loss", next(iter(losses.values()), 0.0))
        if not problem and self._spikes and len(self._losses) >= _NEEDED:
            median = statistics.median(self._losses)
            deviation = _SCALE * statistics.median(abs(value - median) for value in self._losses)
            if loss > median + _SPIKE * max(deviation, 1e-3 * abs(median)):
                problem.append(
                    f"the loss is {loss:.6g}, after a median of {median:.6g} and a deviation of {deviation:.3g} in the last steps"
                )
        if not problem and self._large and len(self._norms) >= _NEEDED and norm > _LARGE * max(self._norms):
            problem.append(f"the gradient norm is {norm:.6g}, after at most {max(self._norms):.6g} in the last steps")
        if not problem:
            self._losses.append(loss)
            self._norms.append(norm)
        return ", ".join(problem)


class StepValidator(StepHooks):
    """Hook that judges whether a step's update may be made. problem: why the last step was bad, or "". count: bad steps
    so far. passed_over: iterations whose data is to be skipped after a rollback. largest: largest local gradient of each
    bucket, scalars. repeats: the step was judged before and is rerun: it is counted once, and its failure dump exists.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.memory = StepHistory(
            finite=config.train.check_for_nan_in_loss_and_grad,
            spikes=config.faults.check_for_spiky_loss,
            large=config.faults.check_for_large_grads,
        )
        self.problem = ""
        self.count = 0
        self.repeats = False
        self.passed_over: set[int] = set()
        self._streams: dict[str, Tensor] = {}
        self.largest: list[Tensor] = []  # of the gradients of this rank alone, one a bucket
        self._num_samples = 0  # of the step

    def reason_to_skip(self, iteration: int) -> str:
        """Return the flag by which the run went back to before this iteration, which was bad."""
        return "--on-bad-step rollback" if iteration in self.passed_over else ""

    def begin_step(self, work: StepWork) -> None:
        """Reset the verdict, and keep the random states for a failure dump."""
        self.problem, self.largest = "", []
        self._num_samples = work.num_microbatches * work.trainer.batches.unit
        self._streams = {name: state.clone() for name, state in work.trainer.run.streams.state().items()}

    def accept_update(self, work: StepWork, losses: Mapping[str, Tensor], norm: Tensor) -> bool:
        """Return whether the update may be made; writes a failure dump if not. Collective, the same on all ranks.
        losses: [2] each (total, count); norm: a scalar.
        """
        means = mean_losses(losses, norm, work.trainer.run.mesh)
        self.problem = self.memory.find_problem(means, float(norm))
        if not self.problem:
            return True
        if self.repeats:
            return False
        self.count += 1
        self.problem += self._nonfinite_ranks_text(work)
        folder = failure_folder(self.config)
        if folder is None:
            self.problem += "; there is no folder for the evidence (--error-dir or --save)"
        else:
            self.problem += f"; {write_failure_dump(folder, work, self.problem, losses=means, norm=float(norm), streams=self._streams)}"
        return False

    def bucket_ready(self, bucket: Bucket) -> None:
        """Record the largest absolute gradient of the bucket."""
        self.largest.append(torch.linalg.vector_norm(bucket.grad, math.inf))

    def _nonfinite_ranks_text(self, work: StepWork) -> str:
        """Return in words whose losses or gradients were not finite before any reduction, or "". Collective."""
        rank, culprits = work.trainer.run.mesh.world.rank, []
        if not all(bool(pair.isfinite().all()) for report in work.reports for pair in report.values()):
            culprits.append("loss")
        if not all(bool(largest.isfinite()) for largest in self.largest):
            culprits.append("gradients")
        mine = f"{' and '.join(culprits)} of {rank_and_node_text(rank)}" if culprits else ""
        theirs = list(filter(None, collectives.gather_objects(mine, work.trainer.run.mesh.world)))
        more = f" and of {len(theirs) - _SHOWN} more" if len(theirs) > _SHOWN else ""
        return f"; first not finite in the {', the '.join(theirs[:_SHOWN])}{more}" if theirs else ""

    def after_iteration(self, session: TrainingSession) -> None:
        """After a bad step do as --on-bad-step says; raises unless the run goes on."""
        if not self.problem:
            return
        run = session.trainer.run
        run.progress.skipped_train_samples += self._num_samples
        session.report_steps()
        run.run_log.add("bad step", iteration=run.progress.iteration, samples=self._num_samples, reason=self.problem)
        run.print_rank_0(f"WARNING: {self.decide_after_bad_step(run.progress.iteration)}")

    def decide_after_bad_step(self, iteration: int) -> str:
        """Apply --on-bad-step: raise `BadStepError` or `RollBackRequest`, or return what to say of the skipped step."""
        problem, self.problem = f"iteration {iteration} is bad: {self.problem}", ""
        policy = self.config.faults.on_bad_step or "stop"
        if policy != "stop" and self.count > self.config.faults.max_bad_steps:
            raise BadStepError(
                f"{problem}\nit is the {self.count}th bad step, and --max-bad-steps is {self.config.faults.max_bad_steps}"
            )
        if policy == "stop":
            raise BadStepError(
                f"{problem}\nlook at the data of that step and at --lr, or go on without it with --on-bad-step skip"
            )
        if policy == "rollback":
            self.passed_over.add(iteration)
            raise RollBackRequest(problem)
        return f"{problem}\nIts update is left out, and the run goes on with the next data"


def mean_losses(losses: Mapping[str, Tensor], norm: Tensor, mesh: Mesh) -> dict[str, float]:
    """Return each loss averaged over all tokens of the step, the same on all ranks, without MoE metrics.
    losses: [2] each (total, count) of this rank; norm: a scalar, whose device is used.
    """
    names = [name for name in losses if not name.startswith("moe/")]
    if not names:
        return {}
    table = collectives.all_reduce(
        torch.stack([losses[name].to(norm.device).double() for name in names]), mesh.world
    ).tolist()
    return {name: total / count for name, (total, count) in zip(names, table, strict=True) if count}
