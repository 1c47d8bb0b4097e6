"""Benchmarks of language models that see: their official files, how a question is put, the scores, and the files of results.

    {"data": [{"question_id", "image_id", "question", "answers"}]}  ->  BenchmarkQuestion

Official files of right answers are read as they are published: COCO captions, VQAv2 (questions and annotations, or Megatron's list),
TextVQA, ChartQA, DocVQA. Any benchmark can be given as JSON lines instead, as `megatron generate` reads them, with an "id" and "references";
of multiple-choice questions (mmmu) also "options", a mapping of letters to texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.special_tokens import IMAGE
from megatron.core.datasets.storage import read_text_lines, write_file
from megatron.evaluation import vision_metrics
from megatron.evaluation.caption_tokens import tokenize_caption_for_metrics
from megatron.evaluation.mmmu_answers import open_answer_score, parse_chosen_option
from megatron.evaluation.vqa_accuracy import TEXTVQA_ACCURACIES, VQA_ACCURACIES, AccuracyRule

Message = Mapping[str, str]
_SHORT_ANSWER = f"{IMAGE}\n{{question}}\nAnswer the question using a single word or phrase."
_CAPTION = f"{IMAGE}\nProvide a one-sentence caption for the provided image."


@dataclass(frozen=True, slots=True)
class BenchmarkQuestion:
    """A question of a benchmark. number: its id. references: right answers. messages: the prompt; empty where the files
    give answers only. images: paths relative to the benchmark's folder. options: letter -> text, of multiple choice.
    """

    number: Any
    references: Sequence[str]
    messages: Sequence[Message] = ()
    images: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)


Scored = Sequence[tuple[str, BenchmarkQuestion]]  # answers to questions
Reader = Callable[[Sequence[Any], str], Iterable[BenchmarkQuestion]]


@dataclass(frozen=True, slots=True)
class VisionBenchmark:
    """How answers are scored. scores: name -> function of all answers. result: names of the id and the answer of an
    entry in the file that the official program reads; None: that file maps ids to answers. read: parses the official files; None: only
    JSON lines are read. prompt: the default one, with {question} in it.
    """

    scores: Mapping[str, Callable[[Scored], float]]
    result: tuple[str, str] | None = None
    read: Reader | None = None
    prompt: str = _SHORT_ANSWER


def _make_mean_scorer(score: Callable[[str, BenchmarkQuestion], float]) -> Callable[[Scored], float]:
    """Return a function that averages `score` over all answers."""
    return lambda rows: sum(score(answer, question) for answer, question in rows) / len(rows)


def _exact_match(answer: str, question: BenchmarkQuestion) -> float:
    """Return 1 if the answer equals a reference, without case and outer white space, else 0."""
    return float(answer.strip().lower() in [reference.strip().lower() for reference in question.references])


def _mmmu_answer_score(answer: str, question: BenchmarkQuestion) -> float:
    """Return 1 if the chosen option, or the open answer, is right, else 0."""
    if not question.options:
        return open_answer_score(answer, question.references)
    return float(parse_chosen_option(answer, question.options) in question.references)


def _make_corpus_caption_scorer(score: Callable[..., float]) -> Callable[[Scored], float]:
    """Return a function that scores all captions together, tokenized."""

    def score_captions(rows: Scored) -> float:
        return score(
            [tokenize_caption_for_metrics(answer) for answer, _ in rows],
            [list(map(tokenize_caption_for_metrics, question.references)) for _, question in rows],
        )

    return score_captions


def _build_prompt_messages(prompt: str, question: str = "") -> list[Message]:
    """Return a conversation of one user message: the prompt with the question filled in."""
    return [{"role": "user", "content": prompt.replace("{question}", question)}]


def _read_coco(files: Sequence[Any], prompt: str) -> Iterable[BenchmarkQuestion]:
    """Return the questions of COCO's caption annotations, one for each image."""
    names = {image["id"]: image["file_name"] for image in files[0]["images"]}
    captions: dict[Any, list[str]] = {number: [] for number in names}
    for annotation in files[0]["annotations"]:
        captions[annotation["image_id"]].append(annotation["caption"])
    return [
        BenchmarkQuestion(number, captions[number], _build_prompt_messages(prompt), [name])
        for number, name in names.items()
    ]


