"""A run that is killed and started again: its ranks are real processes, and what kills them is SIGKILL.

lives = Lives(folder, layout, ...)
lives.live_and_die(random)    start from the newest checkpoint, be killed at a random moment
lives.live()                  start from the newest checkpoint, run to the end
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.training.initialize import initialize_megatron, leave_process_group
from megatron.training.loop import pretrain
from tests.helpers.programme import TINY, checked

INTERVAL = 2
FLAGS = (
    f"--mock-data --save-interval {INTERVAL} --save-keep-last 2 --hidden-dropout 0.1 --bf16 --async-save "
    "--lr-decay-style cosine --log-interval 1 --distributed-timeout-minutes 2"
).split()


@dataclass(frozen=True)
class Layout:
    """Ranks, their flags, and how many iterations the run has."""

    ranks: int
    flags: str
    iterations: int


LAYOUTS = {
    "two ranks, distributed optimizer": Layout(
        2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 40
    ),
    "four ranks, tensor and pipeline": Layout(
        4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel", 16
    ),
}
PATIENCE = 120.0  # seconds without which no life takes


def rank_lives(rank: int, ranks: int, port: int, flags: list[str], output: str) -> None:
    """What a rank does: train. Runs in a process of its own."""
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    run = initialize_megatron(checked([*TINY, *flags], world_size=ranks))
    pretrain(run, pretrain_gpt.datasets_provider, pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    leave_process_group()
    sys.stdout.flush()


@dataclass
class Lives:
    """One run, life after life. newest: iteration of the newest checkpoint after each death. startup: seconds, as last seen."""

    folder: Path
    layout: Layout
    newest: list[int] = field(default_factory=list)
    startup: float = 1.0

    def live(self) -> None:
        """Run to the end; the run must say that all went well."""
        processes = self._start()
        deadline = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        _kill(processes)
        assert codes == [0] * len(processes), f"exit codes {codes}:\n{self._output.read_text(errors='replace')[-3000:]}"

    def live_and_die(self, choose: random.Random) -> bool:
        """Run until some saves later, and then a little; be killed. Returns whether the end came before the kill."""
        before = checkpoint_folders.newest_iteration(self.folder) or 0
        saves, alone = choose.choice((0, 1, 1, 2)), choose.random() < 0.5
        processes, started, finished = self._start(), time.monotonic(), False
        if saves:
            while (checkpoint_folders.newest_iteration(self.folder) or 0) < before + saves * INTERVAL and not finished:
                time.sleep(0.002)
                finished = all(process.exitcode == 0 for process in processes)
                bad = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
                assert not bad, f"a rank died by itself: {bad}\n{self._output.read_text(errors='replace')[-3000:]}"
                assert time.monotonic() - started < PATIENCE, (
                    f"no progress:\n{self._output.read_text(errors='replace')[-3000:]}"
                )
            self.startup = time.monotonic() - started
            time.sleep(choose.uniform(0.0, 0.15))
        else:
            time.sleep(choose.uniform(0.0, self.startup))
        if alone:  # one rank first, and the others a moment later, as a launcher does it
            choose.choice(processes).kill()
            time.sleep(choose.uniform(0.0, 0.3))
        finished = all(process.exitcode == 0 for process in processes)
        _kill(processes)
        self.newest.append(self.look())
        return finished

    def look(self) -> int:
        """The iteration of the newest checkpoint, after all of it was read; 0 while there is none."""
        steps = checkpoint_folders.scan_checkpoint_folder(self.folder).steps
        if not steps:
            return 0
        problems = open_native_checkpoint(steps[0].folder).verify(threads=1)
        assert not problems, problems
        return steps[0].iteration

    @property
    def _output(self) -> Path:
        return self.folder.with_suffix(".log")

    def _start(self) -> list[Any]:
        ranks = self.layout.ranks
        self._output.write_text("")
        # Kept by this process, as a launcher keeps it, so that the death of a rank does not take it away.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.preload", "tests.crash.lives"])
        words = [
            *FLAGS,
            *self.layout.flags.split(),
            "--train-iters",
            str(self.layout.iterations),
            "--save",
            str(self.folder),
            "--load",
            str(self.folder),
        ]
        processes = [
            context.Process(
                target=rank_lives, args=(rank, ranks, self._store.port, words, str(self._output)), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        return processes


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
