#!/usr/bin/env python3
"""Training steps on the CPU: ours against a plain PyTorch loop and transformers' GPT-2, in turn in one process.

    python tests/benchmarks/train_cpu.py 10m --rounds 6

A step is everything from the zeroed gradient to the updated weights (fp32, fused AdamW, the same shapes). Implementations
take turns, so that a machine whose speed drifts is fair to all; the ratio is of tokens per CPU-second, round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not count as work
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.benchmarks.models import PEERS, SIZES


def main() -> None:
    """Measure and print one line an implementation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = SIZES[options.size]
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, size.vocabulary - 64, (size.batch, size.length), generator=generator) for _ in range(2))
    torch.manual_seed(0)
    steps = {name: PEERS[name](size) for name in options.peers}
    for step in steps.values():
        step(x, y)
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.rounds):
        names = list(steps)
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            began, spent = time.perf_counter(), time.process_time()
            loss = steps[name](x, y)
            cpu[name].append(time.process_time() - spent)
            wall[name].append(time.perf_counter() - began)
            assert loss == loss, f"{name} lost its way"
    first = options.peers[0]
    print(f"{options.size}: {size.tokens} tokens a step, {size.flops / 1e9:.0f} GFLOP, {options.rounds} rounds, "
          f"{options.threads} threads")
    for name in steps:
        ratios = sorted(a / b for a, b in zip(cpu[first], cpu[name], strict=True))
        print(f"  {name:14} {size.tokens / statistics.median(cpu[name]):8.1f} tokens/CPU-s   "
              f"{size.tokens / min(wall[name]):8.1f} tokens/s best   {statistics.median(ratios):.3f} x {first} "
              f"({ratios[0]:.3f} .. {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
