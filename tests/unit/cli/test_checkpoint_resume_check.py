"""megatron checkpoint resume-check: it passes a run that resumes exactly, and names whatever piece of state is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.commands.checkpoint import resume_check
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.optimizer.scaler import LossScaler
from megatron.core.parallel.rng import RandomStreams
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.verify.compare.contents import matches_pattern
from megatron.verify.state_inventory import INVENTORY, OTHER_STATE, StateCategory
from tests.helpers.architecture import ROOT
from tests.helpers.programme import TINY, trained

STEPS = 3
FLAGS = [
    *TINY,
    *(
        "--mock-data --train-iters 9 --hidden-dropout 0.2 --fp16 --initial-loss-scale 131072 --loss-scale-window 5 --hysteresis 1 "
        "--lr-decay-style cosine --lr-warmup-iters 2"
    ).split(),
]


class RanksHere:
    """In place of processes: the run goes to its end in this one, so that parts of it can be broken."""

    def __init__(self, command: list[str], count: int, output: Path) -> None:
        self.failure = ""
        assert count == 1
        try:
            trained(command[2 + len(TINY) :])
        except Exception as error:  # noqa: BLE001 - what a process would have died of
            self.failure = str(error)

    def __enter__(self) -> RanksHere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def codes(self) -> list[int | None]:
        return [int(bool(self.failure))]

    def kill(self) -> None:
        pass

    def wait_for_success(self, what: str) -> None:
        if self.failure:
            raise resume_check.CheckedRunFailed(f"{what} failed: {self.failure}")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Runs take place in this process."""
    monkeypatch.setattr(resume_check, "RankProcesses", RanksHere)
    return monkeypatch


def checked(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[bool, dict[str, str], str]:
    """Whether the tool is content; item -> its row; all that it printed."""
    capsys.readouterr()
    code: Any = 0
    try:
        resume_check.main(["--steps", str(STEPS), *FLAGS, *more])
    except SystemExit as leaving:
        code = leaving.code
    out = capsys.readouterr().out
    assert code in (0, 1), out
    rows = {
        item.what: line.removeprefix(item.what)
        for item in INVENTORY
        for line in out.splitlines()
        if line.startswith(item.what)
    }
    assert rows.keys() == {item.what for item in INVENTORY}, out
    return code == 0, rows, out


# Of other update rules, formats and kinds of runs.
ELSEWHERE = ("SGD", "Muon", "Adafactor", "soap", "delayed", "lack", "script")
SAVED = [item for item in INVENTORY if not any(word in item.what for word in ELSEWHERE)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The straight run and the killed one, for tests that break only what comes after them."""
    work = tmp_path_factory.mktemp("runs")
    plan = resume_check.ResumeCheckPlan(ROOT / "pretrain_gpt.py", tuple(FLAGS), 1, STEPS, work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_check, "RankProcesses", RanksHere)
        resume_check.run_uninterrupted(plan)
        resume_check.run_and_kill(plan)
    return work


@pytest.fixture
def resumed_here(here: pytest.MonkeyPatch, runs: Path) -> pytest.MonkeyPatch:
    """Only the resumed run takes place."""
    for function, name in (("run_uninterrupted", "straight"), ("run_and_kill", "killed")):
        here.setattr(
            resume_check, function, lambda plan, name=name: Path(shutil.copytree(runs / name, plan.work / name))
        )
    return here


def names(rows: dict[str, str], word: str) -> set[str]:
    """Items whose row holds a word."""
    return {what for what, row in rows.items() if word in row}


def test_a_run_that_is_really_killed_resumes_to_the_last_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal, rows, out = checked(capsys, "--workdir", str(tmp_path / "work"))
    assert equal and "bit for bit" in out, out
    assert all(
        row.split()[-2:] == ["equal", "equal"] for what, row in rows.items() if what in {item.what for item in SAVED}
    ), out
    assert all("this run has none" in rows[item.what] for item in INVENTORY if item not in SAVED)
    assert "loaded checkpoint" in (tmp_path / "work" / "resumed.log").read_text()


@pytest.mark.parametrize("item", SAVED, ids=lambda item: item.what)
def test_an_item_that_is_taken_out_of_the_checkpoint_is_named(
    resumed_here: pytest.MonkeyPatch, item: StateCategory, capsys: pytest.CaptureFixture[str]
) -> None:
    equal, rows, out = checked(capsys, "--without", *item.names)
    assert not equal and names(rows, "MISSING") == {item.what}, out


@pytest.mark.parametrize("item", SAVED[2::3], ids=lambda item: item.what)
def test_an_item_that_is_never_saved_is_named(
    here: pytest.MonkeyPatch, item: StateCategory, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Checkpointer.state_to_save
    here.setattr(
        Checkpointer,
        "state_to_save",
        lambda self: {name: value for name, value in real(self).items() if not matches_pattern(name, item.names)},
    )
    equal, rows, out = checked(capsys)
    assert not equal and names(rows, "MISSING") == {item.what}, out


@pytest.mark.parametrize(
    "owner, method, item",
    [
        (LossScaler, "load", "loss scale"),
        (RandomStreams, "load", "random streams"),
        (Optimizer, "load_num_steps", "updates done"),
    ],
)
def test_an_item_that_is_saved_and_not_restored_is_named(
    resumed_here: pytest.MonkeyPatch, owner: type, method: str, item: str, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed_here.setattr(owner, method, lambda self, state: None)
    equal, rows, out = checked(capsys)
    assert not equal and item in names(rows, "DIFFER") and not names(rows, "MISSING"), out
    assert rows[item].split()[1] == "equal"  # at the moment of the kill


def test_state_that_no_item_knows_is_refused_by_name_though_both_runs_hold_it_alike(
    here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Checkpointer.state_to_save

    def with_more(self: Checkpointer) -> dict[str, Any]:
        """With another slot of the optimizer, and the position of a hook; nobody would miss them in a checkpoint without."""
        state = real(self)
        slots = {name: value for name, value in state.items() if name.startswith("optimizer.exp_avg.")}
        return {**state, "run.prompts": 7, **{name.replace("exp_avg", "exp_inf"): slots[name] for name in slots}}

    here.setattr(Checkpointer, "state_to_save", with_more)
    equal, rows, out = checked(capsys)
    assert not equal and not names(rows, "DIFFER") and not names(rows, "MISSING"), out
    (line,) = (line for line in out.splitlines() if line.startswith(OTHER_STATE))
    assert line.split()[-1] == line.split()[-3] == "UNKNOWN" and int(line.split()[-2]) > 8, out
    assert f"{OTHER_STATE}: optimizer.exp_inf." in out and "is in no item of the inventory" in out


def test_flags_that_the_tool_sets_and_runs_that_are_too_short_are_refused(
    here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code in (
        (["--save", "x"], 2),
        (["--steps", "0"], 2),
        (["--entry", "nothing.py"], 2),
        (["--steps", "8", *FLAGS], 2),
    ):
        with pytest.raises(SystemExit) as left:
            resume_check.main(arguments)
        assert left.value.code == code
    assert "its flags end it earlier" in capsys.readouterr().err
