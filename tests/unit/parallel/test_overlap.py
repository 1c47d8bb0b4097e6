"""Two pieces of work in turns."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
import torch

from megatron.core.parallel.overlap import DualBatchThreads
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.world import Worlds

CPU = torch.device("cpu")


def steps_of(turns: DualBatchThreads, said: list[str], name: str, count: int) -> None:
    """Say something `count` times, and pass on after each but the last."""
    for step in range(count):
        said.append(f"{name}{step}")
        if step < count - 1:
            turns.switch()


@pytest.mark.parametrize(
    "main, beside, order",
    [
        (3, 3, "B0 F0 B1 F1 B2 F2"),
        (2, 4, "B0 F0 B1 F1 B2 B3"),
        (4, 2, "B0 F0 B1 F1 F2 F3"),
        (1, 2, "B0 F0 B1"),
        (1, 1, "B0 F0"),
    ],
)
def test_they_change_places_where_they_pass_on_and_who_is_left_goes_on_alone(
    main: int, beside: int, order: str
) -> None:
    for _ in range(20):
        turns, said = DualBatchThreads(), []
        turns.run(lambda: steps_of(turns, said, "F", main), lambda: steps_of(turns, said, "B", beside), CPU)
        assert said == order.split()
    assert not [thread for thread in threading.enumerate() if thread.name == "beside"]


@pytest.mark.parametrize("at", ["main", "beside"])
def test_an_error_of_either_is_raised_when_both_are_over(at: str) -> None:
    turns, said = DualBatchThreads(), []

    def fail() -> None:
        turns.switch()
        raise ValueError("broken")

    def work() -> None:
        steps_of(turns, said, "W", 3)

    with pytest.raises(ValueError, match="broken"):
        turns.run(*((fail, work) if at == "main" else (work, fail)), CPU)
    assert said == ["W0", "W1", "W2"]


def test_each_has_gradients_on_as_it_begins() -> None:
    found = []
    turns = DualBatchThreads()
    turns.run(lambda: found.append(torch.is_grad_enabled()), lambda: found.append(torch.is_grad_enabled()), CPU)
    assert found == [True, True]


def places_here(kind: str) -> str:
    """Who passed on, in the order of a step in which a forward pass has a backward pass beside it: F or B."""
    trainer = tiny.trainer_of(
        tiny.run_of(
            tiny.config(
                2,
                num_layers=3,
                num_experts=4,
                expert_model_parallel_size=2,
                micro_batch_size=1,
                global_batch_size=4,
                moe_token_dispatcher_type=kind,
                overlap_moe_expert_parallel_comm=True,
            )
        )
    )
    found, switch = [], DualBatchThreads.switch

    def noted(turns: DualBatchThreads) -> None:
        found.append("FB"[threading.current_thread().name == "beside"])
        switch(turns)

    with patch.object(DualBatchThreads, "switch", noted):
        train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    return "".join(found)


@pytest.mark.parametrize("kind, ways", [("alltoall", 2), ("allgather", 3)])
def test_both_passes_change_places_on_every_way_of_tokens_and_nowhere_else(world: Worlds, kind: str, ways: int) -> None:
    assert world(2).run(places_here, kind) == ["BF" * 3 * ways] * 2
