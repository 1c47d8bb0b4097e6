"""Validation losses at --eval-interval and at the end of a run, and which iteration was the best (--save-best)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.flags.figures import match_metric_name
from megatron.core.config.settings.run import CheckpointConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.training.state.evaluate import evaluate_loss
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import TrainingProgress
from megatron.training.state.trainer import Trainer

if TYPE_CHECKING:
    from megatron.training.loader import EvaluationData
    from megatron.training.session import TrainingSession


class Evaluation(StepHooks):
    """Computes and writes the losses of validation and test data; begins a save if they are the best."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.config = trainer, trainer.run.config
        # The validation losses after the last iteration, if they had to be known before its save.
        self.last_losses: dict[str, float] | None = None

    def begin_run(self, session: TrainingSession) -> None:
        """Raise `ConfigError` if --save-best has nothing to look at."""
        if self.config.checkpoint.save_best and session.data.valid is None:
            raise ConfigError("--save-best: there are no validation data; give them a share in --split")

    def after_iteration(self, session: TrainingSession) -> None:
        """Evaluate, if it is due, and save if this is the best iteration so far."""
        word = self.config.checkpoint.save_best
        if (
            word is not None and self.trainer.loss_names is not None
        ):  # after the first step, not only at the first evaluation
            require_save_best_metric(word, self.trainer.loss_names)
        if not session.is_due(self.config.train.eval_interval) or session.data.valid is None:
            return
        progress = self.trainer.progress
        with session.clock.paused():
            session.report_steps()
            session.watch.collect_evaluation_garbage()
            losses = self._losses(session.data.valid)
            if not self.config.data.full_validation:
                samples = session.data.valid.iterations * self.trainer.batches.evaluation_batch_size
                progress.consumed_valid_samples += samples
            self._write(session, losses)
            session.watch.collect_evaluation_garbage()
        if word is not None:
            self._save_if_best(session, losses)

    def before_last_save(self, session: TrainingSession) -> None:
        """With --save-best, evaluate after the last iteration too, before its save: it may be the best."""
        if self.config.checkpoint.save_best and not session.is_due(self.config.train.eval_interval):
            self.last_losses = self._losses(session.data.valid)
            self._save_if_best(session, self.last_losses)

    def end_run(self, session: TrainingSession, reason: str) -> None:
        """Evaluate and write each split that has data, at the end of a whole run."""
        if reason:
            return
        for name, evaluations in (("validation", session.data.valid), ("test", session.data.test)):
            if evaluations is not None:
                known = self.last_losses if name == "validation" else None
                self._write(session, self._losses(evaluations) if known is None else known, final=name)

    def _losses(self, evaluations: EvaluationData | None) -> dict[str, float]:
        """Return the mean of each loss, by name, over the evaluation samples of a split that has data."""
        assert evaluations is not None, "only splits with data are evaluated"
        with evaluations.open_next_evaluation() as (batches, iterations):
            return evaluate_loss(self.trainer, batches, iterations)

    def _write(self, session: TrainingSession, losses: Mapping[str, float], final: str | None = None) -> None:
        progress, run_log = self.trainer.progress, self.trainer.run.run_log
        session.writers.write_validation(
            losses, iteration=progress.iteration, consumed_samples=progress.consumed_train_samples, final=final
        )
        run_log.add("validation", iteration=progress.iteration, losses=losses, final=final)

    def _save_if_best(self, session: TrainingSession, losses: Mapping[str, float]) -> None:
        """Begin to save if an evaluation is better than all before (--save-best)."""
        progress, run = self.trainer.progress, self.trainer.run
        if note_if_best(progress, losses, self.config.checkpoint, run.mesh.world):
            best = f"{progress.best_figure[4:]} {progress.best_value:.6E}"
            run.print_rank_0(f"iteration {progress.iteration} is the best so far: {best}")
            session.save_if_unsaved()


def require_save_best_metric(word: str, names: Sequence[str]) -> str:
    """Return the metric among `names` that --save-best `word` means (`match_metric_name`); `ConfigError` if there is none."""
    figure = match_metric_name(word, names)
    if figure is None:
        raise ConfigError(
            f"--save-best {word}: evaluations of this run give no such figure; choose of: {', '.join(names)}"
        )
    return figure


def note_if_best(
    progress: TrainingProgress, losses: Mapping[str, float], options: CheckpointConfig, world: Axis
) -> bool:
    """Record an evaluation in `progress` if its --save-best metric is the best; return whether it was. Collective. NaN
    and inf are never better; if metric or direction are not those recorded, this evaluation is the first.
    """
    assert options.save_best is not None, "only runs with --save-best look for the best evaluation"
    figure = require_save_best_metric(options.save_best, list(losses))
    mode = options.save_best_mode or ("min" if figure.endswith("loss") else "max")
    value, described = collectives.broadcast_object(losses[figure], world), f"{mode} {figure}"
    if not math.isfinite(value):
        return False
    if progress.best_value is not None and progress.best_figure == described:
        if not (value < progress.best_value if mode == "min" else value > progress.best_value):
            return False
    progress.best_iteration, progress.best_value, progress.best_figure = progress.iteration, value, described
    return True
