#!/usr/bin/env python3
"""How long a dry run of a large cluster takes on this machine, and how much memory.

    python benchmarks/planning.py [--rounds 3]

Each is a process of its own: a whole training step of every distinct kind of rank among 1,024, without data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.run import RequestedRun
from megatron.core.parallel.device import device_memory_stats
from megatron.plan.simulate.dry_run import dry_run

RANKS = 1024
_COMMON: dict[str, Any] = {
    "mock_data": True,
    "lr": 1e-4,
    "train_iters": 10,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "micro_batch_size": 1,
    "bf16": True,
    "sequence_parallel": True,
    "recompute_activations": True,
    "use_distributed_optimizer": True,
    "pipeline_model_parallel_size": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt3 175B": {
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "global_batch_size": 1536,
        "tensor_model_parallel_size": 8,
    },
    "mixture of experts 1T": {
        "num_layers": 64,
        "hidden_size": 8192,
        "ffn_hidden_size": 20480,
        "num_attention_heads": 64,
        "group_query_attention": True,
        "num_query_groups": 8,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "global_batch_size": 1024,
        "num_experts": 32,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "swiglu": True,
        "add_bias_linear": False,
        "tensor_model_parallel_size": 4,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
    },
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan. wall, cpu: seconds; megabytes: the most that the process held; peak: GiB of the fullest rank; stages: that were run dry."""

    wall: float
    cpu: float
    megabytes: float
    peak: float
    stages: int


def planned(name: str) -> Planned:
    """Plan one of the models in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--model", name], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return Planned(**json.loads(done.stdout.splitlines()[-1]))


def plan(name: str) -> dict[str, Any]:
    """Plan it here; the fields of `Planned`."""
    torch.set_num_threads(1)
    config = config_from_flat_dict(RequestedRun, {**_COMMON, **MODELS[name]}).resolve(RANKS)
    config = replace(config, model=config.model.with_vocabulary(50257, config.parallel.tp))
    wall, cpu = time.perf_counter(), time.process_time()
    dry = dry_run(config, RANKS)
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "megabytes": device_memory_stats(torch.device("cpu"))["max allocated"] / 2**20,
        "peak": dry.worst_trace.peak / 2**30,
        "stages": len({trace.place["pp"] for trace in dry.traces}),
    }


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, help="plan this one here, and print what it took as JSON")
    options = parser.parse_args()
    if options.model is not None:
        print(json.dumps(plan(options.model)))
        return
    for name in MODELS:
        seconds = [planned(name) for _ in range(options.rounds)]
        walls = [one.wall for one in seconds]
        print(
            f"{name} on {RANKS:,} ranks, all {seconds[0].stages} stages: {statistics.median(walls):.1f} s ({min(walls):.1f} .. {max(walls):.1f}), "
            f"{statistics.median(one.cpu for one in seconds):.1f} CPU s, {max(one.megabytes for one in seconds):.0f} MB; "
            f"the fullest rank needs {seconds[0].peak:.1f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
