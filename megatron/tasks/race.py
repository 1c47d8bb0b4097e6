"""RACE (Lai et al., 2017): a passage, a question, four answers.

A folder of .txt files, each a JSON object (or several, a line each) with `article`, `questions`, `options` and `answers`.
Every answer becomes one text [CLS] question and answer [SEP] article [SEP]; the head gives each a score, and the four
scores of a question are compared.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.storage import DataError, read_text_lines
from megatron.tasks.glue import bad_lines_message

CHOICES = 4  # at most; a question with fewer is scored over those it has
MOST_QUESTION_TOKENS = 128  # of question and answer together; the rest is the article's
_LETTERS = "ABCD"
_GAP = re.compile("_+")


@dataclass(frozen=True, slots=True)
class RaceQuestion:
    """One question. answers: question and answer as one text, for each of two to four. label: number of the right one."""

    uid: str
    article: str
    answers: tuple[str, ...]
    label: int
    place: str


def read_race_questions(folder: str | Path) -> list[RaceQuestion]:
    """The questions of a folder, its files in the order of their names. `DataError` lists all that cannot be used."""
    paths = sorted(Path(folder).glob("*.txt"))
    if not paths:
        raise DataError(f"{folder} is no folder with .txt files of RACE")
    questions, problems = [], []
    for path in paths:
        try:
            lines = read_text_lines(path)
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        for number, line in enumerate(lines, 1):
            if line.strip():
                of_line, wrong = _parse_race_passage(line, f"{path}:{number}")
                questions += of_line
                problems += wrong
    if problems:
        summary = f"{len(problems)} passages or questions of {folder} cannot be used"
        raise DataError(bad_lines_message(summary, problems))
    return questions


def _parse_race_passage(line: str, place: str) -> tuple[list[RaceQuestion], list[str]]:
    """Return the questions of one passage, and a sentence for each problem. line: a JSON object. place: file and line."""
    try:
        content = json.loads(line)
    except ValueError as error:
        return [], [f"{place}: not JSON: {error}"]
    lists: list[Any] = (
        [content.get(name) for name in ("questions", "options", "answers")] if isinstance(content, dict) else [None]
    )
    if not all(isinstance(entry, list) for entry in lists) or not isinstance(content.get("article"), str):
        return [], [f"{place}: expected an object with a text `article` and lists `questions`, `options` and `answers`"]
    if len({len(entry) for entry in lists}) != 1:
        sizes = ", ".join(str(len(entry)) for entry in lists)
        return [], [f"{place}: questions, options and answers differ in number: {sizes}"]
    if not content["article"].strip():
        return [], [f"{place}: the article is empty"]
    questions, wrong = [], []
    for number, (question, options, answer) in enumerate(zip(*lists), 1):
        problem = _question_problem(question, options, answer)
        if problem:
            wrong.append(f"{place}, question {number}: {problem}")
            continue
        texts = tuple(question_with_answer(question, option) for option in options)
        questions.append(
            RaceQuestion(
                f"{content.get('id', Path(place.rpartition(':')[0]).stem)}-{number}",
                content["article"],
                texts,
                _LETTERS.index(answer),
                place,
            )
        )
    return questions, wrong


def _question_problem(question: Any, options: Any, answer: Any) -> str:
    """Return what is wrong with a question, or ""."""
    if not isinstance(question, str):
        return "it is no text"
    if (
        not isinstance(options, list)
        or not 2 <= len(options) <= CHOICES
        or not all(isinstance(option, str) for option in options)
    ):
        return f"expected two to {CHOICES} options that are texts"
    letters = tuple(_LETTERS[: len(options)])
    return "" if answer in letters else f"answer {answer!r}, expected one of {', '.join(letters)}"


def question_with_answer(question: str, answer: str) -> str:
    """Return question and answer as one text: the answer in the question's gap, else after it."""
    return _GAP.sub(lambda _: answer, question) if "_" in question else f"{question} {answer}"
