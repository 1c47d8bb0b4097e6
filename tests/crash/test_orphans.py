"""A launcher that is killed with SIGKILL: its ranks notice, end, and save nothing any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import checkpoint_folders
from tests.helpers.programme import TINY

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds without which nothing here takes


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def below(process: int) -> list[int]:
    """All processes that a process has started, and those that these have."""
    children = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [*children, *(other for child in children for other in below(child))]


def runs(process: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    "program, sign",
    [
        pytest.param(
            [sys.executable, "pretrain_gpt.py"], "is gone, and nobody would end this rank", id="its parent is gone"
        ),
        pytest.param(
            ["bash", "-c", 'python "$@"; true', "shell", "pretrain_gpt.py"],
            "has not answered for",
            id="its store is gone",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_ranks_end_with_a_launcher_that_was_killed(program: list[str], sign: str, tmp_path: Path) -> None:
    flags = [
        "--mock-data",
        "--train-iters",
        "100000",
        "--save",
        str(tmp_path),
        "--save-interval",
        "5",
        "--save-keep-last",
        "2",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "--no-python",
        *program,
        *TINY,
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(tmp_path.with_suffix(".log"), "w+", encoding="utf-8") as log:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        ranks: list[int] = []
        try:
            until(
                lambda: checkpoint_folders.newest_iteration(tmp_path) is not None or launcher.poll() is not None,
                "the first save",
            )
            ranks = below(launcher.pid)
            assert len(ranks) >= 2, Path(log.name).read_text()
            launcher.kill()
            launcher.wait()
            until(lambda: not any(map(runs, ranks)), "the ranks end")
        finally:
            # A test that failed before the launcher was killed leaves nothing running either.
            if launcher.poll() is None:
                ranks = below(launcher.pid)
                launcher.kill()
            for rank in filter(runs, ranks):
                os.kill(rank, signal.SIGKILL)
        said = Path(log.name).read_text()
    assert sign in said and "Traceback" not in said, said[-3000:]
    steps = checkpoint_folders.scan_checkpoint_folder(tmp_path)
    assert steps.steps and not steps.damaged, "what was saved is whole"
