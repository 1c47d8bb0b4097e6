"""pretrain(): the one loop that every entry script shares.

The loop trains; everything else that happens between two steps (log lines, evaluations, saves) is done by hooks, in the order of
`default_hooks` (hooks/default.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from megatron.training.checkpoint.checkpointing import Checkpointer, lock_save_folder
from megatron.training.health.causality_check import require_causal_attention
from megatron.training.health.rerun import add_step_validation
from megatron.training.hooks.default import default_hooks
from megatron.training.hooks.run_record import supervised
from megatron.training.loader import DatasetProvider, SplitBatches, build_split_batches
from megatron.training.session import TrainingSession
from megatron.training.state.hooks import RollBackRequest, StepHooks
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
