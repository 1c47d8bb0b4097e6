"""Steps with a bad result that are run again: a transient error, a persistent one and a correct result are told apart."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.core.models.gpt import GPTModel
from megatron.training.health import rerun
from megatron.training.health.rerun import (
    ResultRejectedError,
    StepRerun,
    iterations_rejected_twice,
    symmetric_relative_difference,
)
from megatron.training.state.batch import Batch, LossFunction
from megatron.training.state.run import RunContext
from tests.helpers import tiny
from tests.helpers.programme import TINY, trained, write_tokens
from tests.helpers.world import Worlds
from tests.unit.training.test_bad_steps import not_a_number, same, spoiling, weights

ROOT = Path(__file__).resolve().parents[3]
RERUN = [
    "--rerun-mode",
    "validate_results",
    "--train-iters",
    "6",
    "--hidden-dropout",
    "0.1",
    "--attention-dropout",
    "0.1",
]


def spoiled_always(iteration: int) -> Callable[..., tuple[Tensor, LossFunction]]:
    """Megatron's forward step, whose output in one iteration is NaN, however often it is run."""

    def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[Tensor, LossFunction]:
        output, loss = pretrain_gpt.forward_step(run, batches, stage)
        return (output * math.nan if stage.training and run.progress.iteration + 1 == iteration else output), loss

    return forward_step


