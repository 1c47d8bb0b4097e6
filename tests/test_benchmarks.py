"""The page of figures has a place for every benchmark, and a place is all that a run changes of it."""

from __future__ import annotations

import shlex

import pytest

from benchmarks import figures

PAGE = figures.PAGE.read_text()


@pytest.mark.parametrize("question", figures.QUESTIONS, ids=lambda question: question.name)
def test_a_question_has_its_script_and_one_place_on_the_page(question: figures.Question) -> None:
    assert (figures.ROOT / shlex.split(question.command)[0]).is_file()
    page = figures.written(PAGE, question.name, "made up\n")
    assert "made up" in page
    again = figures.written(page, question.name, figures.formatted(question, "a  \\1 b\n", 0.5))
    assert "a  \\1 b" in again and "made up" not in again and f"`python {question.command}`" in again
    assert figures.written(again, question.name, "made up\n") == page, "nothing else has changed"


def test_every_place_has_its_question_and_a_page_without_the_place_is_refused() -> None:
    names = [
        line.removeprefix("<!-- figures: ").removesuffix(" -->")
        for line in PAGE.splitlines()
        if line.startswith("<!-- figures")
    ]
    assert sorted(names) == sorted(question.name for question in figures.QUESTIONS)
    with pytest.raises(ValueError, match="2 places for startup"):
        figures.written(PAGE + PAGE, "startup", "")


def test_what_needs_a_gpu_is_left_out_without_one() -> None:
    gpu = [question for question in figures.QUESTIONS if question.name == "gpu"]
    assert [question.unfit(False) for question in gpu] == ["it needs a GPU"] and not gpu[0].unfit(True)
    assert not any(question.unfit(False) for question in figures.QUESTIONS if question.on != "gpu")


def test_the_machine_is_described() -> None:
    assert "cores of" in figures.machine() and "torch" in figures.machine()


@pytest.mark.parametrize("question", figures.QUESTIONS, ids=lambda question: question.name)
def test_a_script_finds_the_project_from_wherever_it_is_called(question: figures.Question) -> None:
    text = (figures.ROOT / shlex.split(question.command)[0]).read_text()
    lines = text.splitlines()
    first = next((place for place, line in enumerate(lines) if line.startswith(("from megatron", "from tests"))), None)
    assert first is None or any(line.lstrip().startswith("sys.path.insert(0") for line in lines[:first])
