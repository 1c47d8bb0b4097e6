"""Runs that are saved and resumed, each on every rank of a world."""

from __future__ import annotations

from typing import Any

import torch

from megatron.adapters.saved import trained_weights_only
from megatron.training.checkpoint import run_state
from megatron.training.checkpoint.checkpointing import Checkpointer
from tests.helpers import tiny
from tests.helpers.training import Held, Outcome, held_weights, outcome, train_on

BEFORE, AFTER = 2, 2  # steps before the save, and after it


def train_and_save(changes: dict[str, Any], folder: str | None, steps: int) -> tuple[list[float], list[float], Held]:
    """Train from the start, and save at the end."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **changes, save=folder)))
    losses, norms = train_on(trainer, steps)
    if folder:
        Checkpointer(trainer).save()
    return losses, norms, held_weights(trainer)


def resume_and_train(changes: dict[str, Any], folder: str, steps: int) -> tuple[list[float], list[float], Held]:
    """Load a checkpoint and train on."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **changes, load=folder)))
    kept = trained_weights_only(run_state.weights_of(trainer), trainer.run.config.model.adapter)
    for placed in kept.values():  # whatever is not loaded would show; the base of adapters is given anew
        for _, value in placed.pieces:
            value.fill_(float("nan"))
    assert Checkpointer(trainer).resume()
    assert trainer.progress.iteration == BEFORE
    losses, norms = train_on(trainer, steps)
    return losses, norms, held_weights(trainer)


def never_stopped_run(changes: dict[str, Any]) -> Outcome:
    """The serial run that goes on; its losses and norms after the save."""
    losses, norms, held = train_and_save(changes, None, BEFORE + AFTER)
    return outcome([(losses[BEFORE:], norms[BEFORE:], held)])
