"""When checkpoints are saved: at --save-interval, before the batch size changes, and at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.saver import SaveOutcome
from megatron.training.hooks.evaluation import Evaluation
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext

if TYPE_CHECKING:
    from megatron.training.hooks.writers import Writers
    from megatron.training.session import TrainingSession


class Saving(StepHooks):
    """Begins saves when they are due, and records how they ended. failures: failed saves of this session."""

    def __init__(self, run: RunContext, evaluation: Evaluation) -> None:
        self.run, self.options, self.evaluation = run, run.config.checkpoint, evaluation
        self.writers: Writers | None = None
        self.failures, self.num_microbatches = 0, 0

    def begin_run(self, session: TrainingSession) -> None:
        """Allocate what asynchronous saves need, so that the first save is not slower."""
        self.writers, self.failures = session.writers, 0
        self.num_microbatches = session.trainer.next_batch_size().num_microbatches
        if not session.config.train.skip_train:
            session.checkpoint.preallocate_for_async_saves()

    def after_iteration(self, session: TrainingSession) -> None:
        """Begin a save, if it is due, and see whether one in flight has ended."""
        before, self.num_microbatches = self.num_microbatches, session.trainer.next_batch_size().num_microbatches
        changes = self.options.save is not None and before != self.num_microbatches
        if changes or session.is_due(self.options.save_interval):
            session.save_if_unsaved()
        session.checkpoint.poll_save()

    def after_save(self, outcome: SaveOutcome) -> None:
        """Write the outcome of a save to writers and run log, and count failures."""
        assert self.writers is not None, "a session began before its first save"
        self.failures += bool(outcome.problems)
        self.writers.write_save_result(outcome, failures=self.failures)
        self.run.run_log.add(
            "checkpoint",
            iteration=outcome.iteration,
            seconds=outcome.seconds,
            bytes=outcome.size,
            problems=list(outcome.problems) or None,
        )

    def end_run(self, session: TrainingSession, reason: str) -> None:
        """Save the last iteration and wait until that is done."""
        if session.config.train.skip_train:
            return
        if not reason:
            self.evaluation.before_last_save(session)
        # If it is of this very iteration and failed, here is another chance.
        session.checkpoint.wait_for_save_outcome()
        session.save_if_unsaved()
        session.checkpoint.wait_for_save_outcome()
