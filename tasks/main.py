#!/usr/bin/env python3
"""Evaluate or finetune: `torchrun --nproc_per_node N tasks/main.py --task NAME <flags>`; `--help` lists the flags in groups.

    python tasks/main.py --task LAMBADA --valid-data lambada.jsonl --strict-lambada --load runs/gpt --use-checkpoint-args
    python tasks/main.py --task MNLI --train-data train.tsv --valid-data dev_matched.tsv dev_mismatched.tsv --epochs 5 \\
        --pretrained-checkpoint runs/bert ...
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.training.cli.arguments import parse_args
from megatron.training.launch.launch_info import launcher_place
from tasks.flags import ZERO_SHOT, TaskConfig, defaults_of, value_of

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = launcher_place()
    if value_of(sys.argv, "--task") is None and not {"-h", "--help"} & set(sys.argv):
        sys.stderr.write("ConfigError: no --task stands on the command line; --help names them\n" * (PLACE.rank == 0))
        sys.exit(2)
    ARGS = parse_args(
        world_size=PLACE.size, speaks=PLACE.rank == 0, extra=(TaskConfig,), defaults=defaults_of(sys.argv)
    )

from megatron.core.config.flags import ConfigError, from_namespace
from megatron.training.entry import entry
from megatron.training.health.failures import locating
from megatron.training.health.watchdog import Watchdog
from megatron.training.initialize import initialize_megatron
from megatron.training.report.run_record import recorded
from tasks.finetune import finetune
from tasks.zeroshot import run_zero_shot


@entry
def main() -> None:
    """Initialize and do the task."""
    task = from_namespace(TaskConfig, ARGS)
    if ARGS.context_parallel_size > 1 or ARGS.hybrid_context_parallel:
        raise ConfigError(
            "tasks read every text whole on each rank; leave out --context-parallel-size and --hybrid-context-parallel"
        )
    run = initialize_megatron(ARGS)
    with recorded(run), Watchdog(run), locating(run):
        (run_zero_shot if task.task in ZERO_SHOT else finetune)(run, task)
        run.ledger.add("end", reason="complete", iteration=run.progress.iteration)


if __name__ == "__main__":
    main()
