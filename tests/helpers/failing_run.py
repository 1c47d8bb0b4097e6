"""An entry script for tests: pretrain_gpt on mock data, where one rank fails in a way the environment names."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import pretrain_gpt
from megatron.cli.arguments import parse_args
from megatron.core.models.gpt import GPTModel
from megatron.training.entry import guarded_entry_point
from megatron.training.initialize import initialize_megatron
from megatron.training.launch.launch_info import world_size
from megatron.training.loop import pretrain
from megatron.training.state.batch import Batch, LossFunction
from megatron.training.state.run import RunContext

FAIL = os.environ.get("FAIL", "")


def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
    """Megatron's, until iteration 2 on the last rank."""
    if FAIL and run.progress.iteration == 2 and run.mesh.world.is_last:
        sys.stderr.write("FAILING NOW\n")
        sys.stderr.flush()
        if FAIL == "raise":
            raise ValueError("the planted failure of the last rank")
        if FAIL == "stand":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)
    return pretrain_gpt.forward_step(run, batches, stage)


@guarded_entry_point
def main() -> None:
    """Parse, initialize, train."""
    run = initialize_megatron(parse_args(world_size=world_size()))
    pretrain(run, pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, forward_step)


if __name__ == "__main__":
    main()
