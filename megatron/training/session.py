"""One stretch of a run: its iterations, and what its hooks are given between them."""

from __future__ import annotations

from contextlib import closing

from megatron.core.parallel import collectives
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.health.exit_conditions import exit_conditions_of_run
from megatron.training.hooks.run_record import add_steps_to_run_log
from megatron.training.hooks.writers import Writers
from megatron.training.loader import SplitBatches
from megatron.training.report.metrics import IntervalClock, StepMetricsMeter
from megatron.training.state.hooks import RunStop
from megatron.training.state.step import StepFunction
from megatron.training.state.trainer import Trainer


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
