#!/usr/bin/env python3
"""How long a user waits: `pretrain_gpt.py --help`, a rank's first step, and importing torch alone for comparison.

    python benchmarks/startup.py --rounds 5

Each round runs the commands in turn; the ratio is to `import torch` of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 256 --micro-batch-size 1 --global-batch-size 1 "
    "--lr 1e-4 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --eval-iters 0"
).split()
COMMANDS = {
    "import torch": ["-c", "import torch, torch.distributed"],
    "--help": ["pretrain_gpt.py", "--help"],
    "bad flag refused": ["pretrain_gpt.py", "--num-leyers", "2"],
    "first step": ["pretrain_gpt.py", *TINY],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one command."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 2), done.stderr
    return time.perf_counter() - began


def main() -> None:
    """Measure and print one line a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds_of = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            seconds_of[name].append(seconds(arguments))
    for name, times in seconds_of.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds_of["import torch"], strict=True))
        print(
            f"  {name:18} {statistics.median(times):6.2f} s ({min(times):.2f} .. {max(times):.2f})   {ratio:.2f} x import torch"
        )


if __name__ == "__main__":
    main()
