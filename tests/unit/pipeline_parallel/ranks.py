"""Gloo ranks that wait for work, forked once per size. A stand-in for the world pool of tests/helpers."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.parallel.mesh import Axis

SECONDS = 60


class Ranks:
    """`run` calls a function on every rank with that rank's axis, and returns what each returned."""

    def __init__(self, size: int, store: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Raises what a rank raised, or a time-out if ranks wait for each other."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(SECONDS), f"rank {rank} has not answered for {SECONDS} s"
            good, value = pipe.recv()
            assert good, f"rank {rank} failed\n{value}"
            results.append(value)
        return results

    def stop(self) -> None:
        """End the processes that this object started."""
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    axis = Axis("world", size, rank, tuple(range(size)), dist.group.WORLD)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(axis, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
