"""Evaluate a model on a task of Megatron-LM, or finetune it on one: `torchrun --nproc_per_node N tasks/main.py --task NAME <flags>`; `--help` lists the flags in groups.

    python tasks/main.py --task LAMBADA --valid-data lambada.jsonl --strict-lambada --load runs/gpt --use-checkpoint-args
    python tasks/main.py --task MNLI --train-data train.tsv --valid-data dev_matched.tsv dev_mismatched.tsv --epochs 5 \\
        --pretrained-checkpoint runs/bert ...
"""

from __future__ import annotations

import sys

from megatron.cli.arguments import parse_args
from megatron.core.config.flags.declare import config_from_flat_dict, raw_flag_values
from megatron.tasks.flags import TaskConfig, task_flag_defaults, task_flag_problems
from megatron.training.launch.launch_info import read_launch_info


def main() -> None:
    """Parse the command line before torch is imported, so that --help and errors come at once; then run the task."""
    place = read_launch_info()
    if "--task" not in raw_flag_values(sys.argv) and not {"-h", "--help"} & set(sys.argv):
        sys.stderr.write("ConfigError: no --task stands on the command line; --help names them\n" * (place.rank == 0))
        sys.exit(2)
    checked = parse_args(
        world_size=place.size,
        speaks=place.rank == 0,
        extra=(TaskConfig,),
        defaults=task_flag_defaults(sys.argv),
        own_problems=task_flag_problems,
    )
    from megatron.tasks.run import run_task

    run_task(checked, config_from_flat_dict(TaskConfig, checked.given))
