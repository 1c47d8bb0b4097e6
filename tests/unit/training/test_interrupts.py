"""Ctrl-C: the first saves and ends, the second ends at once, before training it ends the program; each in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.config.settings.run import TrainConfig
from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.training.health import exit_conditions
from megatron.training.health.exit_conditions import ExitConditions, InterruptHandler
from megatron.training.state.run import TerminationSignalState
from tests.helpers.programme import TINY

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 120.0


def until(event: threading.Event) -> None:
    """Wait; a handler of Python's runs in between."""
    deadline = time.monotonic() + PATIENCE
    while not event.is_set():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_second_interrupt_counts_only_when_it_is_not_the_first_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_conditions, "_ONCE", 3600.0)
    first, last, ended = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(exit_conditions.os, "_exit", lambda code: ended.set() if code == 130 else None)
    before, ending = signal.getsignal(signal.SIGINT), TerminationSignalState()
    with ExitConditions(
        TrainConfig(), ending=ending, interrupts=InterruptHandler(ending, first=first.set, last=last.set)
    ) as watch:
        os.kill(os.getpid(), signal.SIGINT)
        until(first)
        assert "SIGINT" in watch.reason_to_stop(1)
        first.clear()
        os.kill(os.getpid(), signal.SIGINT)
        assert not last.wait(0.2) and not first.is_set(), "a launcher passed it on"
        monkeypatch.setattr(exit_conditions, "_ONCE", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        until(ended)
        assert last.is_set()
    assert signal.getsignal(signal.SIGINT) is before and signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "interrupts"]


def interrupted(script: str, flags: Sequence[str], after: Sequence[str], **environment: str) -> tuple[int, str]:
    """Start a program, and interrupt it whenever one of these was said; its exit code and the rest of what it says."""
    process = subprocess.Popen(
        [sys.executable, "-u", script, *TINY, "--mock-data", "--train-iters", "1000000", *flags],
        cwd=ROOT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, bound = "", threading.Timer(PATIENCE, process.kill)  # which ends every wait for what it says
    bound.start()
    try:
        for words in after:
            while words not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            time.sleep(1.1 * (words == after[-1] and len(after) > 1))
            process.send_signal(signal.SIGINT)
        said += process.stdout.read()
        return process.wait(), said
    finally:
        bound.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_first_interrupt_saves_and_ends(tmp_path: Path) -> None:
    code, said = interrupted("pretrain_gpt.py", ["--save", str(tmp_path), "--log-interval", "5"], ["lm loss"])
    assert code == 0 and "Traceback" not in said and checkpoint_folders.newest_iteration(tmp_path), said
    assert "SIGINT: the run ends after this step and saves; once more (Ctrl-C) ends it at once" in said
    assert "exiting program after receiving SIGINT" in said


def test_the_second_interrupt_ends_a_run_that_stands_still(tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path), "--log-interval", "1"]
    code, said = interrupted(
        "tests/helpers/failing_run.py", flags, ["FAILING NOW", "SIGINT: the run ends"], FAIL="stand"
    )
    assert code == 130 and "Traceback" not in said, said
    assert said.splitlines()[-1] == "SIGINT again: the run ends at once, in iteration 3; it has no checkpoint"


@pytest.mark.nightly
def test_an_interrupt_before_training_is_one_line() -> None:
    code, said = interrupted("pretrain_gpt.py", [], ["mesh: "])
    assert code == -signal.SIGINT and said.splitlines()[-1] == "interrupted (SIGINT)" and "Traceback" not in said, said
