"""One task from its parsed command line: a zero-shot evaluation or finetuning, with a run log around it."""

from __future__ import annotations

from megatron.tasks.finetune import finetune
from megatron.tasks.flags import ZERO_SHOT, TaskConfig
from megatron.tasks.zeroshot import run_zero_shot
from megatron.training.checked_run import CheckedRun
from megatron.training.entry import guarded_entry_point
from megatron.training.hooks.run_record import supervised
from megatron.training.initialize import initialize_megatron


def run_task(checked: CheckedRun, task: TaskConfig) -> None:
    """Initialize the run and do the task; an error ends all ranks and is shown once."""

    @guarded_entry_point
    def main() -> None:
        run = initialize_megatron(checked)
        with supervised(run):
            (run_zero_shot if task.task in ZERO_SHOT else finetune)(run, task)
            run.run_log.add("end", reason="complete", iteration=run.progress.iteration)

    main()
