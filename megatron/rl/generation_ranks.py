"""Rollouts on ranks of their own (--rl-generation-ranks): the last ranks of the job generate, all others train.

    ranks that train      refit | start round n + lag | train on round n ........ | collect | refit | start ...
    ranks that generate   refit | play round n + lag ............................ | ....... | refit | play ...

With a lag both work at the same time, on the same rollouts with the same weights as where one set of ranks does both in turn. The first rank sends
commands over an axis on which ranks may wait as long as they like; weights go over the run's transport, by intersection of boxes (refit.py).
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from megatron.core.config.settings.run import RunConfig, TrainConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.device import backend_of
from megatron.core.parallel.mesh import Mesh, SplitMeshJob
from megatron.inference.engine import Engine
from megatron.rl.environments.config import WeightedEnvironment, start_environments
from megatron.rl.refit import Refit, generating_stages, refit_targets, weights_in_training
from megatron.rl.rollouts import Draft, Limits, PlayTimes, Rollout, Task, play_rollouts, rollout_engine
from megatron.rl.settings import RLConfig, generation_config
from megatron.training.launch.launch_info import LaunchInfo
from megatron.training.launch.rendezvous import join_ranks
from megatron.training.run import Run
from megatron.training.trainer import Trainer

Played = tuple[list[Rollout | Draft], PlayTimes]


@dataclass(frozen=True, slots=True)
class Command:
    """What the ranks that generate are to do. tasks: with the number of the environment in its file, for an environment is not sent.

    version, until: see `rollouts.play_rollouts`.
    """

    kind: Literal["refit", "play", "end"]
    tasks: tuple[tuple[int, Task], ...] = ()
    limits: Limits | None = None
    version: int = 0
    until: int | None = None


class GenerationRanks:
    """The ranks that generate, as those that train see them. Every method is called by all ranks that train together. hosts: of all ranks."""

    def __init__(
        self, trainer: Trainer, job: SplitMeshJob, environments: Sequence[WeightedEnvironment], *, verify: bool
    ) -> None:
        self.trainer, self.job, self._environments = trainer, job, tuple(environments)
        self._refit = Refit(job.tensors, job.mesh.device, verify=verify)
        self.hosts = collectives.gather_objects(socket.gethostname(), job.objects)
        self.is_busy = False

    def refit(self) -> None:
        """Copy the weights in training."""
        self._send(Command("refit"))
        self._refit.copy(weights_in_training(self.trainer), {})

    def start_rollouts(
        self, tasks: Sequence[Task], limits: Limits, *, version: int = 0, until: int | None = None
    ) -> None:
        """Let rollouts be played, with the weights as of the last refit. version, until: see `rollouts.play_rollouts`."""
        places = {id(one.environment): place for place, one in enumerate(self._environments)}
        sent = ((places[id(task.environment)], dataclasses.replace(task, environment=None)) for task in tasks)  # type: ignore[arg-type]
        self._send(Command("play", tuple(sent), limits, version, until))
        self.is_busy = True

    def collect(self) -> Played:
        """Wait for the rollouts."""
        assert self.is_busy, "what is collected was started"
        self.is_busy = False
        return collectives.broadcast_object(None, self.job.objects, source=self.job.training)

    def end(self) -> None:
        """Let the ranks that generate end."""
        if self.is_busy:
            self.collect()
        self._send(Command("end"))

    def _send(self, command: Command) -> None:
        assert not self.is_busy, "one command is carried out before the next"
        collectives.broadcast_object(command, self.job.objects)


def run_generation_rank(run: Run, rl: RLConfig, job: SplitMeshJob, environments: Sequence[WeightedEnvironment]) -> None:
    """On the ranks that generate: carry out commands until the last. run: of their mesh. The engine is paused while weights change."""
    start_environments(environments, run.mesh.world)
    stages = generating_stages(run)
    refit = Refit(job.tensors, run.mesh.device, verify=rl.rl_verify_model_weights_swap)
    collectives.gather_objects(socket.gethostname(), job.objects)  # for the plan that the first rank prints
    engine: Engine | None = None
    records = run.config.model.moe.moe_enable_routing_replay
    outlive_signals(run.config.train)
    while (command := collectives.broadcast_object(None, job.objects)).kind != "end":
        if command.kind == "refit":
            refit.copy({}, refit_targets(stages, run.mesh))
            continue
        if engine is None:
            most = rl.rollouts_per_round * (1 + rl.lag * rl.rl_partial_rollouts)
            engine = rollout_engine(stages, run.tokenizer, most, command.limits, records_routes=records)
            engine.pause()
        tasks = [
            dataclasses.replace(task, environment=environments[place].environment) for place, task in command.tasks
        ]
        played = play_rollouts(
            stages,
            run.tokenizer,
            tasks,
            command.limits,
            version=command.version,
            until=command.until,
            records_routes=records,
            engine=engine,
        )
        collectives.broadcast_object(played, job.objects, source=job.training)


def outlive_signals(train: TrainConfig) -> None:
    """Go on at a signal that ends the run: the ranks that train save first, which needs what is generated, and then let these end."""
    numbers = {signal.SIGINT, *([getattr(signal, train.exit_signal)] if train.exit_signal_handler else [])}
    if threading.current_thread() is threading.main_thread():  # others cannot, and get no signals
        for number in numbers:
            # Not SIG_IGN, which programs that an environment starts would inherit.
            signal.signal(number, lambda number, frame: None)


def split_mesh_builder(
    rl: RLConfig, place: LaunchInfo, jobs: list[SplitMeshJob]
) -> Callable[[RunConfig, torch.device], tuple[Mesh, RunConfig]]:
    """What makes the mesh of this rank's half, and its config. place: with all ranks of the job. jobs: the split is appended."""

    def make(config: RunConfig, device: torch.device) -> tuple[Mesh, RunConfig]:
        parallel = config.parallel
        join_ranks(
            backend_of(device, parallel.distributed_backend),
            place,
            timedelta(minutes=parallel.distributed_timeout_minutes),
            device if device.type == "cuda" else None,
        )
        generating = generation_config(config, rl.inference_parallel_sizes)
        jobs.append(SplitMeshJob.build(parallel, generating.parallel, device, last_ranks=rl.rl_generation_ranks))
        return jobs[0].mesh, generating if place.rank >= jobs[0].training else config

    return make
