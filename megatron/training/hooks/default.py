"""What every run does between two steps, as a list of hooks. Their order is that of the lines in a log:

    iterations to skip               a reason to pass over data
    compiler or graph capturer       what the first step compiled
    replica check                    before a line or a checkpoint of an iteration after which replicas differ
    memory release
    interval log, stragglers         the log line, and the lines below it
    evaluation, online evaluation    after the log line of the iteration that they evaluate
    saving                           after the evaluation, which may have found the best iteration
    progress file                    what was saved

At the end of a run they are called in the opposite order: first the checkpoint is safe, then the last evaluation is made.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.parallel.device import empty_cache
from megatron.training.accelerate.compile import LayerCompiler
from megatron.training.accelerate.cuda_graphs import LayerGraphCapturer
from megatron.training.health.replica_check import ReplicaCheck
from megatron.training.health.stragglers import StragglerDetector
from megatron.training.hooks.evaluation import Evaluation
from megatron.training.hooks.interval_log import IntervalLog
from megatron.training.hooks.online import OnlineEvaluation
from megatron.training.hooks.progress_file import ProgressFile
from megatron.training.hooks.saving import Saving
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Evaluate, Samples, Trainer


class IterationsToSkip(StepHooks):
    """Passes over the data of the iterations of --iterations-to-skip."""

    def __init__(self, iterations: tuple[int, ...]) -> None:
        self.iterations = frozenset(iterations)

    def reason_to_skip(self, iteration: int) -> str:
        """Return the flag."""
        return "--iterations-to-skip" if iteration in self.iterations else ""


class MemoryRelease(StepHooks):
    """Returns unused device memory after every iteration; with level 2 also between the backward pass and the update."""

    def __init__(self, run: RunContext) -> None:
        self.level, self.device = run.config.train.empty_unused_memory_level, run.mesh.device

    def before_update(self) -> None:
        """Release it, with level 2."""
        if self.level == 2:
            empty_cache(self.device)

    def after_iteration(self, session: object) -> None:
        """Release it."""
        empty_cache(self.device)


def default_hooks(
    trainer: Trainer,
    *,
    samples: Callable[[RunContext], Samples] | None = None,
    benchmark: Callable[[RunContext, str], tuple[str, Evaluate]] | None = None,
) -> tuple[StepHooks, ...]:
    """Return the hooks that the config asks for, in their order. samples, benchmark: see `pretrain`. Collective."""
    run, config = trainer.run, trainer.run.config
    online, evaluation = OnlineEvaluation.of_run(run, samples, benchmark), Evaluation(trainer)
    progress_folder = config.checkpoint.save if config.log.log_progress else None
    hooks: list[StepHooks | None] = [
        IterationsToSkip(config.train.iterations_to_skip) if config.train.iterations_to_skip else None,
        LayerCompiler(trainer) if config.compilation.compile else None,
        LayerGraphCapturer(trainer) if config.graphs.cuda_graph_impl == "local" else None,
        ReplicaCheck(trainer) if config.faults.check_weight_hash_across_dp_replicas_interval else None,
        MemoryRelease(run) if config.train.empty_unused_memory_level else None,
        IntervalLog(trainer),
        StragglerDetector(run.mesh, count=config.faults.straggler_minmax_count)
        if config.faults.log_straggler
        else None,
        evaluation,
        online,
        Saving(run, evaluation),
        ProgressFile(run, progress_folder) if progress_folder else None,
    ]
    return tuple(hook for hook in hooks if hook is not None)
