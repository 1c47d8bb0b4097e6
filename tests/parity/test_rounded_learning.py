"""A tiny network learns from rounded matrices about as fast as in bf16, by every recipe."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megatron.training.state.step import train_step
from tests.helpers import tiny

STEPS, TEXTS = 100, 4  # batches, which it learns by heart
SHAPE: dict[str, Any] = {
    "bf16": True,
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "init_method_std": 0.07,
    "lr": 4e-3,
    "min_lr": 4e-4,
    "train_iters": STEPS,
    "clip_grad": 1.0,
    "weight_decay": 0.01,
}
# Settings, and how far the mean loss of all steps and that of the last ones may lie above those of bf16.
RECIPES: tuple[tuple[dict[str, Any], float, float], ...] = (
    (
        {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
        0.04,
        0.04,
    ),
    ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, 0.04, 0.04),
    ({"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, 0.04, 0.04),
    ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, 0.04, 0.04),
    ({"fp4_format": "e2m1"}, 0.12, 0.5),
)


@cache
def losses(**changes: Any) -> list[float]:
    """One a step."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**{**SHAPE, **changes})))
    found = []
    for step in range(STEPS):
        total, count = train_step(trainer, tiny.short_run_batches(trainer.run, step % TEXTS)).losses["lm loss"].tolist()
        found.append(total / count)
    return found


@pytest.mark.parametrize(
    "changes, during, after",
    [
        pytest.param(*row, id="-".join(map(str, row[0].values())), marks=[pytest.mark.nightly] if place else [])
        for place, row in enumerate(RECIPES)
    ],
)
def test_rounded_matrices_teach_about_as_much_as_those_of_bf16(
    changes: dict[str, Any], during: float, after: float
) -> None:
    wide, found = losses(), losses(**changes)
    assert wide[-1] < 0.1 < 4.0 < wide[0], "there is something to learn, and it is learned"
    assert sum(found) / sum(wide) - 1 < during and sum(found[-TEXTS:]) / sum(wide[-TEXTS:]) - 1 < after, (found, wide)
