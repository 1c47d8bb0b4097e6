"""RACE: passages, questions and answers as they are published, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.indexed import DataError
from megatron.tasks.race import question_with_answer, read_race_questions
from tests.helpers.architecture import ROOT

REAL = ROOT.parent / "shared/data/eval/race_dev"
PASSAGE = {
    "article": "It rained .",
    "questions": ["What fell ?", "It is _ ."],
    "options": [["rain", "snow", "ash", "leaves"], ["wet", "dry", "hot"]],
    "answers": ["A", "C"],
    "id": "middle1.txt",
}


def write(folder: Path, *contents: Any, name: str = "1.txt") -> Path:
    """A folder with one file, a line for each content."""
    folder.mkdir(exist_ok=True)
    lines = [content if isinstance(content, str) else json.dumps(content) for content in contents]
    (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_a_passage_becomes_its_questions(tmp_path: Path) -> None:
    first, second = read_race_questions(write(tmp_path, PASSAGE))
    assert (
        first.answers == ("What fell ? rain", "What fell ? snow", "What fell ? ash", "What fell ? leaves")
        and first.label == 0
    )
    assert second.answers == ("It is wet .", "It is dry .", "It is hot .") and second.label == 2
    assert first.article == "It rained ." and first.uid == "middle1.txt-1"


def test_a_gap_of_several_strokes_is_one_gap() -> None:
    assert question_with_answer("It is ____ , said he .", r"\1 wet") == r"It is \1 wet , said he ."


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    bad = [
        {**PASSAGE, "answers": ["A", "D"]},
        "no json",
        {**PASSAGE, "answers": ["A"]},
        {"article": "x"},
        {**PASSAGE, "article": " "},
        {**PASSAGE, "options": [["a"], ["b", "c"]], "answers": ["A", "B"]},
    ]
    folder = write(tmp_path, PASSAGE, *bad)
    with pytest.raises(DataError) as caught:
        read_race_questions(folder)
    said = str(caught.value)
    path = folder / "1.txt"
    for line, words in (
        (2, "question 2: answer 'D', expected one of A, B, C"),
        (3, "not JSON"),
        (4, "differ in number: 2, 2, 1"),
        (5, "expected an object with a text `article`"),
        (6, "the article is empty"),
        (7, "question 1: expected two to 4 options"),
    ):
        assert any(f"{path}:{line}" in row and words in row for row in said.splitlines()), (line, words, said)
    assert f"{path}:1" not in said


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder with .txt files"):
        read_race_questions(tmp_path)


@pytest.mark.skipif(not REAL.exists(), reason="the real rows are not beside this checkout")
def test_the_real_rows_are_read() -> None:
    questions = read_race_questions(REAL)
    assert len(questions) == sum(
        len(json.loads(path.read_text(encoding="utf-8"))["questions"]) for path in REAL.glob("*.txt")
    )
    assert not any("_" in answer for question in questions for answer in question.answers)
