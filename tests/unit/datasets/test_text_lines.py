"""Lines of JSON end at newlines alone: every program that reads them keeps other ends of lines, which stand within strings, in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.cli.commands.evaluate_vlm import read_lines_by_id
from megatron.cli.commands.generate import count_finished_lines, enumerate_nonblank_lines
from megatron.cli.commands.plot_loss import _read_log_records
from megatron.cli.commands.preprocess_mmdata import read_text_image_pairs
from megatron.cli.commands.score_with_reward_model import parse_line_to_score
from megatron.core.datasets.conversations import ConversationEncoder, _tokenize_conversation_file
from megatron.core.datasets.image_conversations import _read_json_rows
from megatron.core.datasets.storage import read_text_lines, split_text_lines
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.evaluation.vision_benchmarks import read_benchmark_questions
from megatron.inference.eval_generate import _lines_with_location
from megatron.preference.rows import PreferenceRowParser, parse_preference_rows
from megatron.rl.environments.base import ProblemFile
from megatron.rl.rollout_sample_files import read_rollout_samples
from megatron.tasks.race import read_race_questions
from megatron.tasks.zeroshot import read_lambada_passages
from tests.helpers.architecture import ROOT

ENDS = "\u2028\u2029\u0085\x7f"  # within JSON strings as they are
ESCAPED = "\x0b\x0c\x1c\x1d\x1e"  # and these as \u escapes, which `json.dumps` writes
STRANGE = f"1{ENDS}2 {ESCAPED} three"


def race(path: Path) -> str:
    return read_race_questions(path.parent)[0].article


def generate(path: Path) -> str:
    """The input of `megatron generate`, and what it wrote before it was stopped."""
    output = path.with_suffix(".out")
    output.write_bytes(path.read_bytes())
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        lines = list(enumerate_nonblank_lines(file))
    assert count_finished_lines(output, iter(lines)) == len(lines) == 2
    return str(json.loads(lines[0][1])["prompt"])


def pairs(path: Path) -> str:
    (path.parent / "images").mkdir()
    return next(read_text_image_pairs(str(path), str(path.parent / "images")))[0]


# What reads a file of JSON lines: a row of it with the strange text, and the function that gives the text back.
READERS: dict[str, tuple[dict[str, Any], Callable[[Path], Any]]] = {
    "pretrain_vlm.py": ({"text": STRANGE}, lambda path: _read_json_rows(str(path))[0]["text"]),
    "train_rl.py": (
        {"problem": STRANGE, "answer": "1"},
        lambda path: ProblemFile("math", str(path), ("problem", "answer"), 0).row_of_problem(0)[0],
    ),
    "train_rl.py's samples": ({"iteration": 1, "text": STRANGE}, lambda path: read_rollout_samples(path)[1][0]["text"]),
    "tasks RACE": ({"article": STRANGE, "questions": ["q"], "options": [list("abcd")], "answers": ["A"]}, race),
    "--eval-generate": (
        {"messages": STRANGE},
        lambda path: json.loads(_lines_with_location(str(path), "prompts")[0][1])["messages"],
    ),
    "evaluate-vlm --answers": ({"id": "x", "text": STRANGE}, lambda path: read_lines_by_id(str(path))["x"]["text"]),
    "evaluate-vlm --references": (
        {"id": "x", "references": [STRANGE]},
        lambda path: read_benchmark_questions("exact", [str(path)])[0].references[0],
    ),
    "generate": ({"prompt": STRANGE, "id": "x", "error": ""}, generate),
    "plot-loss": ({"event": STRANGE}, lambda path: next(iter(_read_log_records(path)))["event"]),
    "preprocess-mmdata": ({"text": STRANGE, "image": "x.png"}, pairs),
    "score-with-reward-model": (
        {"text": STRANGE},
        lambda path: parse_line_to_score(read_text_lines(path)[0])[0]["text"],
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("file", ["\n", "\r\n", "\ufeff"], ids=["plain", "carriage returns", "byte order mark"])
def test_every_reader_of_json_lines_keeps_all_other_ends_of_lines(reader: str, file: str, tmp_path: Path) -> None:
    row, read = READERS[reader]
    other = {**row, "id": "y"} if "id" in row else row
    lines = [json.dumps(one, ensure_ascii=False) for one in (row, other)]
    end, mark = ("\n", file) if file == "\ufeff" else (file, "")
    (tmp_path / "rows.txt").write_bytes((mark + "".join(line + end for line in lines)).encode())
    assert read(tmp_path / "rows.txt") == STRANGE


def test_a_carriage_return_between_the_words_of_json_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes(b'{"a":\r1}\n{"a":2}')
    assert _read_json_rows(str(path)) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'\n[{"a": 1},\r\n{"a": 2}]')
    assert _read_json_rows(str(path)) == [{"a": 1}, {"a": 2}]


def test_passages_conversations_and_pairs_are_one_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": STRANGE}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert len(read_lambada_passages([str(path)], ByteTokenizer(), length=99, strict=True)) == 1
    turns = [{"role": "user", "content": STRANGE}, {"role": "assistant", "content": "x"}]
    path.write_text(json.dumps({"messages": turns}, ensure_ascii=False) + "\n", encoding="utf-8")
    arrays = _tokenize_conversation_file(str(path), ConversationEncoder(ByteTokenizer(), "plain"))
    assert len(arrays["starts"]) == 2
    row = {"prompt": STRANGE, "chosen": "a", "rejected": "b"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    with path.open("rb") as file:
        assert len(parse_preference_rows(file, PreferenceRowParser(ByteTokenizer(), "plain", "dpo"))[0]) == 1


def test_lines_are_those_between_newlines() -> None:
    assert split_text_lines("") == []
    assert split_text_lines("a\r\n\nb\u2028c\r") == ["a", "", "b\u2028c"]
    assert split_text_lines("a\n") == ["a"]


def test_no_other_program_splits_a_file_at_every_end_of_lines() -> None:
    plain = {  # files of other programs without JSON: a log, a table of words, stacks
        "megatron/training/health/rerun.py",
        "megatron/core/datasets/ingest/sentences.py",
        "megatron/verify/parity/local_ranks.py",
        "megatron/cli/commands/checkpoint/resume_check.py",
    }
    found = {
        str(path.relative_to(ROOT))
        for folder in ("megatron", "examples", "tools", "tasks")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"read_text\([^()]*\)\.splitlines\(", path.read_text(encoding="utf-8"))
    }
    assert found == plain, SimpleNamespace(new=found - plain, gone=plain - found)
