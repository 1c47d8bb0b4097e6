"""A pool of gloo ranks, started once for each size and kept warm.

    def add(value): ...                        # a module-level function
    world(4).run(add, value)  ->  [result of rank 0, ..., result of rank 3]

Each rank is a process with an initialized default group. A function that raises on any rank ends the pool, and the
error of the rank that failed first is raised in the test; the next use starts a fresh pool.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(Exception):
    """A function raised on one of the ranks; the message holds that rank's traceback."""


class GlooOfOneLoop:
    """Makes groups of gloo as torch does, but one loop and one thread each serve all of a rank's.

    Torch gives every group a loop of its own, whose thread wakes a hundred times a second as long as the group is there. Pools keep
    tens of groups a rank, whether or not anybody uses them.
    """

    def __init__(self) -> None:
        self._loop = dist.ProcessGroupGloo.create_default_device()

    def __call__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [self._loop], 1, timeout
        return dist.ProcessGroupGloo(store, rank, size, options)


class KeptGroups:
    """Makes process groups as torch does, but keeps them from call to call: each has sockets of its own.

    The k-th group of the same ranks in a call is the k-th of those ranks in any call, so that groups which must be
    different stay different.
    """

    def __init__(self) -> None:
        self._make = dist.new_group
        self._kept: dict[tuple[tuple[int, ...], int], Any] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()

    def begin(self) -> None:
        """A new call starts to count again."""
        self._asked.clear()

    def new_group(self, ranks: Sequence[int] | None = None, **keywords: Any) -> Any:
        """What stands in for torch.distributed.new_group."""
        members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
        key = members, self._asked[members]
        self._asked[members] += 1
        if key not in self._kept:
            backend = "gloo_of_one_loop" if keywords.get("backend", "gloo") == "gloo" else keywords["backend"]
            self._kept[key] = self._make(list(members), **{**keywords, "backend": backend})
        return self._kept[key]


def serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """What a rank does: join the others, then call what it is sent."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    dist.Backend.register_backend("gloo_of_one_loop", GlooOfOneLoop(), devices=["cpu"])
    groups = KeptGroups()
    dist.new_group = groups.new_group
    while True:
        try:
            function, arguments, keywords = connection.recv()
        except EOFError:
            return
        groups.begin()
        try:
            torch.manual_seed(0)
            connection.send((True, function(*arguments, **keywords)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test wants to see it
            connection.send((False, traceback.format_exc()))


class World:
    """`size` ranks that wait for work."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0, **keywords: Any) -> list[Any]:
        """Call function(*arguments, **keywords) on every rank; the results in rank order."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments, keywords))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.size:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(self.size) if rank not in results]
                self.stop()
                raise RankFailed(f"ranks {missing} of {self.size} did not return within {timeout} s")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    worked, value = connection.recv()
                except EOFError:
                    worked, value = False, "the process died"
                if not worked:
                    self.stop()
                    raise RankFailed(f"rank {rank} of {self.size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.preload"])
        store = os.path.join(tempfile.mkdtemp(prefix="world"), "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


class Worlds:
    """One pool for each size."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        return self._worlds.setdefault(size, World(size))

    def stop(self) -> None:
        """End all pools."""
        for world in self._worlds.values():
            world.stop()
