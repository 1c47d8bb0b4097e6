"""pretrain(): the one loop that every entry script shares.

The loop trains; everything else that happens between two steps (log lines, evaluations, saves) is done by hooks, in the order of
`default_hooks` (hooks/default.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from megatron.core.parallel import collectives
from megatron.training.checkpoint.checkpointing import Checkpointer, lock_save_folder
from megatron.training.health.causality_check import require_causal_attention
from megatron.training.health.exit_conditions import exit_conditions_of_run
from megatron.training.health.rerun import StepFunction, add_step_validation
from megatron.training.hooks.default import default_hooks
from megatron.training.hooks.run_record import add_steps_to_run_log, supervised
from megatron.training.hooks.writers import Writers
from megatron.training.loader import DatasetProvider, SplitBatches, build_split_batches
from megatron.training.report.metrics import IntervalClock, StepMetricsMeter
from megatron.training.state.hooks import RollBackRequest, RunStop, StepHooks
from megatron.training.state.trainer import Evaluate, ForwardStep, ModelProvider, Samples, Trainer, build_trainer

if TYPE_CHECKING:
    from megatron.training.state.run import RunContext


def pretrain(
    run: RunContext,
    datasets: DatasetProvider,
    model: ModelProvider,
    forward_step: ForwardStep,
    samples: Callable[[RunContext], Samples] | None = None,
    *,
    benchmark: Callable[[RunContext, str], tuple[str, Evaluate]] | None = None,
    data_of: Callable[[Trainer], SplitBatches] | None = None,
    hooks: Sequence[StepHooks] = (),
) -> None:
    """Train, evaluate, save and report as the config says. datasets(run, (train, valid, test) sample counts) -> three
    datasets; model(run, stage spec) -> one stage of the network; forward_step(run, batches, stage) -> (output, loss
    function). samples(run): makes the generator for --eval-generate. benchmark(run, file): makes (task name,
    evaluation) for --online-evaluation-config. data_of(trainer): the data, if not read from datasets. hooks: called
    after those of every run.
    """
    with lock_save_folder(run) as lock, supervised(run):
        require_causal_attention(run)
        trainer = build_trainer(run, model, forward_step)
        every = (*default_hooks(trainer, samples=samples, benchmark=benchmark), *hooks)
        checkpoint = Checkpointer(trainer, lock=lock)
        if checkpoint.resume():
            run.run_log.add("loaded", **dataclasses.asdict(run.progress))
            if note := trainer.batches.resume_note(run.progress.iteration, run.progress.consumed_train_samples):
                run.print_rank_0(f"WARNING: {note}")
        trainer.batches.require_divisible_sizes(run.progress.consumed_train_samples)
        step = add_step_validation(trainer)
        for hook in every:
            trainer.add_hook(hook)
        while True:
            try:
                with closing(build_split_batches(trainer, datasets) if data_of is None else data_of(trainer)) as data:
                    return TrainingSession(trainer, checkpoint, data, step).run()
            except RollBackRequest as bad:
                run.print_rank_0(
                    f"WARNING: {bad}\nThe run goes back to its last checkpoint, and will pass over the data of that iteration"
                )
                checkpoint.roll_back(bad)
                run.run_log.add("rollback", reason=str(bad), **dataclasses.asdict(run.progress))


class TrainingSession:
    """One stretch of a run, from a checkpoint (or the start) to an exit or rollback. Hooks are given it between steps."""

    def __init__(self, trainer: Trainer, checkpoint: Checkpointer, data: SplitBatches, step: StepFunction) -> None:
        """step: trains on the next global batch."""
        self.trainer, self.checkpoint, self.data, self.step = trainer, checkpoint, data, step
        self.config = trainer.run.config
        self.total = trainer.batches.num_iterations(self.config.train)
        self.meter = StepMetricsMeter(lambda tensor: collectives.all_reduce(tensor, trainer.run.mesh.world))
        self.writers = Writers.of_run(trainer.run, train_iters=self.total)
        self.watch = exit_conditions_of_run(trainer.run, last_saved=lambda: checkpoint.last_saved)
        self.clock = IntervalClock()

    def run(self) -> None:
        """Train until there is a reason to stop; then hooks save, and evaluate if the run came to its end."""
        trainer, progress = self.trainer, self.trainer.progress
        with closing(self.writers), self.watch:
            for hook in trainer.hooks:
                hook.begin_run(self)
            try:
                reason = "" if self.config.train.skip_train else self._train()
                self.report_steps()
            except RunStop as stop:
                # All ranks know of it: they can still end a save together.
                if stop.saves and progress.iteration:
                    self.save_if_unsaved()
                self.checkpoint.wait_for_save_outcome()
                raise
            for hook in reversed(trainer.hooks):
                hook.end_run(self, reason)
            if reason:
                trainer.run.print_rank_0(reason)
            if not self.config.train.skip_train:
                self.checkpoint.require_last_save()
            trainer.run.run_log.add("end", reason=reason or "complete", iteration=progress.iteration)

    def _train(self) -> str:
        """Run iterations until the end or a reason to stop; return the reason, "" at the end."""
        trainer, progress, watch = self.trainer, self.trainer.progress, self.watch
        self.clock.restart()
        while progress.iteration < self.total:
            watch.start_profiler_if_due(progress.iteration)
            if reason := next(
                filter(None, (hook.reason_to_skip(progress.iteration + 1) for hook in trainer.hooks)), ""
            ):
                self._drop_data_of_one_iteration(reason)
            else:
                assert self.data.train is not None, "build_split_batches refuses a run that trains without data"
                self.meter.add(self.step(self.data.train))
            trainer.run.mesh.flight_recorder.enter_phase("")
            watch.profile_and_collect_garbage(progress.iteration)
            for hook in trainer.hooks:
                hook.after_iteration(self)
            # Asked after a step, never before the first: a run resumed where it had to stop must get on.
            if progress.iteration < self.total and (reason := watch.reason_to_stop(progress.iteration)):
                return reason
        return ""

    def _drop_data_of_one_iteration(self, reason: str) -> None:
        """Read and drop the data of one iteration. reason: the flag that asks for it."""
        run, size = self.trainer.run, self.trainer.next_batch_size()
        self.data.drop_training_batches(size.num_microbatches)
        run.progress.iteration += 1
        run.progress.consumed_train_samples += size.global_batch_size
        run.progress.skipped_train_samples += size.global_batch_size
        run.run_log.add("skip", iteration=run.progress.iteration, samples=size.global_batch_size, reason=reason)

    def is_due(self, interval: int | None) -> bool:
        """Whether the current iteration is a multiple of the interval; False without one."""
        return interval is not None and interval > 0 and self.trainer.progress.iteration % interval == 0

    def report_steps(self) -> None:
        """Bring the steps' numbers to the host, write them and check that they are finite. Collective."""
        steps = self.meter.resolve()
        self.writers.write_steps(steps)
        add_steps_to_run_log(self.trainer.run.run_log, steps)
        self.watch.require_finite(steps)

    def save_if_unsaved(self) -> None:
        """Begin to save, if --save is given and this iteration is not saved yet. Collective."""
        iteration = self.trainer.progress.iteration
        if self.config.checkpoint.save and iteration not in (self.checkpoint.last_saved, self.checkpoint.on_its_way):
            with self.clock.paused():
                self.report_steps()
                self.trainer.run.mesh.flight_recorder.begin_activity("save", iteration)
                self.checkpoint.begin_save()
