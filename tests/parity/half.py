"""Training in half precision on every rank: what its steps did, loss scale included."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron.core.parallel import collectives
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.training import Held, held_weights


class HalfStep(NamedTuple):
    """One step. scale: the loss scale after it."""

    loss: float
    norm: float
    scale: float
    skipped: bool


def train_half_here(changes: dict[str, Any], steps: int) -> tuple[list[HalfStep], Held]:
    """Train this rank's share; its steps, and its pieces of the weights at the end."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **changes)))
    done = []
    for _ in range(steps):
        step = train_step(trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration))
        pairs = [
            collectives.all_reduce(pair.double(), trainer.run.mesh.world).tolist()
            for name, pair in step.losses.items()
            if name == "lm loss" or name.startswith("mtp_")
        ]
        norm = float(step.grad_norm)
        # All kinds of "not finite" are one: nan would not even equal itself.
        done.append(
            HalfStep(
                sum(total / count for total, count in pairs),
                norm if norm < float("inf") else float("inf"),
                step.loss_scale,
                step.skipped,
            )
        )
    for parallel in trainer.parallels:
        parallel.finish_gather()
    return done, held_weights(trainer)
