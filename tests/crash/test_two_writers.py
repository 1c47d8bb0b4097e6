"""Two jobs with one --save: the second is refused while the first saves on, and even without their lock no checkpoint lacks a file."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.lock import LOCK, FolderLock
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from tests.conftest import NOTES
from tests.helpers.checkpoints import complete_iterations
from tests.helpers.programme import TINY
from tests.unit.dist_checkpointing.two_ranks import save_as_two

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0  # seconds without which nothing here takes
RUN = [
    sys.executable,
    "pretrain_gpt.py",
    *TINY,
    "--mock-data",
    "--log-interval",
    "1",
    "--save-interval",
    "1",
    "--save-keep-last",
    "3",
]


def saves_on(folder: str, first: int, count: int, results: multiprocessing.Queue) -> None:
    """A writer that knows of no lock, and goes on whatever happens to a save. Runs in a process of its own."""
    good = 0
    for number in range(count):
        try:
            save_as_two(Path(folder), first + 2 * number, first + 2 * number)
            good += 1
        except (CheckpointError, OSError, AssertionError):
            pass
    results.put(good)


def unsound(folder: Path) -> list[str]:
    """Folders that are named like a checkpoint, and are not whole."""
    found = checkpoint_folders.scan_checkpoint_folder(folder)
    wrong = [str(problem) for problem in found.damaged]
    for step in found.steps:
        try:
            wrong += open_native_checkpoint(step.folder).verify(threads=1)
        except CheckpointError as error:
            wrong.append(str(error))
    return wrong


def two_writers(folder: Path, count: int) -> str:
    """Let two processes save into one folder at the same time; what happened, in words."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preload"])
    results = context.Queue()
    processes = [
        context.Process(target=saves_on, args=(str(folder), first, count, results), daemon=True) for first in (1, 2)
    ]
    for process in processes:
        process.start()
    good = sum(results.get(timeout=PATIENCE) for _ in processes)
    for process in processes:
        process.join()
    there = complete_iterations(folder)
    assert not unsound(folder)
    assert good and good <= len(there), "a save that said it went well is there"
    return (
        f"two writers without a lock: of {2 * count} saves {good} went well, and the others said "
        f"what went wrong; none of {len(there)} folders lacks a file"
    )


def test_two_writers_that_know_nothing_of_each_other_leave_only_whole_checkpoints(tmp_path: Path) -> None:
    two_writers(tmp_path, 25)


@pytest.mark.nightly
def test_two_writers_leave_only_whole_checkpoints_of_two_thousand_saves(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.config.stash[NOTES].append(two_writers(tmp_path, 1000))


def until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait for something that a run does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=10)
        time.sleep(0.05)


def test_a_second_job_is_refused_while_the_first_saves_on_and_reads_as_it_likes(tmp_path: Path) -> None:
    command = [*RUN, "--save", str(tmp_path), "--train-iters", "100000"]
    with open(tmp_path.with_suffix(".log"), "w", encoding="utf-8") as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, text=True)
        try:
            until(lambda: checkpoint_folders.newest_iteration(tmp_path) is not None, first)
            second = subprocess.run(
                [*command, "--load", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
            )
            assert second.returncode == 1 and "iteration" not in second.stdout
            assert (
                f"--save {tmp_path} is being written by another job: process {first.pid} on " in second.stderr
                and "Traceback" not in second.stderr
            )
            before = checkpoint_folders.newest_iteration(tmp_path)
            until(lambda: checkpoint_folders.newest_iteration(tmp_path) > before + 3, first)
        finally:
            first.terminate()
            first.wait(timeout=PATIENCE)
    text = tmp_path.with_suffix(".log").read_text()
    assert first.returncode == 0 and "NOT SAVED" not in text, text[-2000:]
    assert not unsound(tmp_path) and not (tmp_path / LOCK).exists()


def test_a_job_that_was_taken_over_ends_at_its_next_save(tmp_path: Path) -> None:
    command = [*RUN, "--save", str(tmp_path), "--train-iters", "100000"]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: checkpoint_folders.newest_iteration(tmp_path) is not None, first)
        (tmp_path / LOCK).unlink()
        try:
            lock = FolderLock(tmp_path)
            lock.acquire()
        except CheckpointError:  # it was faster and has put it back: then by force
            (tmp_path / LOCK).write_text("{}")
        _, said = first.communicate(timeout=PATIENCE)
    finally:
        first.kill()
        first.wait()
    assert (
        first.returncode == 1 and f"another job has taken --save {tmp_path} over" in said and "Traceback" not in said
    ), said
    assert not unsound(tmp_path)
