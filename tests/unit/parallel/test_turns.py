"""Two pieces of work in turns."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.core.parallel.turns import Turns

CPU = torch.device("cpu")


def steps_of(turns: Turns, said: list[str], name: str, count: int) -> None:
    """Say something `count` times, and pass on after each but the last."""
    for step in range(count):
        said.append(f"{name}{step}")
        if step < count - 1:
            turns.pass_on()


@pytest.mark.parametrize("main, beside, order", [
    (3, 3, "F0 B0 F1 B1 F2 B2"), (2, 4, "F0 B0 F1 B1 B2 B3"), (4, 2, "F0 B0 F1 B1 F2 F3"), (1, 2, "F0 B0 B1"), (1, 1, "F0 B0")])
def test_they_change_places_where_they_pass_on_and_who_is_left_goes_on_alone(main: int, beside: int, order: str) -> None:
    for _ in range(20):
        turns, said = Turns(), []
        turns.run(lambda: steps_of(turns, said, "F", main), lambda: steps_of(turns, said, "B", beside), CPU)
        assert said == order.split()
    assert not [thread for thread in threading.enumerate() if thread.name == "beside"]


@pytest.mark.parametrize("at", ["main", "beside"])
def test_an_error_of_either_is_raised_when_both_are_over(at: str) -> None:
    turns, said = Turns(), []

    def fail() -> None:
        turns.pass_on()
        raise ValueError("broken")

    def work() -> None:
        steps_of(turns, said, "W", 3)

    with pytest.raises(ValueError, match="broken"):
        turns.run(*((fail, work) if at == "main" else (work, fail)), CPU)
    assert said == ["W0", "W1", "W2"]


def test_each_has_gradients_on_as_it_begins() -> None:
    found = []
    turns = Turns()
    turns.run(lambda: found.append(torch.is_grad_enabled()), lambda: found.append(torch.is_grad_enabled()), CPU)
    assert found == [True, True]
