"""Files of prompts: every line answered once, in order, whatever interrupted the run."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.inference.answer_file import checkpoint_identity
from tests.helpers import tiny
from tests.helpers.architecture import ROOT
from tests.unit.cli.test_generate_text import MODEL, trained
from tests.unit.inference.published_t5 import published
from tests.unit.inference.serving import engine_of, network

LENGTH = tiny.BASE["max_position_embeddings"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained network."""
    assert MODEL["tokenizer_type"] == "NullTokenizer"
    made = str(tmp_path_factory.mktemp("network"))
    trained({}, made)
    return made


LINES: list[dict[str, Any]] = [
    {"prompt": "3 1 4", "id": "first"},
    {"prompt": "7", "num_tokens": 3},
    {"ids": [1, 2], "temperature": 0.9, "seed": 5},
    {"prompt": "3 1 4", "logprobs": 2},
    {"prompt": "3 1 4", "stop": [" 1", " 2", " 3"]},
    *({"prompt": str(number)} for number in range(30)),
]


SHORT = ("--num-tokens", "6", "--temperature", "0")


def answers(
    tool: ModuleType, folder: str, text: str, output: Path, *options: str, code: int = 0
) -> list[dict[str, Any]]:
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
    assert [len(row["ids"]) for row in found[:4]] == [6, 3, 6, 6] and all(
        row["reason"] in ("length", "stop") for row in found
    )
    assert found[0]["ids"] == found[3]["ids"] and found[0]["text"] == " " + " ".join(map(str, found[0]["ids"]))
    assert (found[2]["seed"], found[5]["seed"]) == (5, 1234 + 5)
    assert [len(place["top"]) for place in found[3]["logprobs"]] == [2] * 6
    assert all(
        place["top"][0] == [token, place["logprob"]]
        for place, token in zip(found[3]["logprobs"], found[3]["ids"], strict=True)
    )
    assert not any(word in found[4]["text"] for word in LINES[4]["stop"])


@pytest.mark.parametrize("kept", ["", "3 lines", "3 lines and a half", "all"])
def test_an_interrupted_run_goes_on_where_it_ended(tool: ModuleType, folder: str, tmp_path: Path, kept: str) -> None:
    whole = answers(tool, folder, lines(), tmp_path / "whole")
    written = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    begun = {"": [], "3 lines": written[:3], "3 lines and a half": [*written[:3], written[3][:20]], "all": written}[
        kept
    ]
    (tmp_path / "out").write_bytes(b"".join(begun))
    marked = (tmp_path / "out").read_bytes().replace(b'"reason"', b'"REASON"', 1)
    (tmp_path / "out").write_bytes(marked)  # shows that what was there is not written anew
    found = answers(tool, folder, lines(), tmp_path / "out")
    assert ("REASON" in found[0]) == bool(kept)
    assert [row["text"] for row in found] == [row["text"] for row in whole]


@pytest.mark.parametrize(
    "bad, words",
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object with a prompt or with ids"),
        ('{"prompt": 1}', "must be of the type str"),
        ("{}", "a prompt or with ids"),
        ('{"prompt": "1", "ids": [1]}', "with a prompt or"),
        ('{"prompt": "word"}', "cannot be read"),
        ('{"ids": [99]}', "are no ids"),
        ('{"ids": [true]}', "whole numbers"),
        ('{"prompt": "1", "temperature": -1}', "is negative"),
        ('{"prompt": "1", "num_tokens": true}', "num_tokens is True"),
        (json.dumps({"ids": [1] * LENGTH, "num_tokens": 2}), "more than the 16 positions"),
        ('{"prompt": "1", "stop": [1]}', "stop holds texts"),
    ],
)
def test_a_line_that_cannot_be_served_says_why_and_stops_no_other(
    tool: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, words: str
) -> None:
    for _ in range(2):  # the second run finds all answered
        text, output = lines(LINES[:2]) + bad + "\n\n" + lines(LINES[2:4]), tmp_path / "out"
        found = answers(tool, folder, text, output, code=0 if output.exists() else 1)
        assert len(found) == 5 and words in found[2]["error"] and all("text" in found[place] for place in (0, 1, 3, 4))
    assert "1 lines could not be served" in capsys.readouterr().err