def classifications(folder: Path) -> list[str]:
    """What the run log says of steps that were run again."""
    events = [json.loads(line) for line in (folder / "run_log.jsonl").read_text().splitlines()]
    return [event["classification"] for event in events if event["event"] == "rerun"]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return [*RERUN, *write_tokens(tmp_path / "text"), "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]


@pytest.fixture
def undisturbed(tmp_path: Path) -> Callable[[], dict[str, Tensor]]:
    """The weights of the run without any bad step."""

    def train() -> dict[str, Tensor]:
        trained(
            [*RERUN, "--rerun-mode", "disabled", *write_tokens(tmp_path / "text"), "--save", str(tmp_path / "plain")]
        )
        return weights(tmp_path / "plain")

    return train


def test_a_transient_error_that_a_run_goes_on_after_leaves_no_trace(
    flags: list[str], tmp_path: Path, undisturbed: Callable[[], dict[str, Tensor]]
) -> None:
    run = trained([*flags, "--on-bad-step", "skip"], forward_step=spoiling(4, not_a_number))
    assert classifications(tmp_path / "run") == ["transient_error"]
    assert run.progress.skipped_train_samples == 0 and same(weights(tmp_path / "run"), undisturbed())


def test_a_transient_error_ends_a_run_which_goes_on_when_it_is_started_again(
    flags: list[str], tmp_path: Path, undisturbed: Callable[[], dict[str, Tensor]]
) -> None:
    with pytest.raises(ResultRejectedError, match="a transient error of rank 0 ") as ended:
        trained(flags, forward_step=spoiling(4, not_a_number))
    assert ended.value.exit_code == 17
    assert trained(flags).progress.iteration == 6
    assert same(weights(tmp_path / "run"), undisturbed())


def test_a_persistent_error_is_found_on_other_devices(
    flags: list[str], tmp_path: Path, undisturbed: Callable[[], dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResultRejectedError, match="start the run again on other devices than rank 0") as ended:
        trained(flags, forward_step=spoiled_always(4))
    assert ended.value.exit_code == 16
    with pytest.raises(ResultRejectedError, match="this restart uses the same devices") as ended:
        trained(flags)
    assert ended.value.exit_code == 16
    monkeypatch.setattr(rerun, "host_and_device", lambda device: ("elsewhere", device))
    with pytest.raises(ResultRejectedError, match="a persistent error of rank 0") as ended:
        trained(flags)
    assert ended.value.exit_code == 17
    assert trained(flags).progress.iteration == 6
    assert same(weights(tmp_path / "run"), undisturbed())
    assert classifications(tmp_path / "run") == ["run it on other devices"] * 2 + ["persistent_error"]


def test_a_result_that_comes_again_on_other_devices_is_the_correct_one(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResultRejectedError):
        trained(flags, forward_step=spoiled_always(4))
    monkeypatch.setattr(rerun, "host_and_device", lambda device: ("elsewhere", device))
    for expected in ("on other devices it gave the same result", "as it did on other devices before"):
        with pytest.raises(ResultRejectedError, match=expected) as ended:
            trained(flags, forward_step=spoiled_always(4))
        assert ended.value.exit_code == 17
    assert classifications(tmp_path / "run") == ["run it on other devices", "correct_result", "correct_result"]
    assert (
        trained([*flags, "--on-bad-step", "skip"], forward_step=spoiled_always(4)).progress.skipped_train_samples == 4
    )


@pytest.mark.parametrize(
    "kind, codes, classification",
    [
        ("transient_error", [17], "transient_error"),
        ("persistent_error", [16, 17], "persistent_error"),
        ("correct_result", [16, 17], "correct_result"),
    ],
)
def test_an_injected_error_gets_the_verdict_of_its_kind(
    kind: str, codes: list[int], classification: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected = [*flags, "--error-injection-rate", "3", "--error-injection-type", kind]
    for number, code in enumerate(codes):
        monkeypatch.setattr(rerun, "host_and_device", lambda device, number=number: (f"node{number}", device))
        with pytest.raises(ResultRejectedError) as ended:
            trained(injected)
        assert ended.value.exit_code == code
    assert classifications(tmp_path / "run")[-1] == classification


def test_every_step_is_run_twice_for_statistics_and_trains_as_before(
    flags: list[str], tmp_path: Path, undisturbed: Callable[[], dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    trained([*flags, "--rerun-mode", "report_stats", "--log-interval", "3"])
    said = capsys.readouterr().out
    # a loss for each of 4 microbatches, their mean, the gradient of a bucket and the norm; reports after steps 1, 3 and 6
    assert [line.rpartition("determinism: ")[2] for line in said.splitlines() if "determinism: " in line] == [
        f"of {7 * steps} results computed twice, {7 * steps} were equal" for steps in (1, 2, 3)
    ]
    assert same(weights(tmp_path / "run"), undisturbed())


def test_iterations_that_were_rejected_twice_are_passed_over(flags: list[str], tmp_path: Path) -> None:
    tracker = ["--result-rejected-tracker-filename", str(tmp_path / "rejected.txt")]
    for _ in range(2):
        with pytest.raises(ResultRejectedError):
            trained([*flags, *tracker], forward_step=spoiled_always(4))
        (tmp_path / "run" / "rerun.json").unlink()
    lines = (tmp_path / "rejected.txt").read_text().splitlines()
    assert [line.partition("status=")[2].split()[0] for line in lines] == [
        "initial_run",
        "first_rerun_reproducible",
    ] * 2
    assert iterations_rejected_twice(str(tmp_path / "rejected.txt")) == {4}
    assert trained([*flags, *tracker], forward_step=spoiled_always(4)).progress.skipped_train_samples == 4


def test_a_tracker_file_of_megatron_is_read(tmp_path: Path) -> None:
    line = "ts=2026-01-01 00:00:00 node=n1 device=0 jobID={} rank={} iteration={} status=RerunValidationStatus.{} result=nan message='NaN'\n"
    rows = [
        ("7", 1, 5, "RERUN_DISABLED"),
        ("8", 1, 5, "SECOND_RERUN_REPRODUCIBLE"),  # twice on rank 1
        ("7", 0, 6, "FIRST_RERUN_REPRODUCIBLE"),
        ("7", 1, 6, "FIRST_RERUN_REPRODUCIBLE"),
        ("8", 1, 6, "RERUN_DISABLED"),  # two ranks of a job
        ("7", 1, 9, "INITIAL_RUN"),
        ("8", 1, 9, "INITIAL_RUN"),
        ("7", 2, 11, "RERUN_DISABLED"),
    ]
    (tmp_path / "file").write_text("no such line\n" + "".join(line.format(*row) for row in rows))
    assert iterations_rejected_twice(str(tmp_path / "file")) == {5}
    assert iterations_rejected_twice(str(tmp_path / "nothing")) == set()


def test_differences_are_relative_and_know_what_is_not_finite() -> None:
    assert (
        symmetric_relative_difference(math.nan, math.nan)
        == symmetric_relative_difference(math.inf, math.inf)
        == symmetric_relative_difference(2.0, 2.0)
        == 0
    )
    assert (
        symmetric_relative_difference(math.nan, 1.0)
        == symmetric_relative_difference(1.0, math.inf)
        == symmetric_relative_difference(-math.inf, math.inf)
        == math.inf
    )
    assert symmetric_relative_difference(1.0, 3.0) == 1.0


def disturbed(changes: dict[str, int], kind: str) -> tuple[str, list[str], list[float]]:
    """On every rank: two steps of three with an injected error; the last classification, the ranks that are suspected, and losses."""
    settings = tiny.config(
        torch.distributed.get_world_size(),
        on_bad_step="skip",
        error_injection_rate=1,
        error_injection_type=kind,
        **changes,
    )
    trainer = tiny.trainer_of(tiny.run_of(settings))
    again = StepRerun(trainer)
    trainer.add_hook(again)
    steps = [again.train_step_checked(tiny.short_run_batches(trainer.run, number)) for number in range(2)]
    assert again.known is not None
    return (
        again.known.classification,
        [one.rank for one in again.known.witnesses if one.suspicious],
        [float(step.grad_norm) for step in steps],
    )


@pytest.mark.parametrize(
    "changes, suspects", [({"tensor_model_parallel_size": 2}, 2), ({"pipeline_model_parallel_size": 2}, 1), ({}, 1)]
)
def test_ranks_agree_on_a_verdict_and_on_whose_result_was_bad(
    world: Worlds, changes: dict[str, int], suspects: int
) -> None:
    found = world(2).run(disturbed, changes, "transient_error")
    assert {classification for classification, _, _ in found} == {"transient_error"} and len(
        {tuple(ranks) for _, ranks, _ in found}
    ) == 1
    assert len(found[0][1]) == suspects, found[0][1]
    assert all(math.isfinite(norm) for norm in found[0][2]), "the second pass was used"


@pytest.mark.slow
def test_the_exit_code_reaches_the_shell(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            str(ROOT / "pretrain_gpt.py"),
            *TINY,
            "--mock-data",
            "--train-iters",
            "3",
            "--error-injection-rate",
            "1",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 17, ended.stderr
    assert "a transient error of rank 0" in ended.stderr and "Traceback" not in ended.stderr
