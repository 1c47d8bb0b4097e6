"""Masters and moments in the CPU's memory: a machine without a GPU copies within its own, and runs the same code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config.settings.optim import PrecisionConfig
from megatron.core.optimizer.optimizer import Optimizer
from megatron.training.state.trainer import build_trainer
from tests.helpers import tiny
from tests.unit.optimizer.test_optimizer import ADAM, SGD, optimizer_of, take_step

FORMATS = {
    "bf16": (torch.bfloat16, PrecisionConfig(bf16=True), torch.float32),
    "fp32": (torch.float32, PrecisionConfig(), torch.float32),
    "fp16": (torch.float16, PrecisionConfig(fp16=True, loss_scale=64.0), torch.float16),
}


def trained(numbers: str, steps: int = 3, **settings: Any) -> tuple[dict[str, torch.Tensor], Optimizer]:
    dtype, precision, grad_dtype = FORMATS[numbers]
    module, optimizer = optimizer_of(dtype, precision=precision, grad_dtype=grad_dtype, **settings)
    for step in range(steps):
        take_step(module, optimizer, step)
    return {name: child.weight.detach() for name, child in module.items()}, optimizer


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("numbers", FORMATS)
def test_steps_are_the_same_wherever_they_are_made(numbers: str, fraction: float, overlap: bool) -> None:
    expected, plain = trained(numbers, **ADAM)
    found, away = trained(
        numbers, **ADAM, offloads=True, optimizer_offload_fraction=fraction, overlap_cpu_optimizer_d2h_h2d=overlap
    )
    for name, value in expected.items():
        # A parameter in two pieces adds its squares to the norm in another order.
        torch.testing.assert_close(found[name], value, rtol=1e-6 if 0 < fraction < 1 else 0.0, atol=0.0)
    there = sum(master.numel() for master in away.main_weights[: away.on_device.start])
    everything = sum(master.numel() for master in away.main_weights)
    assert there == round(fraction * everything) and everything == sum(master.numel() for master in plain.main_weights)
    assert away.num_steps == 3


def test_sgd_and_a_piece_of_a_parameter_too() -> None:
    expected, _ = trained("bf16", **SGD)
    found, away = trained("bf16", **SGD, offloads=True, optimizer_offload_fraction=0.5)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    names = [segment.name for segment in away.segments]
    assert len(set(names)) == len(names) - 1, "one parameter is in both places"


def test_loaded_weights_reach_masters_that_nobody_saves() -> None:
    weights, optimizer = trained("fp32", **ADAM, offloads=True)
    assert "master" not in {slot for slot, _, _ in optimizer.checkpoint_state()}
    for value in weights.values():
        value.fill_(3.0)
    optimizer.apply_loaded_state(list(optimizer.checkpoint_state()))
    assert all(bool((master == 3.0).all()) for master in optimizer.main_weights)


@pytest.mark.parametrize("separate_memory", [False, True])
def test_on_a_cpu_nothing_is_moved(separate_memory: bool) -> None:
    run = tiny.run_of(tiny.config(optimizer_cpu_offload=True, bf16=True))
    optimizer = build_trainer(run, tiny.gpt, tiny.forward_step, separate_memory=separate_memory).optimizer
    assert (optimizer.cpu_offload is not None) == separate_memory
