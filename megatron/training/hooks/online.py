"""What the network itself says while it trains: continuations of prompts, and the scores of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Evaluate, Samples

if TYPE_CHECKING:
    from megatron.training.session import TrainingSession


class OnlineEvaluation(StepHooks):
    """Writes samples and scores at --eval-interval and at the end of a run. benchmark: its name, and its evaluation."""

    def __init__(self, samples: Samples | None = None, benchmark: tuple[str, Evaluate] | None = None) -> None:
        self.samples, self.benchmark = samples, benchmark

    @classmethod
    def of_run(
        cls,
        run: RunContext,
        samples: Callable[[RunContext], Samples] | None,
        benchmark: Callable[[RunContext, str], tuple[str, Evaluate]] | None,
    ) -> OnlineEvaluation | None:
        """Return what --eval-generate and --online-evaluation-config ask for, made by the functions of the entry script."""
        config, made = run.config, cls()
        if config.train.eval_generate:
            if samples is None:
                raise ConfigError(
                    "--eval-generate: this script gives pretrain() nothing that continues text; leave it out"
                )
            made.samples = samples(run)
        if (file := config.data.multimodal.online_evaluation_config) is not None:
            if benchmark is None:
                raise ConfigError(
                    "--online-evaluation-config: this script answers no questions about images; leave it out"
                )
            made.benchmark = benchmark(run, file)
        return None if made.samples is None and made.benchmark is None else made

    def after_iteration(self, session: TrainingSession) -> None:
        """Write them, if an evaluation is due."""
        if session.is_due(session.config.train.eval_interval):
            self._write(session)

    def end_run(self, session: TrainingSession, reason: str) -> None:
        """Write them at the end of a whole run, unless that has just been done."""
        train = session.config.train
        if not reason and (train.skip_train or not session.is_due(train.eval_interval)):
            self._write(session)

    def _write(self, session: TrainingSession) -> None:
        trainer, iteration = session.trainer, session.trainer.progress.iteration
        # Prompts have all lengths: compiled layers would be compiled again and again.
        eager = session.config.compilation.compile
        with (
            session.clock.paused(),
            evaluation_mode(trainer),
            torch.compiler.set_stance("force_eager") if eager else nullcontext(),
        ):
            if self.samples is not None:
                session.writers.write_samples(self.samples(trainer.stages), iteration=iteration)
            if self.benchmark is not None:
                task, evaluate = self.benchmark
                scores = evaluate(trainer.stages, iteration)
                listed = " | ".join(f"{name}: {score:.2f}" for name, score in scores.items())
                trainer.run.print_rank_0(f" {task} at iteration {iteration} | {listed} |")
                session.writers.write_scores(task, scores, iteration=iteration)
