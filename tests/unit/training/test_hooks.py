"""The hooks of a run: their order, what each is called for, and hooks that a script brings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.training.hooks.default import default_hooks
from megatron.training.state.hooks import StepHooks
from tests.helpers import tiny
from tests.helpers.programme import trained, write_tokens

EVERY_KIND = {
    "iterations_to_skip": (3,),
    "check_weight_hash_across_dp_replicas_interval": 2,
    "empty_unused_memory_level": 1,
    "log_straggler": True,
    "eval_generate": "prompts.txt",
    "log_progress": True,
}


def test_the_hooks_of_a_run_have_this_order(tmp_path: Path) -> None:
    run = tiny.run_of(tiny.config(save=str(tmp_path), **EVERY_KIND))
    hooks = default_hooks(tiny.trainer_of(run), samples=lambda run: lambda stages: [])
    assert [type(hook).__name__ for hook in hooks] == [
        "IterationsToSkip",
        "ReplicaCheck",
        "MemoryRelease",
        "IntervalLog",
        "StragglerDetector",
        "Evaluation",
        "OnlineEvaluation",
        "Saving",
        "ProgressFile",
    ]


def test_a_run_has_no_hooks_that_it_did_not_ask_for() -> None:
    hooks = default_hooks(tiny.trainer_of(tiny.run_of(tiny.config())))
    assert [type(hook).__name__ for hook in hooks] == ["IntervalLog", "Evaluation", "Saving"]


def test_what_comes_between_two_steps_is_said_in_the_order_of_the_hooks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("3 4\n")
    flags = (
        "--train-iters 3 --log-interval 2 --eval-interval 2 --eval-iters 1 --save-interval 2 --no-async-save --log-straggler "
        f"--save {tmp_path / 'save'} --save-best loss --eval-generate {tmp_path / 'prompts.txt'} --eval-generate-tokens 2"
    ).split()
    trained([*write_tokens(tmp_path / "text"), *flags])
    lines = {
        r"\] iteration +(\d)/": "line",
        r"straggler: ": "stragglers",
        r"validation loss at iteration (\d) \|": "validation",
        r"validation loss at iteration (\d) on (\w+)": "at the end",
        r"iteration (\d) is the best": "best",
        r"sample 1 at iteration (\d)": "sample",
        r"saved checkpoint .*iter_000000(\d)": "saved",
    }
    said = [
        " ".join([name, *match.groups()])
        for line in capsys.readouterr().out.splitlines()
        for pattern, name in lines.items()
        if (match := re.search(pattern, line))
    ]
    first, second = ["line 1", "stragglers"], ["line 2", "stragglers", "validation 2", "best 2", "saved 2", "sample 2"]
    assert said[: len(first + second)] == first + second
    # The last checkpoint is safe before prompts are continued and the splits are evaluated.
    last = [line for line in said[len(first + second) :] if not line.startswith("best")]
    assert last == ["saved 3", "sample 3", "at the end 3 validation", "at the end 3 test"]


class CallRecorder(StepHooks):
    """Writes down what it is called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_run(self, session: Any) -> None:
        """As the base class says."""
        self.calls.append(f"begin at {session.trainer.progress.iteration}")

    def reason_to_skip(self, iteration: int) -> str:
        """The second iteration is passed over."""
        return "--a-flag-of-mine" if iteration == 2 else ""

    def begin_step(self, work: Any) -> None:
        """As the base class says."""
        self.calls.append("step")

    def after_iteration(self, session: Any) -> None:
        """As the base class says."""
        self.calls.append(f"after {session.trainer.progress.iteration}, due {session.is_due(2)}")

    def interval_line(self, steps: int) -> str:
        """As the base class says."""
        return f"a line of mine, of {steps} steps"

    def before_save(self) -> None:
        """As the base class says."""
        self.calls.append("before a save")

    def after_save(self, outcome: Any) -> None:
        """As the base class says."""
        self.calls.append(f"saved {outcome.iteration}")

    def end_run(self, session: Any, reason: str) -> None:
        """As the base class says."""
        self.calls.append(f"end, {reason or 'complete'}")


def test_a_script_brings_hooks_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recorder = CallRecorder()
    flags = ["--mock-data", "--train-iters", "3", "--log-interval", "3", "--save", str(tmp_path), "--no-async-save"]
    run = trained(flags, hooks=[recorder])
    assert recorder.calls == [
        *("begin at 0", "step", "after 1, due False", "after 2, due True", "step", "after 3, due False"),
        # The opposite order: a hook that was added last ends first.
        *("end, complete", "before a save", "saved 3"),
    ]
    assert run.progress.skipped_train_samples == 4
    assert re.findall("a line of mine, of (.) steps", capsys.readouterr().out) == ["1", "1"]