def _answer_texts(answers: Any) -> list[str]:
    """Return the texts of answers: a list or one alone, each a text or an object with `answer`."""
    several = answers if isinstance(answers, list) else [answers]
    return [str(one["answer"] if isinstance(one, Mapping) else one) for one in several]


def _row_reader(
    number: str,
    answers: str,
    question: str,
    image: str,
    rows_of: Callable[[Sequence[Any]], Iterable[Mapping[str, Any]]] = lambda files: files[0]["data"],
) -> Reader:
    """Return a reader of files with a row for each question, given the names of its fields. image: file name with
    {field} in it. rows_of: finds the rows in the files.
    """
    return lambda files, prompt: [
        BenchmarkQuestion(
            row[number],
            _answer_texts(row[answers]),
            _build_prompt_messages(prompt, row[question]),
            [image.format_map(row)],
        )
        for row in rows_of(files)
    ]


_read_megatron_vqav2 = _row_reader("question_id", "answer", "question", "{image}", lambda files: files[0])
_read_textvqa = _row_reader("question_id", "answers", "question", "{image_id}.jpg")
_read_docvqa = _row_reader("questionId", "answers", "question", "{image}")
_read_chartqa = _row_reader(
    "number",
    "label",
    "query",
    "{imgname}",
    lambda files: [{**row, "number": number} for number, row in enumerate(files[0])],
)


def _read_vqav2(files: Sequence[Any], prompt: str) -> Iterable[BenchmarkQuestion]:
    """Return the questions of VQAv2's files (annotations, and questions if given), or of Megatron's list."""
    if isinstance(files[0], list):
        return _read_megatron_vqav2(files, prompt)
    answers = next((file for file in files if "annotations" in file), None)
    if answers is None:
        raise KeyError("annotations")
    inquiries: Mapping[str, Any] = next((file for file in files if "questions" in file), {"questions": []})
    subtype = inquiries.get("data_subtype", "val2014")
    given = {row["question_id"]: row for row in inquiries["questions"]}
    return [
        BenchmarkQuestion(row["question_id"], _answer_texts(row["answers"]))
        if row["question_id"] not in given
        else BenchmarkQuestion(
            row["question_id"],
            _answer_texts(row["answers"]),
            _build_prompt_messages(prompt, given[row["question_id"]]["question"]),
            [f"COCO_{subtype}_{int(row['image_id']):012d}.jpg"],
        )
        for row in answers["annotations"]
    ]


def _make_accuracy_scorers(rules: Mapping[str, AccuracyRule]) -> Mapping[str, Callable[[Scored], float]]:
    """Return scorers of the mean accuracy by each of these rules."""

    def scorer(rule: AccuracyRule) -> Callable[[Scored], float]:
        return _make_mean_scorer(lambda answer, one: rule(answer, one.references))

    return {f"accuracy ({name})": scorer(rule) for name, rule in rules.items()}


