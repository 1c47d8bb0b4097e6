"""Score answers about images by the definition of a benchmark, and write them in its own format.

    python tools/evaluate_vlm.py --task textvqa --references TextVQA_0.5.1_val.json --image-folder images --questions questions.jsonl
    python tools/generate.py --load vlm --input questions.jsonl --output answers.jsonl --num-tokens 16 --temperature 0
    python tools/evaluate_vlm.py --task textvqa --references TextVQA_0.5.1_val.json --answers answers.jsonl --results results.json

A line of the answers has an "id" and a "text", as tools/generate.py writes them. References are the official files of a benchmark (of
VQAv2 both files), or JSON lines with the same "id" and "references", a list of texts; of multiple-choice questions (mmmu) also "options", a
mapping of letters to texts. An answer that is missing or an error counts as wrong, and is reported. VQA is counted in both ways in use, each
by its name.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.flags import ConfigError
from megatron.evaluation.benchmarks import BENCHMARKS, Question, read_questions, scores, write_results
from megatron.tools.parser import ToolParser
from megatron.training.launch.launch_info import install_interrupt_handler


def read_lines_by_id(path: str) -> dict[Any, Mapping[str, Any]]:
    """The lines of a file by their id."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        result = {row["id"]: row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no JSON lines with an id: {error}") from None
    if len(result) < len(rows):
        raise ConfigError(f"{path} has {len(rows) - len(result)} lines with the id of another; ids must differ")
    return result


def evaluate(task: str, answers: str, questions: Sequence[Question], results: Path | None) -> list[str]:
    """Score and write; a line for each score."""
    given = read_lines_by_id(answers)
    rows = [(str(given.get(one.number, {}).get("text", "")).strip(), one) for one in questions]
    lacking = sum("text" not in given.get(one.number, {}) for one in questions)
    if results is not None:
        write_results(task, rows, results)
    lines = [f"{task} {name}: {score:.2f} of {len(rows)} answers" for name, score in scores(task, rows).items()]
    return lines + ([f"{lacking} answers are missing or errors, and count as wrong"] if lacking else [])


def write_prompts(questions: Sequence[Question], folder: str, path: Path) -> None:
    """Questions as tools/generate.py reads them."""
    if mute := [one for one in questions if not one.messages]:
        raise ConfigError(f"{mute[0].number!r} is an answer without a question; give the file of questions too")
    rows = [
        {"id": one.number, "messages": one.messages, "images": [os.path.join(folder, name) for name in one.images]}
        for one in questions
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the tool."""
    install_interrupt_handler()
    made = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("--task", required=True, choices=BENCHMARKS, help="whose definition holds")
    made.add_argument("--references", required=True, nargs="+", metavar="FILE", help="official files, or JSON lines")
    made.add_argument("--answers", metavar="FILE", help="what tools/generate.py wrote, to be scored")
    made.add_argument("--results", type=Path, metavar="FILE", help="write the answers for the official program")
    made.add_argument("--questions", type=Path, metavar="FILE", help="write the questions for tools/generate.py")
    made.add_argument("--image-folder", default="", metavar="FOLDER", help="--questions: that paths of images begin at")
    made.add_argument(
        "--prompt", help="--questions: how one is put, with <image> and {question} in it; left out: LLaVA's way"
    )
    args = made.parse_args(arguments)
    try:
        if args.answers is None and args.questions is None:
            raise ConfigError("nothing to do; give --answers to be scored, or --questions to be written")
        questions = read_questions(args.task, args.references, args.prompt)
        if args.questions is not None:
            write_prompts(questions, args.image_folder, args.questions)
        if args.answers is not None:
            print("\n".join(evaluate(args.task, args.answers, questions, args.results)))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(1) from None
