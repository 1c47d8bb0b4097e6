"""Score answers about images by the definition of a benchmark, and write them in its own format.

    python tools/generate.py --load vlm --input questions.jsonl --output answers.jsonl --temperature 0
    python tools/evaluate_vlm.py --task vqav2 --answers answers.jsonl --references references.jsonl --results results.json

A line of the answers has an "id" and a "text", as tools/generate.py writes them. A line of the references has the same "id" and
"references", a list of texts; of multiple-choice questions (mmmu) also "options", a mapping of letters to texts. An answer that is missing
or an error counts as wrong, and is reported. VQA is counted in both ways in use, each by its name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.flags import ConfigError
from megatron.evaluation import vision
from megatron.tools.parser import ToolParser
from megatron.training.launch.launch_info import end_in_a_line_when_interrupted

Rows = Sequence[tuple[str, Mapping[str, Any]]]  # (answer, line of the references)


def _mean_score(score: Callable[[str, Mapping[str, Any]], float]) -> Callable[[Rows], float]:
    return lambda rows: sum(score(answer, row) for answer, row in rows) / len(rows)


def _exact_match(answer: str, row: Mapping[str, Any]) -> float:
    return float(answer.strip().lower() in [reference.strip().lower() for reference in row["references"]])


def _mmmu_score(answer: str, row: Mapping[str, Any]) -> float:
    options = row.get("options")
    if not options:
        return vision.open_answer(answer, row["references"])
    return float(vision.chosen_option(answer, options) in row["references"])


def _caption_score(score: Callable[..., float]) -> Callable[[Rows], float]:
    def of(rows: Rows) -> float:
        given = [vision.caption_tokens(answer.rstrip(".")) for answer, _ in rows]
        return score(given, [[vision.caption_tokens(one) for one in row["references"]] for _, row in rows])

    return of


VQA = {
    "accuracy (official, nine of ten)": _mean_score(lambda answer, row: vision.vqa(answer, row["references"])),
    "accuracy (all ten)": _mean_score(lambda answer, row: vision.vqa(answer, row["references"], leave_one_out=False)),
}
TASKS: Mapping[str, Mapping[str, Callable[[Rows], float]]] = {
    "vqav2": VQA,
    "textvqa": VQA,
    "chartqa": {
        "relaxed accuracy": _mean_score(
            lambda answer, row: max(vision.relaxed(answer, one) for one in row["references"])
        )
    },
    "docvqa": {"ANLS": _mean_score(lambda answer, row: vision.anls(answer, row["references"]))},
    "mmmu": {"accuracy": _mean_score(_mmmu_score)},
    "exact": {"accuracy": _mean_score(_exact_match)},
    "captions": {
        "CIDEr": _caption_score(vision.cider),
        "BLEU-4": _caption_score(vision.bleu),
        "ROUGE-L": _caption_score(vision.rouge_l),
    },
}
# What the official programs read: task -> the line of an answer.
RESULTS: Mapping[str, Callable[[Any, str], Mapping[str, Any]]] = {
    "vqav2": lambda number, answer: {"question_id": number, "answer": answer},
    "textvqa": lambda number, answer: {"question_id": number, "answer": answer},
    "docvqa": lambda number, answer: {"questionId": number, "answer": answer},
    "captions": lambda number, answer: {"image_id": number, "caption": answer},
}


def read(path: str) -> dict[Any, Mapping[str, Any]]:
    """The lines of a file by their id."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        result = {row["id"]: row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no JSON lines with an id: {error}") from None
    if len(result) < len(rows):
        raise ConfigError(f"{path} has {len(rows) - len(result)} lines with the id of another; ids must differ")
    return result


def evaluate(task: str, answers: str, references: str, results: Path | None) -> list[str]:
    """Score and write; a line for each score."""
    given, expected = read(answers), read(references)
    for number, row in expected.items():
        if not isinstance(row.get("references"), list) or not row["references"]:
            raise ConfigError(f'{references}: the line of {number!r} has no "references"')
    if not expected:
        raise ConfigError(f"{references} has no lines")
    rows = [(str(given.get(number, {}).get("text", "")).strip(), row) for number, row in expected.items()]
    lacking = sum("text" not in given.get(number, {}) for number in expected)
    if results is not None:
        line = RESULTS.get(task)
        texts = {number: answer for number, (answer, _) in zip(expected, rows, strict=True)}
        content: Any = texts if line is None else [line(number, answer) for number, answer in texts.items()]
        results.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = [f"{task} {name}: {100 * score(rows):.2f} of {len(rows)} answers" for name, score in TASKS[task].items()]
    return lines + ([f"{lacking} answers are missing or errors, and count as wrong"] if lacking else [])


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the tool."""
    end_in_a_line_when_interrupted()
    made = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("--task", required=True, choices=TASKS, help="whose definition holds")
    made.add_argument("--answers", required=True, metavar="FILE", help="what tools/generate.py wrote")
    made.add_argument("--references", required=True, metavar="FILE", help="right answers, a JSON object a line")
    made.add_argument("--results", type=Path, metavar="FILE", help="write the answers for the official program")
    args = made.parse_args(arguments)
    try:
        print("\n".join(evaluate(args.task, args.answers, args.references, args.results)))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(1) from None