_RELAXED = _make_mean_scorer(
    lambda answer, one: max(vision_metrics.relaxed_accuracy(answer, reference) for reference in one.references)
)
BENCHMARKS: Mapping[str, VisionBenchmark] = MappingProxyType(
    {
        "vqav2": VisionBenchmark(_make_accuracy_scorers(VQA_ACCURACIES), ("question_id", "answer"), _read_vqav2),
        "textvqa": VisionBenchmark(
            _make_accuracy_scorers(TEXTVQA_ACCURACIES), ("question_id", "answer"), _read_textvqa
        ),
        "chartqa": VisionBenchmark({"relaxed accuracy": _RELAXED}, None, _read_chartqa),
        "docvqa": VisionBenchmark(
            {"ANLS": _make_mean_scorer(lambda answer, one: vision_metrics.anls_score(answer, one.references))},
            ("questionId", "answer"),
            _read_docvqa,
        ),
        "mmmu": VisionBenchmark({"accuracy": _make_mean_scorer(_mmmu_answer_score)}),
        "exact": VisionBenchmark({"accuracy": _make_mean_scorer(_exact_match)}),
        "captions": VisionBenchmark(
            {
                "CIDEr": _make_corpus_caption_scorer(vision_metrics.cider),
                **{
                    f"BLEU-{n}": _make_corpus_caption_scorer(partial(vision_metrics.bleu, longest=n))
                    for n in (1, 2, 3, 4)
                },
                "ROUGE-L": _make_corpus_caption_scorer(vision_metrics.mean_rouge_l),
            },
            ("image_id", "caption"),
            _read_coco,
            _CAPTION,
        ),
    }
)


def read_benchmark_questions(task: str, paths: Sequence[str], prompt: str | None = None) -> list[BenchmarkQuestion]:
    """Read a benchmark's questions from its official files or JSON lines. prompt: text with {question}, or the default.

    Raises `ConfigError` for files that are neither, lack references, or have an id twice.
    """
    benchmark, where = BENCHMARKS[task], ", ".join(paths)
    try:
        files = [read_text_lines(path) for path in paths]
        contents = [_parse_if_single_json("\n".join(lines)) for lines in files]
        if all(content is None for content in contents):
            result = [_parse_question_line(json.loads(line)) for lines in files for line in lines if line.strip()]
        elif benchmark.read is None:
            raise ConfigError(
                f"{where}: {task} has no official file that is read; give JSON lines with an id and references"
            )
        else:
            result = list(benchmark.read(contents, prompt or benchmark.prompt))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{where} holds neither JSON lines with an id nor the official format of {task}: {type(error).__name__}: {error}"
        ) from None
    _check_questions(result, where)
    return result


def _check_questions(questions: Sequence[BenchmarkQuestion], where: str) -> None:
    """Raise `ConfigError` if a question lacks references, ids are not unique, or there are none."""
    if lacking := [question for question in questions if not question.references]:
        raise ConfigError(f'{where}: the line of {lacking[0].number!r} has no "references"')
    if len({question.number for question in questions}) < len(questions):
        raise ConfigError(f"{where} has lines with the id of another; ids must differ")
    if not questions:
        raise ConfigError(f"{where} has no lines")


def _parse_if_single_json(text: str) -> Any:
    """Return the content of a file that is one JSON value; None for JSON lines."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return None if isinstance(content, Mapping) and "id" in content else content


def _parse_question_line(row: Mapping[str, Any]) -> BenchmarkQuestion:
    """Return the question of a JSON line's object. Raises `KeyError` or `TypeError` if it is invalid."""
    references = row.get("references", [])
    if not isinstance(references, list):
        raise TypeError("references are no list")
    return BenchmarkQuestion(
        row["id"], list(map(str, references)), row.get("messages", ()), row.get("images", ()), row.get("options") or {}
    )


def score_benchmark_answers(task: str, rows: Scored) -> dict[str, float]:
    """Return the scores of answers in percent, by name."""
    return {name: 100 * score(rows) for name, score in BENCHMARKS[task].scores.items()}


def write_official_answer_file(task: str, rows: Scored, path: Path) -> None:
    """Write answers to `path` in the format that the benchmark's official program reads."""
    names = BENCHMARKS[task].result
    content: Any = (
        {question.number: answer for answer, question in rows}
        if names is None
        else [dict(zip(names, (question.number, answer))) for answer, question in rows]
    )
    write_file(path, json.dumps(content, ensure_ascii=False) + "\n")
