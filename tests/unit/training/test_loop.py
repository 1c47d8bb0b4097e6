"""pretrain(), end to end in this process, through the providers of pretrain_gpt."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pretrain_gpt
from megatron.core.datasets.indexed import DataError
from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.models.gpt import GPTModel
from megatron.training.health.exit_conditions import NonFiniteError
from megatron.training.state.batch import Batch, LossFunction
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import ForwardStep
from tests.helpers.programme import trained, write_tokens

ROOT = Path(__file__).resolve().parents[3]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits are a matter of one device."""
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that read a small file."""
    return write_tokens(tmp_path_factory.mktemp("data") / "walks")


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind of a JSONL log."""
    return [record for line in path.read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


def losses(path: Path) -> dict[int, float]:
    """Iteration -> loss; of steps written twice the later."""
    return {record["iteration"]: record["losses"]["lm loss"] for record in records(path, "step")}


def reported(text: str) -> list[int]:
    """Iterations that have a log line."""
    return [int(number) for number in re.findall(r"\] iteration +(\d+)/", text)]


def saved(folder: Path) -> list[int]:
    """Iterations with a checkpoint."""
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*") if path.is_dir())


def test_a_run_on_mock_data_says_what_it_is_and_learns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    trained(["--mock-data", "--seq-length", "64", "--train-iters", "8", "--log-interval", "3", "--log-jsonl", str(log)])
    text = capsys.readouterr().out
    assert "mesh: 1 ranks on cpu = tensor 1 x pipeline 1 x data 1" in text
    # 2 layers of 12 h^2 + 13 h, vocabulary 32 and 64 positions of h, a norm of 2 h
    assert (
        f"parameters on (tensor, pipeline) rank (0, 0): {2 * (12 * 256 + 13 * 16) + (32 + 64) * 16 + 2 * 16}\n" in text
    )
    assert reported(text) == [1, 3, 6]
    assert len(re.findall("^train: ", text, re.MULTILINE)) == 1
    assert re.findall(r"\|\n ETA: [-\d]+ [:\d]+, in [:\d]+ \| tokens left: (\d+) \|\n", text) == [
        str((8 - done) * 4 * 64) for done in (1, 3, 6)
    ]
    found = losses(log)
    assert list(found) == list(range(1, 9)) and found[8] < found[1] - 0.1, found
    assert abs(found[1] - math.log(31)) < 0.1, "an untrained model knows nothing of its 31 ids"


def test_the_log_line_averages_its_interval(
    capsys: pytest.CaptureFixture[str], data: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    trained([*data, "--train-iters", "4", "--log-interval", "2", "--log-jsonl", str(log)])
    shown = re.findall(
        r"iteration +(\d+)/ +4 \| consumed samples: +(\d+) \|.*global batch size: +4 \| lm loss: (\S+)",
        capsys.readouterr().out,
    )
    step = losses(log)
    assert [(int(a), int(b)) for a, b, _ in shown] == [(1, 4), (2, 8), (4, 16)]
    means = [step[1], step[2], (step[3] + step[4]) / 2]
    assert [float(loss) for _, _, loss in shown] == pytest.approx(means, rel=1e-6)
    assert [record["consumed_samples"] for record in records(log, "step")] == [4, 8, 12, 16]


def test_the_theoretical_memory_is_that_of_the_parameters(capsys: pytest.CaptureFixture[str], data: list[str]) -> None:
    trained([*data, "--train-iters", "1"])
    count = 2 * (12 * 256 + 13 * 16) + (32 + 16) * 16 + 2 * 16
    assert (
        f"weight and optimizer={count * 16 / 2**20:.2f} MB" in capsys.readouterr().out
    )  # weight, gradient, two moments


def test_evaluation_comes_at_its_interval_and_at_the_end(
    capsys: pytest.CaptureFixture[str], data: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    run = trained([*data, "--train-iters", "5", "--eval-interval", "2", "--eval-iters", "2", "--log-jsonl", str(log)])
    found = records(log, "validation")
    assert [(record["iteration"], record.get("final")) for record in found] == [
        (2, None),
        (4, None),
        (5, "validation"),
        (5, "test"),
    ]
    text = capsys.readouterr().out
    assert " validation loss at iteration 4 | lm loss value: " in text
    assert " validation loss at iteration 5 on test set | lm loss value: " in text
    assert run.progress.consumed_valid_samples == 2 * 2 * 4


def test_evaluations_do_not_change_the_training(data: list[str], tmp_path: Path) -> None:
    plain, evaluated = tmp_path / "plain.jsonl", tmp_path / "evaluated.jsonl"
    trained([*data, *DROPOUT, "--train-iters", "4", "--log-jsonl", str(plain)])
    trained(
        [
            *data,
            *DROPOUT,
            "--train-iters",
            "4",
            "--log-jsonl",
            str(evaluated),
            "--eval-interval",
            "1",
            "--eval-iters",
            "1",
        ]
    )
    assert losses(plain) == losses(evaluated)


def test_checkpoints_come_at_their_interval_and_at_the_end(data: list[str], tmp_path: Path) -> None:
    trained([*data, "--train-iters", "5", "--save", str(tmp_path), "--save-interval", "2"])
    assert saved(tmp_path) == [2, 4, 5]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "5"


def test_a_run_resumed_after_an_exit_gives_the_bits_of_one_that_did_not_stop(data: list[str], tmp_path: Path) -> None:
    through, stopped, folder = tmp_path / "through.jsonl", tmp_path / "stopped.jsonl", str(tmp_path / "save")
    flags = [*data, *DROPOUT, "--train-iters", "6", "--eval-interval", "2", "--eval-iters", "1"]
    whole = trained([*flags, "--log-jsonl", str(through)])
    again = [*flags, "--log-jsonl", str(stopped), "--save", folder, "--load", folder, "--exit-interval", "2"]
    for end in (2, 4, 6):
        part = trained(again)
        assert part.progress.iteration == end, "a run that resumes where it exited must get on"
    assert losses(stopped) == losses(through)
    checks = [(record["iteration"], record.get("final"), record["losses"]) for record in records(stopped, "validation")]
    assert checks == [
        (record["iteration"], record.get("final"), record["losses"]) for record in records(through, "validation")
    ]
    assert part.progress == whole.progress
    assert [record["iteration"] for record in records(stopped, "start")] == [0, 2, 4]


def test_a_finished_run_started_again_only_evaluates(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*data, "--train-iters", "2", "--eval-iters", "1", "--save", str(tmp_path), "--load", str(tmp_path)]
    trained(flags)
    first = re.findall(r"on (\w+) set \| lm loss value: (\S+)", capsys.readouterr().out)
    trained(flags)
    text = capsys.readouterr().out
    assert reported(text) == [] and re.findall(r"on (\w+) set \| lm loss value: (\S+)", text) == first


def test_the_reason_of_an_exit_is_said_and_nothing_is_evaluated(
    capsys: pytest.CaptureFixture[str], data: list[str]
) -> None:
    trained([*data, "--train-iters", "6", "--exit-interval", "3", "--eval-iters", "1"])
    text = capsys.readouterr().out
    assert "exiting program at iteration 3" in text and "validation loss" not in text


def test_iterations_to_skip_pass_over_their_data(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bytes] = []

    def watching(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
        batch = next(batches)
        seen.append(batch.tokens.numpy().tobytes())
        return pretrain_gpt.forward_step(run, iter((batch,)), stage)

    flags = [*data, "--train-iters", "4", "--log-interval", "1"]
    trained(flags, forward_step=watching)
    whole, seen[:] = list(seen), []
    log = tmp_path / "log.jsonl"
    run = trained([*flags, "--iterations-to-skip", "2", "3", "--log-jsonl", str(log)], forward_step=watching)
    assert seen == whole[:4] + whole[12:]
    assert [record["iteration"] for record in records(log, "step")] == [1, 4]
    progress = run.progress
    assert (progress.consumed_train_samples, progress.skipped_train_samples, progress.schedule_samples) == (16, 8, 8)
    assert "skipped samples:            8" in capsys.readouterr().out


def test_a_growing_batch_saves_where_it_grows(data: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    run = trained(
        [
            *data,
            "--train-samples",
            "20",
            "--rampup-batch-size",
            "2",
            "2",
            "8",
            "--global-batch-size",
            "6",
            "--save",
            str(tmp_path),
            "--log-jsonl",
            str(log),
        ]
    )
    # by hand: 2 samples until 4, 4 until 8, then 6
    assert [record["batch_size"] for record in records(log, "step")] == [2, 2, 4, 6, 6]
    assert saved(tmp_path) == [2, 3, 5]
    assert run.progress.consumed_train_samples == 20


def test_skip_train_evaluates_a_checkpoint_and_touches_nothing(data: list[str], tmp_path: Path) -> None:
    folder, log = tmp_path / "save", tmp_path / "log.jsonl"
    # Many evaluations: what they consumed must not be missing now.
    trained([*data, "--train-iters", "6", "--eval-interval", "1", "--eval-iters", "4", "--save", str(folder)])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "run_log.jsonl"}
    trained(
        [
            *data,
            "--skip-train",
            "--eval-iters",
            "4",
            "--load",
            str(folder),
            "--save",
            str(folder),
            "--log-jsonl",
            str(log),
        ]
    )
    assert [(record["iteration"], record["final"]) for record in records(log, "validation")] == [
        (6, "validation"),
        (6, "test"),
    ]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "run_log.jsonl"} == before


def test_finetune_takes_the_weights_and_starts_at_zero(data: list[str], tmp_path: Path) -> None:
    folder, fresh, tuned = tmp_path / "save", tmp_path / "fresh.jsonl", tmp_path / "tuned.jsonl"
    trained([*data, "--train-iters", "8", "--save", str(folder), "--log-jsonl", str(fresh)])
    run = trained([*data, "--train-iters", "2", "--finetune", "--load", str(folder), "--log-jsonl", str(tuned)])
    assert run.progress.iteration == 2 and run.progress.consumed_train_samples == 8
    assert losses(tuned)[1] < losses(fresh)[1] - 0.1, "the weights were not taken over"


def test_progress_is_noted_beside_the_checkpoints(data: list[str], tmp_path: Path) -> None:
    flags = [
        *data,
        "--train-iters",
        "4",
        "--save",
        str(tmp_path),
        "--load",
        str(tmp_path),
        "--save-interval",
        "2",
        "--log-progress",
    ]
    trained([*flags, "--exit-interval", "2"])
    trained(flags)
    lines = [line.split("\t") for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert [(line[3], line[4]) for line in lines] == [
        ("Starting job", "Iteration: 0"),
        ("Saved checkpoint", "Iteration: 2"),
        ("Starting job", "Iteration: 2"),
        ("Saved checkpoint", "Iteration: 4"),
    ]
    assert lines[0][2] == "# GPUs: 1"
    # Megatron's formula for one token of this network, for 4 iterations of 4 samples of 16 tokens
    per_token = 2 * (6 * 12 * 16 * 16 + 6 * 16 * 16) + 6 * 16 * 32
    assert lines[-1][6] == f"Floating-point operations: {per_token * 16 * 16:.2e}"


def test_a_run_trains_and_saves_among_pipes_links_that_loop_and_full_disks(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("run_log.jsonl", "progress.txt", "latest_checkpointed_iteration.txt", "iter_0000002", "metadata.json")
    for name in names:
        os.mkfifo(tmp_path / name)
    for name in ("loop", "iter_0000001", "iter_0000003.old", "config.json"):
        (tmp_path / name).symlink_to(tmp_path / name)
    flags = [
        *data,
        "--save",
        str(tmp_path),
        "--log-progress",
        "--log-jsonl",
        "/dev/full",
        "--save-interval",
        "1",
        "--log-interval",
        "1",
    ]
    with pytest.raises(CheckpointError, match="names a checkpoint, but"):
        trained([*flags, "--load", str(tmp_path), "--train-iters", "2"])
    trained([*flags, "--train-iters", "2"])
    assert saved(tmp_path) == [1, 2] and checkpoint_folders.tracker_iteration(tmp_path) == 2
    capsys.readouterr()
    trained([*flags, "--load", str(tmp_path), "--train-iters", "3", "--override-opt-param-scheduler"])
    assert saved(tmp_path) == [1, 2, 3]
    said = capsys.readouterr().out
    assert said.count("--log-jsonl /dev/full cannot be written: No space left on device; the run goes on") == 1
    assert "the run log" in said and "lm loss" in said and "NOT SAVED" not in said


def test_tensorboard_gets_the_curves(data: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    trained(
        [
            *data,
            "--train-iters",
            "3",
            "--eval-interval",
            "2",
            "--eval-iters",
            "1",
            "--tensorboard-dir",
            str(tmp_path / "board"),
            "--log-jsonl",
            str(log),
        ]
    )
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    points = {point.step: point.value for point in board.Scalars("lm loss")}
    assert points == pytest.approx(losses(log), rel=1e-6)
    assert [point.step for point in board.Scalars("lm loss validation")] == [2]


def spoiled(at: int) -> ForwardStep:
    """pretrain_gpt's forward step, whose loss is no number in one iteration."""

    def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
        output, loss = pretrain_gpt.forward_step(run, batches, stage)
        return (output * float("nan") if run.progress.iteration + 1 == at else output), loss

    return forward_step


def test_a_loss_that_is_no_number_stops_the_run_before_anything_is_saved(data: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(NonFiniteError, match="lm loss is nan in iteration 3"):
        trained(
            [
                *data,
                "--train-iters",
                "8",
                "--save",
                str(tmp_path),
                "--save-interval",
                "2",
                "--log-jsonl",
                str(log),
                "--tensorboard-dir",
                str(tmp_path / "board"),
            ],
            forward_step=spoiled(3),
        )
    assert saved(tmp_path) == [2]
    assert losses(log)[3] == "nan", "the log shows what happened"
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [point.step for point in board.Scalars("lm loss")] == [1, 2, 3, 4], "the last points are not lost"


def test_a_loss_that_is_no_number_is_let_through_on_demand(data: list[str]) -> None:
    flags = [*data, "--train-iters", "3", "--no-check-for-nan-in-loss-and-grad"]
    assert trained(flags, forward_step=spoiled(2)).progress.iteration == 3


def test_a_profile_is_a_trace_of_its_window(data: list[str], tmp_path: Path) -> None:
    trained(
        [
            *data,
            "--train-iters",
            "3",
            "--profile",
            "--profile-step-start",
            "1",
            "--profile-step-end",
            "2",
            "--tensorboard-dir",
            str(tmp_path),
        ]
    )
    (trace,) = tmp_path.glob("profile_rank0_iterations1-2.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("AdamW" in str(name) or "adamw" in str(name) for name in names), "the step's update is in the trace"


def test_a_training_split_without_data_is_refused(data: list[str]) -> None:
    with pytest.raises(DataError, match="training split holds no data"):
        trained([*data, "--split", "0,50,50", "--train-iters", "2"])


def test_data_that_ends_early_is_named(data: list[str]) -> None:
    def short(run: RunContext, counts: tuple[int, int, int]) -> Any:
        train, valid, test = pretrain_gpt.datasets_provider(run, counts)
        return [train[index] for index in range(10)], valid, test

    with pytest.raises(DataError, match="the data ended before the run did"):
        trained([*data, "--train-iters", "4"], datasets=short)
    with pytest.raises(DataError, match="the data ended before the run did"):
        trained([*data, "--train-iters", "4", "--iterations-to-skip", "3"], datasets=short)


def test_timers_are_shown_per_iteration(data: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trained([*data, "--train-iters", "2", "--log-interval", "2", "--timing-log-level", "2"])
    text = capsys.readouterr().out
    for name in ("forward-backward", "all-grads-sync", "optimizer", "batch-generator", "forward-compute"):
        assert re.search(rf"^ +{name} \.+: \(", text, re.MULTILINE), f"{name} is not among the timers:\n{text}"


def test_a_run_of_plain_layers_imports_neither_the_compiler_nor_sharded_tensors() -> None:
    code = (
        "import sys; from tests.helpers.programme import trained; trained(['--mock-data', '--train-iters', '2']); "
        "print('imported:', *({'torch._dynamo', 'torch.distributed.tensor', 'sympy', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "imported:", done.stdout + done.stderr
