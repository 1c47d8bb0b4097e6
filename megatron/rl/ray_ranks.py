"""Ranks that generate, started over Ray (--rl-ray-address): on whatever nodes of a Ray cluster have room, beside the ranks that a launcher starts.

torchrun: ranks 0 .. T-1 train            Ray only finds a place for each rank, and starts there the same command that a launcher would:
Ray:      ranks T .. T+N-1 generate       commands and weights go over the process group, as without Ray
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.rl.settings import RLConfig
from megatron.training.launch.launch_info import LaunchInfo, environment_with_changes, rendezvous_environment

_FLAG = "--rl-ray-address"


def launch_info_with_ray_ranks(place: LaunchInfo, rl: RLConfig) -> LaunchInfo:
    """Return this rank's launch info in the job of all ranks, those started by Ray included."""
    return dataclasses.replace(place, size=place.size + rl.rl_generation_ranks) if rl.rl_ray_address else place


def generation_rank_command(words: Sequence[str]) -> list[str]:
    """Return the command line of a rank started by Ray: without --rl-ray-address, as if it were one of the job's last
    ranks.
    """
    kept, skips = list[str](), False
    for word in words:
        if not skips and not word.startswith(f"{_FLAG}="):
            kept += [] if word == _FLAG else [word]
        skips = word == _FLAG and not skips
    return kept


class _RayRankActor:
    """Ray actor that runs one rank in a process."""

    def node_name(self) -> str:
        """Return the name of the node that the actor is on."""
        return os.uname().nodename

    def run_rank_process(self, command: list[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
        """Run a rank to its end; return its exit code, and the last 4000 characters of its output."""
        done = subprocess.run(
            command,
            env=environment_with_changes(environment),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout[-4000:]


class RayRanks:
    """The ranks started by Ray, on the first rank. plan: lines on which rank generates on which node."""

    def __init__(self, rl: RLConfig, place: LaunchInfo, words: Sequence[str], *, on_gpu: bool) -> None:
        """words: this process's command line, with its script. Raises `ConfigError` where the cluster cannot be reached or has no room."""
        import ray

        if not place.meeting:
            raise ConfigError(
                f"{_FLAG} {rl.rl_ray_address}: ranks over Ray meet the others at the launcher's address; start with torchrun"
            )
        self._ray: Any = ray
        try:
            ray.init(
                address=None if rl.rl_ray_address == "local" else rl.rl_ray_address,
                configure_logging=False,
                log_to_driver=False,
                include_dashboard=False if rl.rl_ray_address == "local" else None,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{_FLAG} {rl.rl_ray_address}: no cluster answers there: {error}") from None
        actor = ray.remote(num_cpus=1, num_gpus=int(on_gpu))(_RayRankActor)
        self._actors = [actor.remote() for _ in range(rl.rl_generation_ranks)]
        try:
            hosts = ray.get([one.node_name.remote() for one in self._actors], timeout=rl.rl_ray_seconds)
        except ray.exceptions.GetTimeoutError:
            ray.shutdown()
            raise ConfigError(
                f"{_FLAG} {rl.rl_ray_address}: the cluster has no room for {rl.rl_generation_ranks} ranks with a CPU{' and a GPU' * on_gpu} each within "
                f"{rl.rl_ray_seconds:g} s; give fewer --rl-generation-ranks, or a larger cluster"
            ) from None
        size = place.size + rl.rl_generation_ranks
        self.plan = [
            f"rank {place.size + number} of {size} generates on {host}, over Ray" for number, host in enumerate(hosts)
        ]
        command = [sys.executable, *generation_rank_command(words)]
        self._running = [
            one.run_rank_process.remote(command, rendezvous_environment(place.size + number, size), os.getcwd())
            for number, one in enumerate(self._actors)
        ]

    def wait(self) -> None:
        """Wait until all ranks have ended. Raises `RuntimeError` with the output of one that failed."""
        ends = self._ray.get(self._running)
        self._ray.shutdown()
        for code, text in ends:
            if code:
                raise RuntimeError(f"a rank over Ray ended with code {code}:\n{text}")
