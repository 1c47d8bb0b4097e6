"""Lion against its formula."""

from __future__ import annotations

import torch

from megatron.core.config.settings.optim import PrecisionConfig
from tests.unit.optimizer.test_optimizer import DECAY, RATE, gradient, optimizer_of, take_step


def test_steps_are_signs_of_the_mixed_momentum() -> None:
    module, optimizer = optimizer_of(
        torch.float64,
        precision=PrecisionConfig(fp64=True),
        grad_dtype=torch.float64,
        optimizer="lion",
        lion_beta1=0.8,
        lion_beta2=0.95,
        clip_grad=0.0,
    )
    expected = {name: child.weight.detach().clone() for name, child in module.items()}
    moments = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(4):
        take_step(module, optimizer, step)
        for name, value in expected.items():
            g = gradient(name, step)
            direction = torch.sign(0.8 * moments[name] + 0.2 * g)
            moments[name] = 0.95 * moments[name] + 0.05 * g
            expected[name] = value - RATE * (direction + DECAY * value)
    for name, value in expected.items():
        torch.testing.assert_close(module[name].weight.detach(), value, rtol=1e-12, atol=1e-12)
    assert {slot for slot, _, _ in optimizer.checkpoint_state()} == {"exp_avg"}