def test_an_output_of_another_input_is_left_alone(
    tool: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(tool, folder, lines(LINES[:3]), tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    answers(tool, folder, lines(LINES[5:9]), tmp_path / "out", code=1)
    assert (tmp_path / "out").read_bytes() == before and "line 1 of" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["question", "checkpoint", "options", "place"])
def test_answers_to_something_else_are_not_taken_for_answers(
    tool: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    """Rows of ids have neither a prompt nor an id that would tell them apart."""
    rows, network, options = [{"ids": [1, 2]}, {"ids": [3]}], folder, ()
    answers(tool, folder, lines(rows), tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    if other == "question":
        rows = [{"ids": [1, 3]}, rows[1]]
    elif other == "checkpoint":
        network = str(tmp_path / "other")
        trained({"seed": 77}, network)
    elif other == "options":
        options = ("--repetition-penalty", "2")
    else:
        rows = rows[::-1]
    answers(tool, network, lines(rows), tmp_path / "out", *options, code=1)
    assert (tmp_path / "out").read_bytes() == before
    assert "line 1 of" in (said := capsys.readouterr().err) and "by this checkpoint and these options" in said


def test_a_checkpoint_that_differs_anywhere_is_another(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2**18))
    before = checkpoint_identity(tmp_path)
    for place in range(0, 2**18, 2**13 + 1):
        content = bytearray(2**18)
        content[place] = 1
        (tmp_path / "model.safetensors").write_bytes(content)
        assert checkpoint_identity(tmp_path) != before, place


def test_a_checkpoint_is_known_wherever_it_lies(tool: ModuleType, folder: str, tmp_path: Path) -> None:
    whole = answers(tool, folder, lines(LINES[:4]), tmp_path / "whole")
    shutil.copytree(folder, tmp_path / "moved")
    (tmp_path / "out").write_bytes(b"".join((tmp_path / "whole").read_bytes().splitlines(keepends=True)[:2]))
    assert alike(answers(tool, str(tmp_path / "moved"), lines(LINES[:4]), tmp_path / "out"), whole)


def test_lines_that_failed_are_tried_again_and_the_others_kept(tool: ModuleType, folder: str, tmp_path: Path) -> None:
    wrong = [{"ids": [1]}, {"ids": [99]}, {"ids": [2]}, {"ids": [98]}, {"ids": [3]}]
    first = answers(tool, folder, lines(wrong), tmp_path / "out", code=1)
    assert ["error" in row for row in first] == [False, True, False, True, False]
    mended = [*wrong[:1], {"ids": [7]}, *wrong[2:]]
    found = answers(tool, folder, lines([*mended, {"ids": [4]}]), tmp_path / "out")
    assert found == answers(tool, folder, lines([*mended, {"ids": [4]}]), tmp_path / "new", code=1)
    assert found[3] == first[3] and "error" not in found[1] and found[1]["seed"] == 1235


def test_half_of_a_surrogate_pair_stops_no_other_line(tool: ModuleType, folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1"}, {"prompt": "\ud800", "id": "\udfff"}, {"ids": [2], "id": "\ud83d\ude00"}]
    found = answers(tool, folder, lines(rows), tmp_path / "out", code=1)
    assert (
        found[1]["prompt"] == "\ud800" and "error" in found[1] and found[2]["id"] == "\U0001f600" and "ids" in found[0]
    )
    assert found == answers(tool, folder, lines(rows), tmp_path / "out")


def test_few_lines_are_held_at_once(tool: ModuleType) -> None:
    read = 0

    def endless() -> Iterator[tuple[int, str]]:
        nonlocal read
        for read in range(10**6):
            yield read, '{"ids": [1]}'

    given = tool.parse_arguments(["--load", "x", "--input", "x", "--output", "x", "--num-tokens", "3"])
    found = tool.generate_outputs_in_order(engine_of(network(), together=2), endless(), given)
    for _ in range(20):
        next(found)
    assert read <= 20 + tool.AHEAD * 2 + 2


def alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """The same lines: ids and texts exactly, log-probabilities as exactly as sums in batches of other shapes are."""

    def near(one: Any, other: Any) -> bool:
        if isinstance(one, float) and isinstance(other, float):
            return one == pytest.approx(other, rel=1e-4, abs=1e-5)
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(near(one[name], other[name]) for name in one)
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(near, one, other))
        return one == other

    return near(found, expected)


def test_a_draft_changes_no_line(tool: ModuleType, folder: str, tmp_path: Path) -> None:
    plain = answers(tool, folder, lines(), tmp_path / "plain")
    drafted = answers(tool, folder, lines(), tmp_path / "drafted", "--draft", folder, "--num-speculative-tokens", "3")
    assert alike(drafted, plain) and sum("logprobs" in row for row in plain) == 1
    assert not alike([{**plain[0], "ids": plain[0]["ids"][:-1]}], plain[:1])


FLAGS: dict[str, tuple[str, ...]] = {
    "a step": ("--ckpt-step", "2"),
    "as saved": ("--dtype", "auto"),
    "float32": ("--dtype", "float32"),
    "few together": ("--inference-max-requests", "3"),
    "few wait": ("--inference-max-waiting-requests", "2"),
    "short": ("--inference-max-seq-length", "12"),
    "small blocks": ("--inference-dynamic-batching-block-size", "2"),
    "a small cache": ("--inference-dynamic-batching-buffer-size-gb", "0.0001"),
    "few at once": ("--inference-dynamic-batching-max-tokens", "32"),
    "nothing shared": ("--no-inference-dynamic-batching-prefix-caching",),
    "whole prompts": ("--no-enable-chunked-prefill",),
    "alone": (
        "--tensor-model-parallel-size",
        "1",
        "--pipeline-model-parallel-size",
        "1",
        "--expert-model-parallel-size",
        "1",
    ),
}


@pytest.fixture(scope="module")
def greedy(tool: ModuleType, folder: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The likeliest continuations of `LINES`."""
    return [row["ids"] for row in answers(tool, folder, lines(LINES), tmp_path_factory.mktemp("greedy") / "out")]


@pytest.mark.parametrize("name", FLAGS)
def test_how_texts_are_decoded_changes_none_of_them(
    tool: ModuleType, folder: str, tmp_path: Path, greedy: list[list[int]], name: str
) -> None:
    assert [row["ids"] for row in answers(tool, folder, lines(), tmp_path / "out", *FLAGS[name])] == greedy


WAYS: dict[str, tuple[str, ...]] = {
    "warm": (),
    "another seed": ("--seed", "7"),
    "cold": ("--temperature", "0.01"),
    "few words": ("--top-k", "2"),
    "most likely": ("--top-p", "0.3"),
    "nothing rare": ("--min-p", "0.5"),
    "no repeats": ("--repetition-penalty", "3.0"),
}


def test_every_setting_of_the_draws_is_heeded_and_a_line_may_say_the_same(
    tool: ModuleType, folder: str, tmp_path: Path
) -> None:
    said = {}
    for name, how in WAYS.items():
        found = answers(
            tool,
            folder,
            lines([{"ids": [number]} for number in range(12)]),
            tmp_path / name.replace(" ", "_"),
            "--temperature",
            "1.0",
            "--num-tokens",
            "9",
            *how,
        )
        own = {flag[2:].replace("-", "_"): json.loads(value) for flag, value in zip(how[::2], how[1::2], strict=True)}
        asked = [
            {"ids": [number], **own, **({"seed": own["seed"] + number} if "seed" in own else {})}
            for number in range(12)
        ]
        again = answers(
            tool,
            folder,
            lines(asked),
            tmp_path / (name.replace(" ", "_") + "_own"),
            "--temperature",
            "1.0",
            "--num-tokens",
            "9",
        )
        said[name] = [tuple(row["ids"]) for row in found]
        assert [tuple(row["ids"]) for row in again] == said[name] and max(map(len, said[name])) == 9
    assert len({tuple(texts) for texts in said.values()}) == len(WAYS), "two settings say the same"


def test_heads_that_look_ahead_are_drafts_and_change_no_line(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained({"mtp_num_layers": 2}, str(tmp_path / "ahead"))
    ahead, rows = str(tmp_path / "ahead"), lines(LINES[:9])
    plain, guessed = (answers(tool, ahead, rows, tmp_path / name, "--num-speculative-tokens", name) for name in "02")
    assert [row["ids"] for row in guessed] == [row["ids"] for row in plain]
    with pytest.raises(FileNotFoundError):
        answers(tool, ahead, rows, tmp_path / "more", "--num-speculative-tokens", "3", code=1)
    assert "2 layers of multi-token prediction" in capsys.readouterr().err


def test_a_t5_answers_what_its_encoder_reads(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = published(tmp_path / "t5", "later")
    asked = [
        {"prompt": "3 1 4"},
        {"ids": [3, 1, 4, 49]},
        {"ids": [7, 8]},
        {"ids": [50]},
        {"ids": [9], "temperature": 0.9},
    ]
    found = answers(tool, str(tmp_path / "t5"), lines(asked), tmp_path / "out", "--inference-max-requests", "2", code=1)
    expected = model.generate(torch.tensor([[3, 1, 4, 49]]), max_new_tokens=6, do_sample=False)[0, 1:].tolist()
    assert found[0]["ids"] == found[1]["ids"] == [token for token in expected if token != 49]
    assert "no ids of the network's 50" in found[3]["error"] and len(found) == 5
    capsys.readouterr()
    with pytest.raises(FileNotFoundError):
        answers(tool, str(tmp_path / "t5"), lines(asked), tmp_path / "drafted", "--draft", str(tmp_path / "t5"), code=1)
    assert "leave out --draft" in capsys.readouterr().err


def test_settings_that_do_not_fit_are_told_at_once(
    tool: ModuleType, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers_of = lambda *options: answers(tool, folder, lines(), tmp_path / "out", *options, code=1)  # noqa: E731
    with pytest.raises(FileNotFoundError):
        answers_of("--num-speculative-tokens", "2")
    assert "ConfigError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(["--tensor-model-parallel-size", "2"], id="tp2", marks=pytest.mark.nightly),
        pytest.param([], id="dp2", marks=pytest.mark.nightly),
        pytest.param(["--pipeline-model-parallel-size", "2"], id="pp2", marks=pytest.mark.nightly),
    ],
)
def test_ranks_of_a_launcher_write_what_one_process_writes(
    tool: ModuleType, folder: str, tmp_path: Path, sizes: list[str]
) -> None:
    expected = answers(tool, folder, lines(), tmp_path / "alone")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "megatron",
        "generate",
        "--load",
        folder,
        "--input",
        str(tmp_path / "alone.in"),
        "--output",
        str(tmp_path / "out"),
        *SHORT,
        *sizes,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "MEGATRON_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(row["text"], row["ids"]) for row in found] == [(row["text"], row["ids"]) for row in expected]
