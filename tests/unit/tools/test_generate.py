"""Files of prompts: every line answered once, in order, whatever interrupted the run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers import tiny
from tests.helpers.architecture import ROOT
from tests.unit.inference.serving import engine_of, network
from tests.unit.tools.test_generate_text import MODEL, trained

LENGTH = tiny.BASE["max_position_embeddings"]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("generate_tool", ROOT / "tools" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_tool"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["generate_tool"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained network."""
    assert MODEL["tokenizer_type"] == "NullTokenizer"
    made = str(tmp_path_factory.mktemp("network"))
    trained({}, made)
    return made


LINES: list[dict[str, Any]] = [
    {"prompt": "3 1 4", "id": "first"}, {"prompt": "7", "num_tokens": 3}, {"ids": [1, 2], "temperature": 0.9, "seed": 5},
    {"prompt": "3 1 4", "logprobs": 2}, {"prompt": "3 1 4", "stop": [" 1", " 2", " 3"]}, *({"prompt": str(number)} for number in range(30))]


SHORT = ("--num-tokens", "6", "--temperature", "0")


def answers(tool: ModuleType, folder: str, text: str, output: Path, *options: str, code: int = 0) -> list[dict[str, Any]]:
    """What the tool writes for an input."""
    source = output.with_suffix(".in")
    source.write_text(text, encoding="utf-8")
    arguments = ["generate.py", "--load", folder, "--input", str(source), "--output", str(output), *SHORT, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        patch.setenv("MEGATRON_DEVICE", "cpu")
        if code:
            with pytest.raises(SystemExit) as caught:
                tool.main()
            assert caught.value.code == code
        else:
            tool.main()
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def lines(rows: list[dict[str, Any]] = LINES) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_line_is_answered_in_order_and_as_it_asks(tool: ModuleType, folder: str, tmp_path: Path) -> None:
    found = answers(tool, folder, lines(), tmp_path / "out")
    assert [row.get("prompt") for row in found] == [row.get("prompt") for row in LINES] and found[0]["id"] == "first"
    assert [len(row["ids"]) for row in found[:4]] == [6, 3, 6, 6] and all(row["reason"] in ("length", "stop") for row in found)
    assert found[0]["ids"] == found[3]["ids"] and found[0]["text"] == " " + " ".join(map(str, found[0]["ids"]))
    assert (found[2]["seed"], found[5]["seed"]) == (5, 1234 + 5)
    assert [len(place["top"]) for place in found[3]["logprobs"]] == [2] * 6
    assert all(place["top"][0] == [token, place["logprob"]] for place, token in zip(found[3]["logprobs"], found[3]["ids"], strict=True))
    assert not any(word in found[4]["text"] for word in LINES[4]["stop"])


@pytest.mark.parametrize("kept", ["", "3 lines", "3 lines and a half", "all"])
def test_an_interrupted_run_goes_on_where_it_ended(tool: ModuleType, folder: str, tmp_path: Path, kept: str) -> None:
    whole = answers(tool, folder, lines(), tmp_path / "whole")
    written = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    begun = {"": [], "3 lines": written[:3], "3 lines and a half": [*written[:3], written[3][:20]], "all": written}[kept]
    (tmp_path / "out").write_bytes(b"".join(begun))
    marked = (tmp_path / "out").read_bytes().replace(b'"reason"', b'"REASON"', 1)
    (tmp_path / "out").write_bytes(marked)  # shows that what was there is not written anew
    found = answers(tool, folder, lines(), tmp_path / "out")
    assert ("REASON" in found[0]) == bool(kept)
    assert [row["text"] for row in found] == [row["text"] for row in whole]


@pytest.mark.parametrize("bad, words", [
    ("{", "not JSON"), ("[1]", "a JSON object with a prompt or with ids"), ('{"prompt": 1}', "must be of the type str"), ("{}", "a prompt or with ids"),
    ('{"prompt": "1", "ids": [1]}', "with a prompt or"), ('{"prompt": "word"}', "cannot be read"), ('{"ids": [99]}', "are no ids"),
    ('{"ids": [true]}', "whole numbers"), ('{"prompt": "1", "temperature": -1}', "is negative"),
    ('{"prompt": "1", "num_tokens": true}', "num_tokens is True"),
    (json.dumps({"ids": [1] * LENGTH, "num_tokens": 2}), "more than the 16 positions"), ('{"prompt": "1", "stop": [1]}', "stop holds texts"),
])
def test_a_line_that_cannot_be_served_says_why_and_stops_no_other(
        tool: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, words: str) -> None:
    for _ in range(2):  # the second run finds all answered
        text, output = lines(LINES[:2]) + bad + "\n\n" + lines(LINES[2:4]), tmp_path / "out"
        found = answers(tool, folder, text, output, code=0 if output.exists() else 1)
        assert len(found) == 5 and words in found[2]["error"] and all("text" in found[place] for place in (0, 1, 3, 4))
    assert "1 lines could not be served" in capsys.readouterr().err


def test_an_output_of_another_input_is_left_alone(
        tool: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(tool, folder, lines(LINES[:3]), tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    answers(tool, folder, lines(LINES[5:9]), tmp_path / "out", code=1)
    assert (tmp_path / "out").read_bytes() == before and "line 1 of" in capsys.readouterr().err


def test_few_lines_are_held_at_once(tool: ModuleType) -> None:
    read = 0

    def endless() -> Iterator[tuple[int, str]]:
        nonlocal read
        for read in range(10**6):
            yield read, '{"ids": [1]}'

    given = tool.options(["--load", "x", "--input", "x", "--output", "x", "--num-tokens", "3"])
    found = tool.answers(engine_of(network(), together=2), endless(), given)
    for _ in range(20):
        next(found)
    assert read <= 20 + tool.AHEAD * 2 + 2


def test_a_draft_changes_no_line(tool: ModuleType, folder: str, tmp_path: Path) -> None:
    plain = answers(tool, folder, lines(), tmp_path / "plain")
    assert answers(tool, folder, lines(), tmp_path / "drafted", "--draft", folder, "--num-speculative-tokens", "3") == plain


def test_settings_that_do_not_fit_are_told_at_once(tool: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers_of = lambda *options: answers(tool, folder, lines(), tmp_path / "out", *options, code=1)  # noqa: E731
    with pytest.raises(FileNotFoundError):
        answers_of("--num-speculative-tokens", "2")
    assert "ConfigError" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"], []], ids=["tp2", "pp2", "dp2"])
def test_ranks_of_a_launcher_write_what_one_process_writes(tool: ModuleType, folder: str, tmp_path: Path, sizes: list[str]) -> None:
    expected = answers(tool, folder, lines(), tmp_path / "alone")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(ROOT / "tools/generate.py"),
               "--load", folder, "--input", str(tmp_path / "alone.in"), "--output", str(tmp_path / "out"), *SHORT, *sizes]
    done = subprocess.run(command, env={**os.environ, "MEGATRON_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(row["text"], row["ids"]) for row in found] == [(row["text"], row["ids"]) for row in expected]
