#!/usr/bin/env python3
"""Train a GPT by reinforcement learning: `torchrun --nproc_per_node N train_rl.py --langrl-env-config FILE <flags>`; see docs/rl.md."""

from __future__ import annotations

import sys

from megatron.rl.arguments import parse_rl_args
from megatron.training.launch.launch_info import read_launch_info

if __name__ == "__main__":  # before torch is imported, so that --help and refusals answer at once
    PLACE = read_launch_info()
    CHECKED, RL = parse_rl_args(world_size=PLACE.size, speaks=PLACE.rank == 0)

from megatron.core.parallel.device import pick_device
from megatron.core.parallel.mesh import SplitMeshJob
from megatron.rl.environments.config import read_environments
from megatron.rl.generation_ranks import run_generation_rank, split_mesh_builder
from megatron.rl.policy_data import PolicyDataSource, refuse_beyond_device_memory
from megatron.rl.policy_step import PolicyForwardStep, policy_model_provider
from megatron.rl.ray_ranks import RayRanks, launch_info_with_ray_ranks
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.launch.launch_info import set_world_size_variable
from megatron.training.loader import Datasets
from megatron.training.loop import pretrain
from megatron.training.state.run import RunContext


def datasets_provider(run: RunContext, samples: tuple[int, int | None, int]) -> Datasets:
    """Return no datasets: rollouts are generated while the run trains."""
    return None, None, None


@guarded_entry_point
def main() -> None:
    """Initialize and train, or generate for the ranks that train."""
    jobs: list[SplitMeshJob] = []
    place, remote = launch_info_with_ray_ranks(PLACE, RL), None
    if RL.rl_ray_address and place.rank == 0:
        remote = RayRanks(RL, PLACE, sys.argv, on_gpu=pick_device().type == "cuda")
    if RL.rl_generation_ranks:
        set_world_size_variable(place.size - RL.rl_generation_ranks)
    run = initialize_megatron(CHECKED, split_mesh_builder(RL, place, jobs) if RL.rl_generation_ranks else None)
    job = jobs[0] if jobs else None
    if job is not None and place.rank >= job.training:
        run_generation_rank(run, RL, job, read_environments(str(RL.langrl_env_config)))
        return
    for line in remote.plan if remote is not None else ():
        run.print_rank_0(line)
    refuse_beyond_device_memory(RL, run)
    source = PolicyDataSource(RL, job)
    pretrain(run, datasets_provider, policy_model_provider(RL), PolicyForwardStep(RL), data_of=source)
    source.end_generation_ranks()
    if remote is not None:
        remote.wait()


if __name__ == "__main__":
    main()
