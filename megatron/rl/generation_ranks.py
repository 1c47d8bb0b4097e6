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
from typing import Literal

import torch

from megatron.core.config.settings.run import RunConfig, TrainConfig
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh, SplitMeshJob
from megatron.inference.engine import Engine
from megatron.rl.environments.config import EnvironmentWithWeight, start_environments_on_first_rank
from megatron.rl.refit import WeightRefit, build_generation_stages, policy_weights_tree, refit_target_tree
from megatron.rl.rollouts import (
    Draft,
    Rollout,
    RolloutLimits,
    RolloutTask,
    RolloutTimes,
    build_rollout_engine,
    play_rollouts,
)
from megatron.rl.settings import RLConfig, generation_run_config
from megatron.training.launch.launch_info import LaunchInfo
from megatron.training.launch.rendezvous import init_default_process_group
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer

Played = tuple[list[Rollout | Draft], RolloutTimes]


@dataclass(frozen=True, slots=True)
class GenerationCommand:
    """A command to the ranks that generate. tasks: each with the index of its environment, as environments are not
    sent.

    version, until: as in `rollouts.play_rollouts`.
    """

    kind: Literal["refit", "play", "end"]
    tasks: tuple[tuple[int, RolloutTask], ...] = ()
    limits: RolloutLimits | None = None
    version: int = 0
    until: int | None = None


class GenerationRanks:
    """The generating ranks as the training ranks see them; every method is collective over the latter. hosts: of all
    ranks.
    """

    def __init__(
        self, trainer: Trainer, job: SplitMeshJob, environments: Sequence[EnvironmentWithWeight], *, verify: bool
    ) -> None:
        self.trainer, self.job, self._environments = trainer, job, tuple(environments)
        self._refit = WeightRefit(job.tensors, job.mesh.device, verify=verify)
        self.hosts = collectives.gather_objects(socket.gethostname(), job.objects)
        self.is_busy = False

    def refit(self) -> None:
        """Copy the weights in training to the generating ranks."""
        self._send_command(GenerationCommand("refit"))
        self._refit.copy_weights(policy_weights_tree(self.trainer), {})

    def start_rollouts(
        self, tasks: Sequence[RolloutTask], limits: RolloutLimits, *, version: int = 0, until: int | None = None
    ) -> None:
        """Start rollouts on the generating ranks, with the weights of the last refit; `collect_rollouts` returns them.

        version, until: as in `rollouts.play_rollouts`.
        """
        places = {id(one.environment): place for place, one in enumerate(self._environments)}
        sent = ((places[id(task.environment)], dataclasses.replace(task, environment=None)) for task in tasks)  # type: ignore[arg-type]
        self._send_command(GenerationCommand("play", tuple(sent), limits, version, until))
        self.is_busy = True

    def collect_rollouts(self) -> Played:
        """Wait for the rollouts that were started; return them with their times."""
        assert self.is_busy, "what is collected was started"
        self.is_busy = False
        return collectives.broadcast_object(None, self.job.objects, source=self.job.training)

    def end_generation_ranks(self) -> None:
        """End the generating ranks, after waiting for rollouts in progress."""
        if self.is_busy:
            self.collect_rollouts()
        self._send_command(GenerationCommand("end"))

    def _send_command(self, command: GenerationCommand) -> None:
        """Broadcast a command from the first rank."""
        assert not self.is_busy, "one command is carried out before the next"
        collectives.broadcast_object(command, self.job.objects)


def run_generation_rank(
    run: RunContext, rl: RLConfig, job: SplitMeshJob, environments: Sequence[EnvironmentWithWeight]
) -> None:
    """On a generating rank: carry out commands until the last. run: of their mesh. The engine is paused while weights
    change.
    """
    start_environments_on_first_rank(environments, run.mesh.world)
    stages = build_generation_stages(run)
    refit = WeightRefit(job.tensors, run.mesh.device, verify=rl.rl_verify_model_weights_swap)
    collectives.gather_objects(socket.gethostname(), job.objects)  # for the plan that the first rank prints
    engine: Engine | None = None
    records = run.config.model.moe.moe_enable_routing_replay
    ignore_end_signals(run.config.train)
    while (command := collectives.broadcast_object(None, job.objects)).kind != "end":
        if command.kind == "refit":
            refit.copy_weights({}, refit_target_tree(stages, run.mesh))
            continue
        if engine is None:
            most = rl.rollouts_per_round * (1 + rl.generation_lag * rl.rl_partial_rollouts)
            engine = build_rollout_engine(stages, run.tokenizer, most, command.limits, records_routes=records)
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


def ignore_end_signals(train: TrainConfig) -> None:
    """Ignore the signals that end a run: training ranks save first, which needs what is generated, and then end these
    ranks.
    """
    numbers = {signal.SIGINT, *([getattr(signal, train.exit_signal)] if train.exit_signal_handler else [])}
    if threading.current_thread() is threading.main_thread():  # others cannot, and get no signals
        for number in numbers:
            # Not SIG_IGN, which programs that an environment starts would inherit.
            signal.signal(number, lambda number, frame: None)


def split_mesh_builder(
    rl: RLConfig, place: LaunchInfo, jobs: list[SplitMeshJob]
) -> Callable[[RunConfig, torch.device], tuple[Mesh, RunConfig]]:
    """Return the function that builds the mesh of this rank's part of the job and returns it with its config.

    place: launch info with all ranks of the job. jobs: the `SplitMeshJob` is appended to it.
    """

    def build_split_rank_mesh_and_config(config: RunConfig, device: torch.device) -> tuple[Mesh, RunConfig]:
        parallel = config.parallel
        init_default_process_group(parallel, place, device)
        generating = generation_run_config(config, rl.inference_parallel_sizes)
        jobs.append(SplitMeshJob.build(parallel, generating.parallel, device, last_ranks=rl.rl_generation_ranks))
        return jobs[0].mesh, generating if place.rank >= jobs[0].training else config

    return build_split_rank_mesh_and_config
