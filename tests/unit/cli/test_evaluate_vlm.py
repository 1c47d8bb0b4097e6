"""megatron evaluate-vlm: scores by name, official formats, and answers that are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.commands.evaluate_vlm import main
from megatron.core.config.flags.declare import ConfigError
from megatron.evaluation.vision_benchmarks import BENCHMARKS, read_benchmark_questions

REFERENCES: list[dict[str, Any]] = [
    {"id": 1, "references": ["cat"] * 3 + ["dog"] * 7},
    {"id": 2, "references": ["two"] * 10},
]

SUBMITTED = {  # a line of the file that the server of each benchmark takes
    "captions": {"image_id": 2, "caption": "two"},
    "vqav2": {"question_id": 2, "answer": "two"},
    "textvqa": {"question_id": 2, "answer": "two"},
    "docvqa": {"questionId": 2, "answer": "two"},
}


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
        "vqav2 accuracy (official until 2021): 45.00 of 2 answers",
        "vqav2 accuracy (all ten): 50.00 of 2 answers",
        "1 answers are missing or errors, and count as wrong",
    ]


@pytest.mark.parametrize("task", BENCHMARKS)
def test_every_task_scores_and_writes_its_format(task: str, tmp_path: Path, capsys: Any) -> None:
    references = [{"id": 7, "references": ["B"], "options": {"A": "x", "B": "y"}}] if task == "mmmu" else REFERENCES
    answers = [{"id": 7, "text": "(B)"}, {"id": 1, "text": "cat"}, {"id": 2, "text": "two"}]
    results = tmp_path / "results.json"
    main(["--task", task, *files(tmp_path, answers, references), "--results", str(results)])
    assert capsys.readouterr().out.count("\n") == len(BENCHMARKS[task].scores)
    written = json.loads(results.read_text())
    assert len(written) == len(references)
    if task in SUBMITTED:
        assert written[-1] == SUBMITTED[task]


def test_files_that_do_not_fit_are_refused(tmp_path: Path, capsys: Any) -> None:
    twice = [{"id": 1, "text": "x"}, {"id": 1, "text": "y"}]
    for answers, references, reason in (
        (twice, REFERENCES, "1 lines with the id of another"),
        ([], [{"id": 1}], 'has no "references"'),
        ([{"text": "x"}], REFERENCES, "no JSON lines with an id"),
        ([], [], "has no lines"),
    ):
        with pytest.raises(SystemExit):
            main(["--task", "exact", *files(tmp_path, answers, references)])
        assert reason in capsys.readouterr().err


_ASKED = "What?\nAnswer the question using a single word or phrase."
OFFICIAL: dict[str, tuple[list[Any], Any, str, list[str], str]] = {  # files, id, image, references, question
    "captions": (
        [
            {
                "images": [{"id": 9, "file_name": "a.jpg"}],
                "annotations": [
                    {"image_id": 9, "id": 1, "caption": "a cat"},
                    {"image_id": 9, "id": 2, "caption": "cat"},
                ],
            }
        ],
        *(9, "a.jpg", ["a cat", "cat"], "Provide a one-sentence caption for the provided image."),
    ),
    "vqav2": (
        [
            {"data_subtype": "val2014", "questions": [{"image_id": 42, "question": "What?", "question_id": 42000}]},
            {"annotations": [{"image_id": 42, "question_id": 42000, "answers": [{"answer": "cat", "answer_id": 1}]}]},
        ],
        *(42000, "COCO_val2014_000000000042.jpg", ["cat"], _ASKED),
    ),
    "textvqa": (
        [{"data": [{"question_id": 3, "image_id": "0a1", "question": "What?", "answers": ["x", "y"]}]}],
        *(3, "0a1.jpg", ["x", "y"], _ASKED),
    ),
    "chartqa": ([[{"imgname": "1.png", "query": "What?", "label": "14"}]], 0, "1.png", ["14"], _ASKED),
    "docvqa": (
        [{"data": [{"questionId": 5, "question": "What?", "image": "documents/x.png", "answers": ["a"]}]}],
        *(5, "documents/x.png", ["a"], _ASKED),
    ),
}


@pytest.mark.parametrize("task", OFFICIAL)
def test_official_files_become_questions_and_are_scored(task: str, tmp_path: Path, capsys: Any) -> None:
    contents, number, image, references, asked = OFFICIAL[task]
    paths = [str(tmp_path / f"official{place}.json") for place in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_text(json.dumps(content))
    written, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"id": number, "text": references[0]}) + "\n")
    common = ["--task", task, "--references", *paths]
    main([*common, "--questions", str(written), "--image-folder", "folder", "--answers", str(answers)])
    row = json.loads(written.read_text())
    assert row == {
        "id": number,
        "messages": [{"role": "user", "content": f"<image>\n{asked}"}],
        "images": [f"folder/{image}"],
    }
    assert read_benchmark_questions(task, paths)[0].references == references
    assert f"{task} {next(iter(BENCHMARKS[task].scores))}" in capsys.readouterr().out
    Path(paths[-1]).write_text('[{"other": 1}]')
    with pytest.raises(ConfigError, match=f"nor the official format of {task}"):
        read_benchmark_questions(task, paths)


def test_answers_of_vqav2_without_questions_are_scored_but_not_asked(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(OFFICIAL["vqav2"][0][1]))
    assert not read_benchmark_questions("vqav2", [str(path)])[0].messages
    with pytest.raises(SystemExit):
        main(["--task", "vqav2", "--references", str(path), "--questions", str(tmp_path / "out")])
    assert "give the file of questions too" in capsys.readouterr().err
