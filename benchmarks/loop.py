#!/usr/bin/env python3
"""What our loop costs outside of the model and the optimizer, and how long a run takes from its start to its first step.

    python benchmarks/loop.py --steps 40

The real loop trains on made-up text, with a log line every step. Clocks stand around what is model (the schedule's forward and
backward passes, without reading data) and what is optimizer; what is left of an iteration is data, counters, schedules, reports
and checks, as many milliseconds for a large network as for this one.
Start to first step is a process of its own, eager, from exec to the first log line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not count as work
sys.path.insert(0, str(ROOT))

SHAPE = (
    "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 256 --micro-batch-size 8 --global-batch-size 8 "
    "--hidden-dropout 0 --attention-dropout 0 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --eval-iters 0 "
    "--log-interval 1 --num-workers 0"
).split()


def clocked(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function, whose CPU time is added to the last entry of `spent`."""

    def around(*arguments: Any, **keywords: Any) -> Any:
        began = time.process_time()
        try:
            return call(*arguments, **keywords)
        finally:
            spent[-1] += time.process_time() - began

    return around


def overhead(steps: int) -> None:
    """Train in this process and print how an iteration's CPU time is shared out."""
    import pretrain_gpt
    from megatron.cli.arguments import parse_args
    from megatron.core.optimizer.optimizer import Optimizer
    from megatron.training import loop
    from megatron.training.initialize import initialize_megatron
    from megatron.training.state import step
    from megatron.training.state.hooks import StepHooks
    from megatron.training.state.trainer import Trainer

    inside, whole, data = [0.0], [0.0], [0.0]
    step.require_next_batch = clocked(step.require_next_batch, data)
    for name in ("zero_gradients", "run_schedule", "finish_reductions"):
        setattr(Trainer, name, clocked(getattr(Trainer, name), inside))
    Optimizer.step = clocked(Optimizer.step, inside)

    class Iterations(StepHooks):
        """The CPU time of each iteration, from its first question to behind the other hooks."""

        def reason_to_skip(self, iteration: int) -> str:
            whole[-1] -= time.process_time()
            return ""

        def after_iteration(self, session: Any) -> None:
            whole[-1] += time.process_time()
            for spent in (inside, whole, data):
                spent.append(0.0)

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # lines are made, and not shown
        run = initialize_megatron(parse_args([*SHAPE, "--train-iters", str(steps)]))
        providers = pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, pretrain_gpt.forward_step
        loop.pretrain(run, *providers, hooks=[Iterations()])
    rest = [all_ - work + read for all_, work, read in zip(whole, inside, data)][2:-1]
    shares = sorted(left / all_ for left, all_ in zip(rest, whole[2:-1]))
    print(
        f"outside model and optimizer: {1e3 * statistics.median(rest):.2f} ms of CPU an iteration "
        f"({1e3 * min(rest):.2f} .. {1e3 * max(rest):.2f}) of {statistics.median(whole[2:-1]):.2f} s = {statistics.median(shares):.2%} "
        f"({shares[0]:.2%} .. {shares[-1]:.2%})"
    )


def first_step(rounds: int) -> None:
    """Start a run and wait for its first log line."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-u", "pretrain_gpt.py", *SHAPE, "--train-iters", "1"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in process.stdout:
            if " iteration " in line:
                times.append(time.perf_counter() - began)
                break
        process.communicate()
        assert process.returncode == 0, "the run failed"
    print(
        f"start to first step: {statistics.median(times):.2f} s ({min(times):.2f} .. {max(times):.2f}), load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3, help="starts")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    overhead(options.steps)
    first_step(options.rounds)


if __name__ == "__main__":
    main()
