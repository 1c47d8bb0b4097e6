"""One task from its parsed command line: a zero-shot evaluation or finetuning, with a run log around it."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.config.flags import ConfigError, from_namespace
from megatron.tasks.finetune import finetune
from megatron.tasks.flags import ZERO_SHOT, TaskConfig
from megatron.tasks.zeroshot import run_zero_shot
from megatron.training.entry import run_entry
from megatron.training.health.failures import with_location
from megatron.training.health.watchdog import HangDetector
from megatron.training.initialize import initialize_megatron
from megatron.training.report.run_record import record_run


def task_of(args: Namespace) -> TaskConfig:
    """The task that the flags name; `ConfigError` where the run's layout cannot do it."""
    if args.context_parallel_size > 1 or args.hybrid_context_parallel:
        raise ConfigError(
            "tasks read every text whole on each rank; leave out --context-parallel-size and --hybrid-context-parallel"
        )
    return from_namespace(TaskConfig, args)


def run_task(args: Namespace) -> None:
    """Initialize and do the task; errors end all ranks and are shown once."""

    @run_entry
    def main() -> None:
        task, run = task_of(args), initialize_megatron(args)
        with record_run(run), HangDetector(run), with_location(run):
            (run_zero_shot if task.task in ZERO_SHOT else finetune)(run, task)
            run.run_log.add("end", reason="complete", iteration=run.progress.iteration)

    main()
