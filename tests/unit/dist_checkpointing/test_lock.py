"""The lock of a folder: one job writes there, a job that ended is succeeded, and who was taken over finds out."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.lock import LOCK, FolderLock

HOLD = """
import sys
from megatron.core.dist_checkpointing.lock import FolderLock
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
assert "torch" not in sys.modules
sys.stdin.readline()
try:
    print("note", FolderLock(sys.argv[1], job=sys.argv[2], watch=1.0).acquire(), flush=True)
except CheckpointError as error:
    print("refused", error, flush=True)
sys.stdin.read()
"""
Start = Callable[..., subprocess.Popen]


def quick(folder: Path, **fields: object) -> FolderLock:
    return FolderLock(folder, heartbeat=0.02, watch=0.4, **fields)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that wait for a line, acquire the lock, and stay."""
    processes = []

    def one(folder: Path, job: str = "") -> subprocess.Popen:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", HOLD, str(folder), job], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        return processes[-1]

    yield one
    for process in processes:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen) -> str:
    return process.stdout.readline().strip()


def go(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def elsewhere(folder: Path, job: str = "") -> None:
    """Another machine's lock."""
    owner = replace(FolderLock(folder, job=job).owner, host="far", machine="another", process=4711)
    (folder / LOCK).write_text(json.dumps(asdict(owner)))


def test_a_second_job_is_told_whose_the_folder_is_and_succeeds_one_that_was_killed(
    tmp_path: Path, start: Start
) -> None:
    first = start(tmp_path, "Slurm 7.0")
    go(first)
    assert told(first) == "note"
    with pytest.raises(
        CheckpointError,
        match=rf"being written by another job: process {first.pid} on .* \(job Slurm 7.0\), since .*; end that one, or",
    ):
        quick(tmp_path, job="Slurm 7.0").acquire()
    first.kill()
    first.wait()
    lock = FolderLock(tmp_path)
    assert f"taken over from a job that has ended without a word: process {first.pid}" in lock.acquire()
    lock.check_ownership()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_of_several_that_find_a_lock_left_behind_one_gets_it(tmp_path: Path, start: Start) -> None:
    gone = replace(FolderLock(tmp_path).owner, process=2**22 + 1)
    (tmp_path / LOCK).write_text(json.dumps(asdict(gone)))
    processes = [start(tmp_path) for _ in range(4)]
    for process in processes:
        go(process)
    message = [told(process) for process in processes]
    assert sorted(line.split()[0] for line in message) == ["note", "refused", "refused", "refused"], message
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_heartbeat_that_stands_still_is_taken_over_after_a_look_and_one_that_moves_is_not(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    over = threading.Event()

    def heartbeat() -> None:
        while not over.wait(0.02):
            os.utime(tmp_path / LOCK)

    beating = threading.Thread(target=heartbeat)
    beating.start()
    with pytest.raises(CheckpointError, match="process 4711 on far"):
        quick(tmp_path).acquire()
    over.set()
    beating.join()
    lock = quick(tmp_path)
    assert "process 4711 on far" in lock.acquire()
    lock.release()


def test_a_job_that_is_started_again_elsewhere_takes_over_at_once(tmp_path: Path) -> None:
    elsewhere(tmp_path, job="torchrun a")
    lock = FolderLock(tmp_path, job="torchrun a", watch=3600.0)
    assert lock.acquire() == ""
    lock.release()


def test_an_owner_finds_out_that_it_was_taken_over_and_leaves_its_successors_lock_alone(tmp_path: Path) -> None:
    former, later = quick(tmp_path), quick(tmp_path)
    former.acquire()
    assert later.acquire() == "", "the same process may have it again"
    with pytest.raises(CheckpointError, match="another job has taken --save .* over"):
        former.check_ownership()
    former.release()
    later.check_ownership()
    later.release()


def test_a_lock_that_somebody_removed_is_put_back(tmp_path: Path) -> None:
    lock = quick(tmp_path / "folder")
    lock.acquire()
    (tmp_path / "folder" / LOCK).unlink()
    lock.check_ownership()
    assert (tmp_path / "folder" / LOCK).is_file()
    lock.release()


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"process": "x"}', None])
def test_a_lock_that_nobody_can_read_is_watched_like_another(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        os.mkfifo(tmp_path / LOCK)
    else:
        (tmp_path / LOCK).write_bytes(content)
    lock = quick(tmp_path)
    lock.acquire()
    lock.check_ownership()
    lock.release()


def test_a_file_system_without_hard_links_has_locks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    def refused(*names: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    lock = quick(tmp_path)
    lock.acquire()
    lock.check_ownership()
    monkeypatch.undo()
    second = start(tmp_path)
    go(second)
    assert told(second).startswith("refused")
    lock.release()
    assert list(tmp_path.iterdir()) == []
