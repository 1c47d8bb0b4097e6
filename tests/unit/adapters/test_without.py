"""A network with its adapters off is its base, and they are on again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.adapters.quantized_base import without_adapters
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.world import Worlds
from tests.parity.table import MODELS


def build(**changes: Any) -> Trainer:
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{**changes, "fp64": True})))


def loss(trainer: Trainer) -> Tensor:
    """Of the first microbatch, on one stage. Returns [], the sum over its tokens."""
    with torch.no_grad():
        output, _ = tiny.forward_step(trainer.run, tiny.short_run_batches(trainer.run, 0), trainer.stages[0])
    return output.sum()


def off_and_on(changes: dict[str, Any], base: dict[str, Any]) -> tuple[float, float, float, float]:
    """Losses of the base, of a trained run with its adapters off, inside of an error, and on again; before: trained."""
    trainer = build(**changes)
    train_on(trainer, 2)
    trained = loss(trainer)
    with pytest.raises(ZeroDivisionError), without_adapters(*trainer.stages):
        off = loss(trainer)
        raise ZeroDivisionError
    return float(loss(build(**base))), float(off), float(trained), float(loss(trainer))


@pytest.mark.parametrize("name", ["lora", "dora", "lora-moe", "lora-mla"])
def test_with_adapters_off_a_network_is_its_base(name: str, world: Worlds) -> None:
    changes = MODELS[name]
    ours = ("lora_rank", "lora_alpha", "lora_targets", "lora_rslora", "lora_plus_ratio", "dora")
    base = {key: value for key, value in changes.items() if key not in ours}
    for layout in ({}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}):
        for own, off, trained, on in world(2 if layout else 1).run(
            off_and_on, {**changes, **layout}, {**base, **layout}
        ):
            assert off == pytest.approx(own, rel=1e-13) and on == trained
            assert abs(trained - off) > 1e-6 * abs(off)
