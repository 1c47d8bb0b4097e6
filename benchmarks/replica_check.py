"""What the comparison of replicas costs: `python benchmarks/replica_check.py [--interval 100]`.

Hashes all that a data-parallel rank without a distributed optimizer shares with others (weights and both moments), and sets
the time against that of a training step of the same network. What travels, 16 bytes an item, is not in the figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron.core.parallel.device import pick_device, synchronize
from megatron.training.health.replica_check import ReplicaCheck
from megatron.training.state.step import train_step
from tests.helpers import tiny

SHAPE = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "max_position_embeddings": 256,
    "global_batch_size": 8,
    "micro_batch_size": 2,
}
REPEATS = 5


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=int, default=100, help="iterations between comparisons (default: 100)")
    interval = parser.parse_args().interval
    torch.set_num_threads(1)
    device = pick_device()
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(**SHAPE), device))
    check = ReplicaCheck(trainer)
    train_step(trainer, tiny.short_run_batches(trainer.run, 0))
    steps, looks = [], []
    for _ in range(REPEATS):
        synchronize(device)
        began = time.perf_counter()
        train_step(trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration))
        synchronize(device)
        between = time.perf_counter()
        for item in check.replicated_states():
            if item.axis.name == "dp_cp":
                check.hash_value(item.value)
        synchronize(device)
        steps.append(between - began)
        looks.append(time.perf_counter() - between)
    size = sum(
        item.value.nbytes
        for item in check.replicated_states()
        if item.axis.name == "dp_cp" and isinstance(item.value, torch.Tensor)
    )
    step, look = min(steps), min(looks)
    sys.stdout.write(
        f"{device}: step {step * 1e3:.1f} ms, comparison {look * 1e3:.1f} ms of {size / 1e6:.1f} MB ({size / look / 1e9:.2f} GB/s), "
        f"{look / interval / step:.4%} of a step at an interval of {interval}\n"
    )


if __name__ == "__main__":
    main()
