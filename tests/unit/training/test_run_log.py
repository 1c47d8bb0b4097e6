"""The run log of a run: what it says, that it outlives what happens to it, and that it never ends a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets import sidecar
from megatron.training.health.exit_conditions import NonFiniteError
from megatron.training.hooks import run_record as recording
from megatron.training.launch.launch_info import recorded_environment_variables
from megatron.training.report.run_log import RunLog, read_run_log_events
from tests.helpers.programme import trained, write_tokens


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_a_run_and_its_going_on_leave_one_ledger(tmp_path: Path) -> None:
    data, save, log = write_tokens(tmp_path / "walks"), str(tmp_path / "save"), tmp_path / "log.jsonl"
    (tmp_path / "run.yaml").write_text("optimizer:\n  adam_beta2: 0.95\n  lr: 5.0e-3\n")
    flags = [
        *data,
        "--yaml-cfg",
        str(tmp_path / "run.yaml"),
        "--train-iters",
        "5",
        "--lr",
        "4e-3",
        "--log-interval",
        "2",
        "--save",
        save,
        "--load",
        save,
        "--log-jsonl",
        str(log),
        "--sequence-parallel",
    ]
    trained([*flags, "--exit-interval", "3"])
    trained(flags)
    events = read_run_log_events(save)
    first, second = of_kind(events, "start")
    origins = first["origins"]
    assert origins["lr"] == "command line" and origins["adam_beta2"] == "file", origins
    assert origins["sequence_parallel"] == "derived" and "min_lr" not in origins, (
        "one rank cuts no sequence; min_lr is a default"
    )
    assert first["settings"]["lr"] == 4e-3 and first["settings"]["adam_beta2"] == 0.95
    records = [json.loads(line) for line in log.read_text().splitlines()]
    told = {record["iteration"]: record for record in records if record["kind"] == "step"}
    found = {
        step: (loss, norm)
        for event in of_kind(events, "steps")
        for step, loss, norm in zip(event["iterations"], event["losses"]["lm loss"], event["grad_norm"])
    }
    assert found == {step: (record["losses"]["lm loss"], record["grad_norm"]) for step, record in told.items()}, (
        "not the whole precision"
    )
    assert [event["iteration"] for event in of_kind(events, "loaded")] == [3]
    assert [event["iteration"] for event in of_kind(events, "checkpoint")] == [3, 5]
    assert [event["reason"] for event in of_kind(events, "end")] == [
        "exiting program at iteration 3 (--exit-interval 3)",
        "complete",
    ]
    assert second["number"] == 2 and not of_kind(events, "layout")
    sums = sidecar.read_sidecar(tmp_path / "walks").checksums
    assert first["data"][str(tmp_path / "walks")]["checksums"] == dict(sums) and sums
    assert first["tokenizer"]["hash"] and first["code"]["sources"] == second["code"]["sources"]


def test_a_data_file_that_changed_at_its_end_is_seen_without_a_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_END_BYTES", 64)
    data = write_tokens(tmp_path / "walks")
    (tmp_path / "walks.json").unlink()
    hashes = []
    for name in ("a", "b"):
        trained([*data, "--train-iters", "1", "--run-log", str(tmp_path / name)])
        hashes.append(read_run_log_events(tmp_path / name)[0]["data"][str(tmp_path / "walks")])
        content = bytearray((tmp_path / "walks.bin").read_bytes())
        content[-2] ^= 1
        (tmp_path / "walks.bin").write_bytes(content)
    assert hashes[0][".idx"] == hashes[1][".idx"] and hashes[0][".bin"]["bytes"] == hashes[1][".bin"]["bytes"]
    assert hashes[0][".bin"]["ends"] != hashes[1][".bin"]["ends"]


def test_a_run_that_fails_says_why_and_keeps_the_steps_until_then(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError):
        trained(
            [
                "--mock-data",
                "--train-iters",
                "4",
                "--lr",
                "1e30",
                "--clip-grad",
                "0",
                "--run-log",
                str(tmp_path / "run log"),
            ]
        )
    events = read_run_log_events(tmp_path / "run log")
    assert "NonFiniteError" in events[-1]["reason"] and events[-1]["failed"], events[-1]
    assert any("nan" in event["losses"]["lm loss"] for event in of_kind(events, "steps")), (
        "the step that failed is not in the run log"
    )


def test_a_ledger_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    run = trained(["--mock-data", "--train-iters", "2", "--run-log", str(tmp_path / "file" / "run_log.jsonl")])
    assert run.progress.iteration == 2
    assert capsys.readouterr().out.count("cannot be written") == 1


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "run_log.jsonl"
    run_log = RunLog(path)
    run_log.add("start", number=1)
    with open(path, "ab") as file:
        file.write(b'{"event": "ste')  # the process was killed here
    run_log.add("end", reason="complete", loss=float("nan"), nothing=None)
    assert [event["event"] for event in read_run_log_events(tmp_path)] == ["start", "end"]
    assert read_run_log_events(path)[1]["loss"] == "nan" and "nothing" not in read_run_log_events(path)[1]


def test_iterations_whose_data_is_passed_over_are_told(tmp_path: Path) -> None:
    trained(["--mock-data", "--train-iters", "3", "--iterations-to-skip", "2", "--run-log", str(tmp_path / "run log")])
    assert [
        (event["iteration"], event["samples"]) for event in of_kind(read_run_log_events(tmp_path / "run log"), "skip")
    ] == [(2, 4)]


def test_no_secret_of_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        f"{family}_{word}"
        for family in (
            "TORCH",
            "CUDA",
            "SLURM",
            "NCCL",
            "NVIDIA",
            "MEGATRON",
            "PYTORCH",
            "TORCHELASTIC",
            "AWS",
            "WANDB",
        )
        for word in (
            "AUTH",
            "COOKIE",
            "CRED",
            "JWT",
            "API_TOKEN",
            "API_KEY",
            "SECRET_ACCESS_KEY",
            "PW",
            "BEARER",
            "DEBUG_AUTH",
        )
    }
    for name in ("NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONHASHSEED", "HOME", *secrets):
        monkeypatch.setenv(name, "1")
    told = recorded_environment_variables()
    assert {"NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONHASHSEED"} <= told.keys() and not {"HOME", *secrets} & told.keys()
