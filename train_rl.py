#!/usr/bin/env python3
"""Train a GPT by reinforcement learning: `torchrun --nproc_per_node N train_rl.py --langrl-env-config FILE <flags>`; see docs/rl.md."""

from __future__ import annotations

from megatron.rl.arguments import parse_rl_args
from megatron.training.launch.launch_info import launcher_place

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = launcher_place()
    ARGS, RL = parse_rl_args(world_size=PLACE.size, speaks=PLACE.rank == 0)

from megatron.rl.memory import refuse_too_large
from megatron.rl.policy_data import data_source
from megatron.rl.policy_step import PolicyStep, policy_model
from megatron.training.entry import entry
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.run import Run


def datasets(run: Run, samples: tuple[int, int | None, int]) -> Datasets:
    """None: rollouts are made while the run trains."""
    return None, None, None


@entry
def main() -> None:
    """Initialize and train."""
    run = initialize_megatron(ARGS)
    refuse_too_large(RL, run)
    pretrain(run, datasets, policy_model(RL), PolicyStep(RL), data_of=data_source(RL))


if __name__ == "__main__":
    main()
