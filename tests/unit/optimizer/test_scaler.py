from __future__ import annotations

import pytest

from megatron.core.config.settings.optim import PrecisionConfig
from megatron.core.optimizer.scaler import LossScaler


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step; `.` went well, `x` overflowed."""
    found = []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


def test_a_dynamic_scale_follows_the_rule() -> None:
    scaler = LossScaler(
        PrecisionConfig(fp16=True, initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2, min_loss_scale=8.0)
    )
    # Two overflows halve, and so does every further one until the scale has grown; three good steps in a row double.
    assert scales(scaler, "x..x...xx") == [64, 64, 64, 32, 32, 32, 64, 64, 32]
    assert scales(scaler, "xxx") == [16, 8, 8], "never below the smallest"
    assert scales(scaler, "...") == [8, 8, 16]
    assert scales(scaler, "x") == [16], "growth refilled the overflows that are let pass"


def test_an_overflow_starts_the_count_of_good_steps_again() -> None:
    scaler = LossScaler(PrecisionConfig(fp16=True, initial_loss_scale=4.0, loss_scale_window=2, hysteresis=5))
    assert scales(scaler, ".x.x.x..") == [4] * 7 + [8]


def test_hysteresis_of_one_halves_at_once() -> None:
    scaler = LossScaler(PrecisionConfig(fp16=True, initial_loss_scale=4.0, loss_scale_window=100, hysteresis=1))
    assert scales(scaler, "xx") == [2, 1] and scales(scaler, "x") == [1]


@pytest.mark.parametrize(
    "precision, scale",
    [
        (PrecisionConfig(), 1.0),
        (PrecisionConfig(bf16=True), 1.0),
        (PrecisionConfig(fp16=True, loss_scale=128.0), 128.0),
    ],
)
def test_other_scales_never_move(precision: PrecisionConfig, scale: float) -> None:
    assert scales(LossScaler(precision), "x.x" + "." * 2000) == [scale] * 2003


def test_the_defaults_are_megatrons() -> None:
    scaler = LossScaler(PrecisionConfig(fp16=True))
    assert scaler.scale == 2.0**32
    found = scales(scaler, "xx" + "." * 1000)
    assert found[:2] == [2.0**32, 2.0**31] and found[-2:] == [2.0**31, 2.0**32]


def test_a_resumed_scale_goes_on_where_it_was() -> None:
    precision = PrecisionConfig(fp16=True, initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2)
    steps, cut = "x..xx..x...x.x....", 9
    whole = scales(LossScaler(precision), steps)
    first, second = LossScaler(precision), LossScaler(precision)
    before = scales(first, steps[:cut])
    second.load(first.state())
    assert before + scales(second, steps[cut:]) == whole


def test_a_constant_scale_is_the_command_lines_whatever_was_saved() -> None:
    scaler = LossScaler(PrecisionConfig(fp16=True, loss_scale=128.0))
    scaler.load({"scale": 7.0, "good_steps": 1, "overflows_left": 1})
    assert scaler.scale == 128.0
