"""Errors, kills and signals of whole runs, as a user meets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.training import entry
from megatron.training.health.exit_conditions import NonFiniteError
from megatron.training.launch.launch_info import LaunchInfo

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --num-workers 0 --eval-iters 0 "
    "--log-interval 1000 --distributed-timeout-minutes 2"
).split()


def launch(script: str, flags: list[str], *, ranks: int, **environment: str) -> subprocess.Popen:
    """Start a run under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(ranks),
        "--master_port",
        "0",
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
        script,
        *TINY,
        *flags,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize(
    "layout, how",
    [
        pytest.param(["--tensor-model-parallel-size", "3"], "raise", id="tensor-raise", marks=pytest.mark.nightly),
        pytest.param(["--pipeline-model-parallel-size", "3"], "kill", id="pipeline-kill"),
        pytest.param(["--tensor-model-parallel-size", "3"], "kill", id="tensor-kill", marks=pytest.mark.nightly),
        pytest.param(["--pipeline-model-parallel-size", "3"], "raise", id="pipeline-raise", marks=pytest.mark.nightly),
    ],
)
def test_one_failing_rank_ends_all_and_is_named(layout: list[str], how: str) -> None:
    flags = [
        *layout,
        "--train-iters",
        "1000",
        "--num-layers",
        "3",
        "--num-attention-heads",
        "3",
        "--hidden-size",
        "24",
        "--ffn-hidden-size",
        "48",
    ]
    process = launch("tests/helpers/failing_run.py", flags, ranks=3, FAIL=how)
    output, _ = process.communicate(timeout=600)  # how soon: benchmarks/failure.py
    assert process.returncode != 0 and "FAILING NOW" in output, output[-3000:]
    if how == "raise":
        summary = output[output.rindex("Root Cause") :]
        assert "rank      : 2" in summary and "the planted failure of the last rank" in summary, output[-3000:]
    else:
        assert "Signal 9" in output[output.rindex("Root Cause") :], output[-3000:]


def test_a_rank_that_ends_waits_for_the_thread_that_looks_for_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        """A store that answers after a while, as one on a busy machine does."""

        seconds_without_answer = 0.0

        def read(self, key: str) -> None:
            looking.set()
            time.sleep(0.5)

    looking = threading.Event()
    monkeypatch.setattr(entry.RendezvousStore, "connect", lambda place: Slow())
    monkeypatch.setattr(entry, "_LOOK_EVERY", 0.01)
    alarm = entry.FailureReporter(LaunchInfo(rank=0, local_rank=0, size=2, store="localhost:1", job=""))
    assert looking.wait(5)
    alarm.stop_watching()
    assert not [thread for thread in threading.enumerate() if thread.name == "first-failure"]


@pytest.mark.parametrize("first", [True, False])
def test_what_all_ranks_found_together_is_said_by_the_first_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: bool
) -> None:
    def main() -> None:
        raise NonFiniteError("the loss of iteration 7 is nan")

    monkeypatch.setattr(entry, "read_launch_info", lambda: LaunchInfo(rank=1, local_rank=1, size=2, store="", job=""))
    monkeypatch.setattr(entry.FailureReporter, "report_failure", lambda self, error: first)
    with pytest.raises(SystemExit) as end:
        entry.guarded_entry_point(main)()
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and len(said) == int(first)
    assert not first or (
        said[0].startswith("rank 1") and said[0].endswith("NonFiniteError: the loss of iteration 7 is nan")
    )


def test_sigterm_saves_and_exits(tmp_path: Path) -> None:
    flags = [
        "--train-iters",
        "1000000",
        "--save",
        str(tmp_path),
        "--log-interval",
        "5",
        "--tensor-model-parallel-size",
        "2",
    ]
    process = launch("pretrain_gpt.py", flags, ranks=2)
    seen = ""
    for line in process.stdout:
        seen += line
        if "iteration" in line and "lm loss" in line:
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "exiting program after receiving SIGTERM" in output, seen + output
    assert (tmp_path / "latest_checkpointed_iteration.txt").is_file(), output


def test_user_errors_of_one_process_are_one_message_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "pretrain_gpt.py", *TINY, "--train-iters", "2", "--load", str(tmp_path / "nothing")]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "CheckpointError" in done.stderr and str(tmp_path / "nothing") in done.stderr


def test_broken_rules_exit_with_two_before_anything_starts() -> None:
    command = [
        sys.executable,
        "pretrain_gpt.py",
        *TINY,
        "--train-iters",
        "2",
        "--tensor-model-parallel-size",
        "3",
        "--num-leyers",
        "4",
    ]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert "--num-leyers is not a flag; did you mean --num-layers" in done.stderr
    assert "--num-attention-heads 2 cannot be divided over --tensor-model-parallel-size 3" in done.stderr
    assert "mesh:" not in done.stdout


@pytest.mark.parametrize("flags", [["--help"], ["--num-leyers", "4"]])
def test_a_command_line_is_answered_before_torch_is_imported(flags: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "pretrain_gpt.py", *flags]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    imported = {
        line.split("|")[-1].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert done.returncode == (0 if flags == ["--help"] else 2)
    assert "megatron" in imported and not imported & ({"torch", "numpy"} if flags == ["--help"] else {"torch"})
