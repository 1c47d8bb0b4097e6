"""A few gloo ranks on this machine, for one call of a function.

    run_on_local_ranks(function, 4, argument) -> [result of rank 0, ..., result of rank 3]

Each rank is a process with an initialized default group. The function and its arguments are pickled, so the function stands
at the top of a module. All processes have ended when the call returns.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 2.0  # seconds for a rank to write down where it stands
_LATER = timedelta(hours=1)  # who waits too long is stopped from outside, where all ranks are seen


class RankFailed(Exception):
    """A rank raised, died or timed out. The message says which, and what it was doing."""


def run_on_local_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Call a function on `size` local processes; return results by rank. timeout: seconds. Raises `RankFailed`."""
    if size == 1:
        return [function(*arguments)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        processes, connections = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            processes.append(
                context.Process(
                    target=_rank_main, args=((rank, size), folder, theirs, function, arguments), daemon=True
                )
            )
            processes[-1].start()
            theirs.close()
            connections.append(ours)
        try:
            return _collect_results(connections, processes, Path(folder), timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect_results(connections: list[Connection], processes: list[Any], folder: Path, timeout: float) -> list[Any]:
    """Return the results of all ranks, in order; `RankFailed` if one raises, dies or exceeds the time."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(connections):
        missing = [rank for rank in range(len(connections)) if rank not in results]
        ready = wait([connections[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(
                "\n".join(
                    [
                        f"{len(missing)} of {len(connections)} ranks did not come back within {timeout:g} s:",
                        *_hung_rank_lines(missing, processes, folder),
                    ]
                )
            )
        for rank in (rank for rank in missing if connections[rank] in ready):
            try:
                worked, value = connections[rank].recv()
            except EOFError:
                worked, value = False, "the process died"
            if not worked:
                raise RankFailed(f"rank {rank} of {len(connections)}: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]


def _hung_rank_lines(ranks: list[int], processes: list[Any], folder: Path) -> list[str]:
    """Return for each rank the innermost line of our code that it is executing, by its faulthandler's stack."""
    for rank in ranks:
        if processes[rank].pid is not None and processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(_GRACE)
    lines = []
    for rank in ranks:
        stack = (
            (folder / f"stack{rank}").read_text(encoding="utf-8").splitlines()
            if (folder / f"stack{rank}").exists()
            else []
        )
        frames = [line.strip() for line in stack if "/megatron/" in line and not line.rstrip().endswith(" in note")]
        lines.append(
            f"  rank {rank} at {frames[0].removeprefix('File ')}" if frames else f"  rank {rank}, nobody knows where"
        )
    return lines


def _rank_main(
    place: tuple[int, int],
    folder: str,
    connection: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Main function of a rank: send (True, result) of the call or (False, traceback). place: (rank, size)."""
    rank, size = place
    torch.set_num_threads(1)
    with open(f"{folder}/stack{rank}", "w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=_LATER
            )
            connection.send((True, function(*arguments)))
        except BaseException:  # noqa: BLE001 - whatever it is, the caller wants to see it
            connection.send((False, traceback.format_exc()))
