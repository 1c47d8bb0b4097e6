#!/usr/bin/env python3
"""How fast several ranks of one machine's CPUs train over gloo, as Linux treats them by itself and as ours ask it to.

    python benchmarks/ranks.py

Ranks tell Linux that they compute (`set_sched_batch_policy`), so that their threads that wake up do not push each other off the
processors. Two pools of ranks take turns: one that tells it, and one that does not, since threads keep what was said when they
started. fp32, one thread a rank, the slowest rank's seconds of a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from megatron.core.parallel import mesh
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.world import World

BATCH = {
    "num_attention_heads": 8,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 2,
    "global_batch_size": 8,
}
NETWORKS = {
    "small": {"num_layers": 4, "hidden_size": 64, **BATCH},
    "larger": {"num_layers": 8, "hidden_size": 256, **BATCH},
}
EXPERTS = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 256,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
}
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor 2": (2, {TENSOR: 2}),
    "tensor 2, sequence": (2, {TENSOR: 2, "sequence_parallel": True}),
    "tensor 4, sequence": (4, {TENSOR: 4, "sequence_parallel": True}),
    "tensor 2 x pipeline 2": (4, {TENSOR: 2, PIPELINE: 2}),
    "data 4, distributed optimizer": (4, {"use_distributed_optimizer": True}),
    "context 2 x data 2": (4, {"context_parallel_size": 2}),
    "tensor 2 x data 2, experts 2": (4, {TENSOR: 2, "sequence_parallel": True, **EXPERTS}),
}


def steps_here(changes: dict[str, Any], is_batched: bool, steps: int) -> list[float]:
    """On every rank: seconds of training steps, after a first. told: Linux is told that the rank computes."""
    with patch.object(mesh, "set_sched_batch_policy", mesh.set_sched_batch_policy if is_batched else lambda _: None):
        trainer = tiny.trainer_of(tiny.run_of(tiny.config(dist.get_world_size(), **changes)))
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        train_step(trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration))
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each pool (default: %(default)s)")
    options = parser.parse_args()
    print(f"{os.cpu_count()} processors, {options.rounds} rounds")
    for size, network in NETWORKS.items():
        tokens = network["global_batch_size"] * network["seq_length"]
        print(f"{size}: {network['num_layers']} x {network['hidden_size']}, {tokens} tokens a step")
        for name, (ranks, changes) in LAYOUTS.items():
            pools = {is_batched: World(ranks) for is_batched in (False, True)}
            taken: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.rounds):
                for is_batched, pool in pools.items():
                    seconds = zip(*pool.run(steps_here, {**network, **changes}, is_batched, 3), strict=True)
                    taken[is_batched].append(statistics.median(max(step) for step in seconds))
            for pool in pools.values():
                pool.stop()
            ratios = sorted(usual / ours for usual, ours in zip(taken[False], taken[True], strict=True))
            usual, ours = (tokens / statistics.median(taken[is_batched]) for is_batched in (False, True))
            print(
                f"  {name:30} as Linux has it {usual:6.0f} tokens/s, as the ranks ask {ours:6.0f}: "
                f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} .. {ratios[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
