"""tools/evaluate_vlm.py: scores by name, official formats, and answers that are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.tools.evaluate_vlm import RESULTS, TASKS, main

REFERENCES: list[dict[str, Any]] = [
    {"id": 1, "references": ["cat"] * 3 + ["dog"] * 7},
    {"id": 2, "references": ["two"] * 10},
]


def files(folder: Path, answers: list[dict[str, Any]], references: list[dict[str, Any]]) -> list[str]:
    """The flags of two files."""
    flags = []
    for name, rows in (("answers", answers), ("references", references)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags += [f"--{name}", str(folder / name)]
    return flags


def test_vqa_is_counted_in_both_ways_and_missing_answers_are_wrong(tmp_path: Path, capsys: Any) -> None:
    main(["--task", "vqav2", *files(tmp_path, [{"id": 1, "text": " A cat."}], REFERENCES)])
    assert capsys.readouterr().out.splitlines() == [
        "vqav2 accuracy (official, nine of ten): 45.00 of 2 answers",
        "vqav2 accuracy (all ten): 50.00 of 2 answers",
        "1 answers are missing or errors, and count as wrong",
    ]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_scores_and_writes_its_format(task: str, tmp_path: Path, capsys: Any) -> None:
    references = [{"id": 7, "references": ["B"], "options": {"A": "x", "B": "y"}}] if task == "mmmu" else REFERENCES
    answers = [{"id": 7, "text": "(B)"}, {"id": 1, "text": "cat"}, {"id": 2, "text": "two"}]
    results = tmp_path / "results.json"
    main(["--task", task, *files(tmp_path, answers, references), "--results", str(results)])
    assert capsys.readouterr().out.count("\n") == len(TASKS[task])
    written = json.loads(results.read_text())
    assert len(written) == len(references)
    if task in RESULTS:
        assert written[-1] == RESULTS[task](2, "two")


def test_files_that_do_not_fit_are_refused(tmp_path: Path, capsys: Any) -> None:
    twice = [{"id": 1, "text": "x"}, {"id": 1, "text": "y"}]
    for answers, references, reason in (
        (twice, REFERENCES, "1 lines with the id of another"),
        ([], [{"id": 1}], 'has no "references"'),
        ([{"text": "x"}], REFERENCES, "no JSON lines with an id"),
    ):
        with pytest.raises(SystemExit):
            main(["--task", "exact", *files(tmp_path, answers, references)])
        assert reason in capsys.readouterr().err
