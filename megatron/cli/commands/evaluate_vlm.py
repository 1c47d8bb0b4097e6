"""Score answers about images by the definition of a benchmark, and write them in its own format.

    megatron evaluate-vlm --task textvqa --references TextVQA_0.5.1_val.json --image-folder images --questions questions.jsonl
    megatron generate --load vlm --input questions.jsonl --output answers.jsonl --num-tokens 16 --temperature 0
    megatron evaluate-vlm --task textvqa --references TextVQA_0.5.1_val.json --answers answers.jsonl --results results.json

A line of the answers has an "id" and a "text", as `megatron generate` writes them. References are the official files of a benchmark (of
VQAv2 both files), or JSON lines with the same "id" and "references", a list of texts; of multiple-choice questions (mmmu) also "options", a
mapping of letters to texts. An answer that is missing or an error counts as wrong, and is reported. VQA is counted in both ways in use, each
by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.cli.tool_parser import ToolArgumentParser, exit_on
from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.storage import read_text_lines, write_file
from megatron.evaluation.vision_benchmarks import (
    BENCHMARKS,
    BenchmarkQuestion,
    read_benchmark_questions,
    score_benchmark_answers,
    write_official_answer_file,
)
from megatron.training.launch.launch_info import install_interrupt_excepthook


def read_lines_by_id(path: str) -> dict[Any, Mapping[str, Any]]:
    """Return the JSON lines of a file by their id. `ConfigError` if an id is missing or repeated."""
    try:
        rows = [json.loads(line) for line in read_text_lines(path) if line.strip()]
        result = {row["id"]: row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no JSON lines with an id: {error}") from None
    if len(result) < len(rows):
        raise ConfigError(f"{path} has {len(rows) - len(result)} lines with the id of another; ids must differ")
    return result


def benchmark_score_lines(
    task: str, answers: str, questions: Sequence[BenchmarkQuestion], results: Path | None
) -> list[str]:
    """Score a task's answers, and write them for its official program into `results`. Return a line for each score."""
    given = read_lines_by_id(answers)
    rows = [(str(given.get(one.number, {}).get("text", "")).strip(), one) for one in questions]
    lacking = sum("text" not in given.get(one.number, {}) for one in questions)
    if results is not None:
        write_official_answer_file(task, rows, results)
    lines = [
        f"{task} {name}: {score:.2f} of {len(rows)} answers"
        for name, score in score_benchmark_answers(task, rows).items()
    ]
    return lines + ([f"{lacking} answers are missing or errors, and count as wrong"] if lacking else [])


def write_questions_as_prompts(questions: Sequence[BenchmarkQuestion], folder: str, path: Path) -> None:
    """Write questions as JSON lines that `megatron generate` reads. `ConfigError` if one has no text."""
    if mute := [one for one in questions if not one.messages]:
        raise ConfigError(f"{mute[0].number!r} is an answer without a question; give the file of questions too")
    rows = [
        {"id": one.number, "messages": one.messages, "images": [os.path.join(folder, name) for name in one.images]}
        for one in questions
    ]
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the questions, print the scores, or both, as the flags ask."""
    install_interrupt_excepthook()
    made = ToolArgumentParser(description=__doc__)
    made.add_argument("--task", required=True, choices=BENCHMARKS, help="whose definition holds")
    made.add_argument("--references", required=True, nargs="+", metavar="FILE", help="official files, or JSON lines")
    made.add_argument("--answers", metavar="FILE", help="what megatron generate wrote, to be scored")
    made.add_argument("--results", type=Path, metavar="FILE", help="write the answers for the official program")
    made.add_argument("--questions", type=Path, metavar="FILE", help="write the questions for megatron generate")
    made.add_argument("--image-folder", default="", metavar="FOLDER", help="--questions: that paths of images begin at")
    made.add_argument(
        "--prompt", help="--questions: how one is put, with <image> and {question} in it; left out: LLaVA's way"
    )
    args = made.parse_args(arguments)
    with exit_on(ConfigError, OSError):
        if args.answers is None and args.questions is None:
            raise ConfigError("nothing to do; give --answers to be scored, or --questions to be written")
        questions = read_benchmark_questions(args.task, args.references, args.prompt)
        if args.questions is not None:
            write_questions_as_prompts(questions, args.image_folder, args.questions)
        if args.answers is not None:
            print("\n".join(benchmark_score_lines(args.task, args.answers, questions, args.results)))
