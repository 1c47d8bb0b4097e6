#!/usr/bin/env python3
"""Train a GPT by reinforcement learning: `torchrun --nproc_per_node N train_rl.py --langrl-env-config FILE <flags>`; see docs/rl.md."""

from __future__ import annotations

import sys

from megatron.rl.arguments import parse_rl_args
from megatron.training.launch.launch_info import launcher_place

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = launcher_place()
    ARGS, RL = parse_rl_args(world_size=PLACE.size, speaks=PLACE.rank == 0)

from megatron.core.parallel.device import pick_device
from megatron.core.parallel.mesh import SplitJob
from megatron.rl.environments.config import read_environments
from megatron.rl.generation_ranks import generate, mesh_of
from megatron.rl.memory import refuse_too_large
from megatron.rl.policy_data import PolicySource
from megatron.rl.policy_step import PolicyStep, policy_model
from megatron.rl.ray_ranks import RayRanks, job_place
from megatron.training.entry import run_entry
from megatron.training.initialize import initialize_megatron
from megatron.training.launch.launch_info import train_on
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.run import Run


def datasets(run: Run, samples: tuple[int, int | None, int]) -> Datasets:
    """None: rollouts are made while the run trains."""
    return None, None, None


@run_entry
def main() -> None:
    """Initialize and train, or generate for the ranks that do."""
    jobs: list[SplitJob] = []
    place, remote = job_place(PLACE, RL), None
    if RL.rl_ray_address and place.rank == 0:
        remote = RayRanks(RL, PLACE, sys.argv, on_gpu=pick_device().type == "cuda")
    if RL.rl_generation_ranks:
        train_on(place.size - RL.rl_generation_ranks)
    run = initialize_megatron(ARGS, mesh_of(RL, place, jobs) if RL.rl_generation_ranks else None)
    job = jobs[0] if jobs else None
    if job is not None and place.rank >= job.training:
        generate(run, RL, job, read_environments(str(RL.langrl_env_config)))
        return
    for line in remote.plan if remote is not None else ():
        run.print_rank_0(line)
    refuse_too_large(RL, run)
    source = PolicySource(RL, job)
    pretrain(run, datasets, policy_model(RL), PolicyStep(RL), data_of=source)
    source.end_generation()
    if remote is not None:
        remote.wait()


if __name__ == "__main__":
    main()
