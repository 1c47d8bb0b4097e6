#!/usr/bin/env python3
"""How long ranks take to find their places: 4,096 that exist in name only, and as many real ones as this machine takes.

    python benchmarks/many_ranks.py --real 4 8 16 32

In name: torch's fake process groups, in one process. First the mesh of three ranks as each makes its own, `Mesh.build`, which
names every group of the world; then every rank of the world in turn with its own groups, as the dry run makes them.

For real: processes with gloo on one machine, under the same layout shape. Rendezvous is the default group, whose members connect
each to each; groups is the rest. Both are of the slowest rank. What grows with the square of the ranks is fitted and said for more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.parallel import mesh
from megatron.core.parallel.device import device_memory_stats
from megatron.core.parallel.grid import axis_rank_groups
from megatron.plan.simulate.layout_build_check import mesh_without_groups

CPU = torch.device("cpu")
LARGE = ParallelConfig(
    tensor_model_parallel_size=8,
    context_parallel_size=2,
    pipeline_model_parallel_size=16,
    expert_model_parallel_size=8,
    expert_tensor_parallel_size=1,
)
SMALL = ParallelConfig(
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
)


def memory() -> float:
    """The most that this process has held, in MiB."""
    return device_memory_stats(torch.device("cpu"))["max allocated"] / 2**20


def in_name(ranks: int) -> None:
    """Fake ranks."""
    print(
        f"{ranks:,} ranks in name: tensor 8 x context 2 x pipeline 16 x data {ranks // 256}, experts over 8; {memory():.0f} MiB before"
    )
    for rank in (0, ranks // 2, ranks - 1):
        began = time.perf_counter()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        with patch.object(mesh, "process_group_backend", lambda *_: "fake"):
            built = mesh.Mesh.build(LARGE, CPU)
        seconds = time.perf_counter() - began
        dist.destroy_process_group()
        print(
            f"  rank {rank:5}: {seconds:.2f} s, {memory():.0f} MiB; tensor {built.tp.rank}, context {built.cp.rank}, pipeline {built.pp.rank}, "
            f"data {built.dp.rank}, expert {built.ep.rank}"
        )
    began = time.perf_counter()
    lists = axis_rank_groups(LARGE, ranks)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        here = mesh_without_groups(lists, rank)
        for name in ("tp", "cp", "dp", "pp", "ep", "edp", "dp_cp", "tp_cp", "model"):
            dist.new_group(list(here.axis(name).ranks), backend="fake")
        dist.destroy_process_group()
    seconds = time.perf_counter() - began
    print(f"  all of them in one process: {seconds:.1f} s, {1000 * seconds / ranks:.1f} ms a rank, {memory():.0f} MiB")


def join(rank: int, ranks: int, store: str, report: multiprocessing.Queue, together: Barrier) -> None:
    """One real rank: its times."""
    torch.set_num_threads(1)
    together.wait()
    began = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    met = time.perf_counter()
    mesh.Mesh.build(SMALL, CPU)
    report.put((met - began, time.perf_counter() - met, memory()))
    dist.barrier()
    dist.destroy_process_group()


def for_real(ranks: int) -> tuple[float, float, float]:
    """Seconds of the slowest rank: rendezvous and groups; and the most memory of one, in MiB."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload", "megatron.core.parallel.mesh"])
    report, together = context.Queue(), context.Barrier(ranks)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=join, args=(rank, ranks, f"{folder}/store", report, together))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        reports = [report.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    return tuple(max(times) for times in zip(*reports, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", type=int, default=4096)
    parser.add_argument("--real", type=int, nargs="*", default=[4, 8, 16, 32])
    options = parser.parse_args()
    if options.fake:
        in_name(options.fake)
    rows = []
    for ranks in options.real:
        rendezvous, groups, most = for_real(ranks)
        rows.append((ranks, rendezvous + groups))
        print(f"{ranks:4} real ranks: rendezvous {rendezvous:.2f} s, groups {groups:.2f} s, {most:.0f} MiB")
    if len(rows) > 2:
        counts, seconds = np.array(rows).T
        each, pair = np.linalg.lstsq(np.stack([counts, counts**2], axis=1), seconds, rcond=None)[0]
        print(
            f"fitted: {1000 * each:.1f} ms a rank + {1000 * pair:.3f} ms a pair of ranks, all on {multiprocessing.cpu_count()} cores"
        )


if __name__ == "__main__":
    main()
