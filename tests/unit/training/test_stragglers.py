"""The rank that holds the others up is named, though all of them take the same time for a step."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.training.health.stragglers import StragglerDetector, straggler_line
from megatron.training.state.batch import Batch, LossFunction
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import build_trainer
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.world import Worlds

SLOW = 0.05  # seconds a microbatch


def test_the_line_names_both_ends() -> None:
    line = straggler_line([0.2, 0.1, 0.3], ["rank 0", "rank 1", "rank 2"], count=2)
    assert line == (
        "straggler: own time per iteration (ms): median 200.0 | fastest 100.0 rank 1, 200.0 rank 0 | slowest 300.0 rank 2, "
        "200.0 rank 0"
    )


def slowed(layout: dict[str, int], slow: int) -> str:
    """On every rank: two steps, in which one rank takes its time."""

    def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[Tensor, LossFunction]:
        if run.mesh.world.rank == slow:
            time.sleep(SLOW)
        return tiny.forward_step(run, batches, stage)

    run = tiny.run_of(tiny.config(torch.distributed.get_world_size(), num_layers=2, **layout))
    trainer = build_trainer(run, tiny.gpt, forward_step)
    stragglers = StragglerDetector(run.mesh)
    train_on(trainer, 2)
    return stragglers.interval_line(2)


def test_a_slow_rank_is_named_and_its_neighbours_are_not_blamed(world: Worlds) -> None:
    for layout, place in (
        ({"tensor_model_parallel_size": 2}, "tensor 1"),
        ({"pipeline_model_parallel_size": 2}, "pipeline 1"),
    ):
        line = world(2).run(slowed, layout, 1)[0]
        slowest = re.search(r"slowest ([\d.]+) rank 1 on node \S+ \((.*)\)$", line)
        assert slowest and place in slowest[2], line
        assert float(slowest[1]) > 8 * SLOW * 1000, "8 microbatches"
        assert float(re.search(r"fastest ([\d.]+)", line)[1]) < float(slowest[1]) - 4 * SLOW * 1000, (
            f"waits count for nobody: {line}"
        )
