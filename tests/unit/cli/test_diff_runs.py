"""The comparison of two runs: the step in which they part, and the ranks of what differs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.core.config.flags.declare import flag_fields
from megatron.core.config.settings.run import RequestedRun
from megatron.training.report.run_log import RunLog
from megatron.verify.compare.runs import BEYOND, LAST_BITS, REPORTS, affected_area_by_setting
from tests.helpers.programme import trained

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.diff_runs")


def asked(tool: ModuleType, capsys: pytest.CaptureFixture[str], *argv: Path | str) -> tuple[int, Any]:
    """(exit code, the JSON report)."""
    with pytest.raises(SystemExit) as leaving:
        tool.main([*map(str, argv), "--json"])
    return leaving.value.code, json.loads(capsys.readouterr().out)


def write(path: Path, losses: dict[int, float], *, loaded: int | None = None, **given: Any) -> Path:
    """A run log made by hand; another start is added to one that is there."""
    run_log = RunLog(path)
    run_log.add("start", **given)
    if loaded is not None:
        run_log.add("loaded", iteration=loaded)
    run_log.add("steps", iterations=list(losses), losses={"lm loss": list(losses.values())})
    return path


LOSSES = {1: 3.0, 2: 2.5, 3: 2.25, 4: 2.125}
EVERYTHING = {
    "settings": {"lr": 1e-3, "seed": 1, "bf16": True, "save": "a", "num_layers": 2},
    "origins": {"lr": "command line"},
    "data": {"x": {"checksums": {"bin": "1"}}},
    "tokenizer": {"hash": "1"},
    "code": {"sources": "1", "commit": "1"},
    "layout": {"ranks": 1},
    "environment": {"torch": "2", "hosts": {"a": 1}, "variables": {"NCCL_ALGO": "Ring"}},
}
OTHERWISE = {
    "settings": {"lr": 2e-3, "seed": 2, "bf16": False, "save": "b", "num_layers": 3},
    "origins": {"lr": "file"},
    "data": {"x": {"checksums": {"bin": "2"}}},
    "tokenizer": {"hash": "2"},
    "code": {"sources": "2", "commit": "2"},
    "layout": {"ranks": 2},
    "environment": {"torch": "3", "hosts": {"b": 1}, "variables": {"NCCL_ALGO": "Tree"}},
}


def test_two_runs_of_one_command_are_equal_and_another_rate_is_the_first_suspect(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    for name, rate in (("a", "1e-2"), ("b", "1e-2"), ("c", "2e-2")):
        trained(["--mock-data", "--train-iters", "3", "--lr", rate, "--run-log", str(tmp_path / name)])
    capsys.readouterr()
    code, same = asked(tool, capsys, tmp_path / "a", tmp_path / "b")
    assert code == 0 and same["common"] == [1, 2, 3] and "first" not in same and not same["inputs"], same
    code, other = asked(tool, capsys, tmp_path / "a", tmp_path / "c")
    assert code == 1 and other["first"]["iteration"] == 2, "the first step begins with equal weights"
    assert [(one["name"], one["a"], one["b"]) for one in other["inputs"]] == [("--lr", 1e-2, 2e-2)]
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path / "a"), str(tmp_path / "c")])
    text = capsys.readouterr().out
    assert "They part in step 2" in text and "A 0.01 (command line)" in text and "--run-log" in text.splitlines()[-1]


def test_what_differs_is_ranked_by_how_far_the_runs_part(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a = write(tmp_path / "a", LOSSES, **EVERYTHING)
    for name, factor, order in (("far", 1.01, BEYOND), ("near", 1 + 1e-7, LAST_BITS)):
        b = write(tmp_path / name, LOSSES | {3: 2.25 * factor}, **OTHERWISE)
        _, found = asked(tool, capsys, a, b)
        kinds = [one["kind"] for one in found["inputs"]]
        assert found["first"]["iteration"] == 3 and found["first"]["values"] == {"lm loss": [2.25, 2.25 * factor]}
        assert kinds == sorted(kinds, key=order.index) and set(kinds) == set(order) - {"resumed state"}, kinds
        assert ("beyond" in found) == (name == "far")
        assert {one["name"] for one in found["idle"]} == {"--save", "code: commit", "environment: hosts"}


def test_a_step_that_was_run_twice_counts_as_it_was_run_last(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a = write(tmp_path / "a", LOSSES, settings={"lr": 1.0})
    write(tmp_path / "b", LOSSES | {4: 9.0}, settings={"lr": 1.0})
    b = write(tmp_path / "b", {3: 2.25}, loaded=2, settings={"lr": 2.0})
    code, found = asked(tool, capsys, a, b)
    assert code == 0 and found["common"] == [1, 2, 3] and found["restarts"] == [2], found
    assert [one["name"] for one in found["inputs"]] == ["--lr"], "the settings of the last start were in force there"


def test_a_folder_to_go_on_from_counts_only_where_something_was_loaded(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a = write(tmp_path / "a", LOSSES, settings={"lr": 1.0, "load": "a"})
    _, found = asked(tool, capsys, a, write(tmp_path / "b", LOSSES | {2: 9.0}, settings={"lr": 2.0, "load": "b"}))
    assert [one["name"] for one in found["inputs"]] == ["--lr"] and [one["name"] for one in found["idle"]] == [
        "--load"
    ], found
    _, found = asked(
        tool, capsys, a, write(tmp_path / "c", LOSSES | {2: 9.0}, loaded=0, settings={"lr": 2.0, "load": "c"})
    )
    assert [one["name"] for one in found["inputs"]] == ["--load", "--lr"], found


def test_a_loss_that_is_no_number_parts_them(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a = write(tmp_path / "a", {1: 3.0, 2: float("nan")})
    assert asked(tool, capsys, a, write(tmp_path / "b", {1: 3.0, 2: float("nan")}))[0] == 0
    assert asked(tool, capsys, a, write(tmp_path / "c", {1: 3.0, 2: 2.5}))[1]["beyond"]["iteration"] == 2


def test_what_is_no_ledger_is_refused(tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, content in (("missing", None), ("empty", "")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(SystemExit) as leaving:
            tool.main([str(tmp_path / name), str(tmp_path / name)])
        assert leaving.value.code == 2 and name in capsys.readouterr().err


def test_every_setting_has_a_kind() -> None:
    kinds = affected_area_by_setting()
    assert {field.name for field, _ in flag_fields(RequestedRun)} <= kinds.keys()
    assert set(kinds.values()) <= {*BEYOND, REPORTS}
    assert kinds["num_experts"] == "network" and kinds["fim_rate"] == "data" and kinds["seed"] == "order of samples"
    assert kinds["compile"] == "layout", "a compiler changes last bits"
