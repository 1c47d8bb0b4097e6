"""A benchmark that a language model that sees answers at every evaluation of its training: the YAML file of --online-evaluation-config.

    task: TextVQA
    gt_path: TextVQA_0.5.1_val.json       official files, or JSON lines (`vision_benchmarks.py`)
    input_image_path: train_images
    num_samples_per_partition: 200        the first 200 questions; left out: all
    out_seq_length: 16

Keys and names of tasks are those of Megatron's example. The answers are written to output_path in the format of the official program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.base import Tokenizer, read_flag_file_text
from megatron.evaluation.vision_benchmarks import (
    BENCHMARKS,
    BenchmarkQuestion,
    read_benchmark_questions,
    score_benchmark_answers,
    write_official_answer_file,
)
from megatron.inference.eval_generate import EvaluationPrompts, encode_image_question, generate_continuation_texts
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.sampling import SamplingParams

# Megatron's name -> ours, where they differ by more than case.
_TASKS = {"captioning": "captions", "spdocvqa": "docvqa"}
_FLAG = "--online-evaluation-config"


@dataclass(frozen=True, slots=True)
class OnlineEvaluationConfig:
    """The content of the file. gt_path: a path, or several. prompt: how a question is put; None: as the benchmark does.

    temperature is 0 unless given (in Megatron 1): the likeliest answer is scored.
    """

    task: str
    gt_path: str | list[str]
    input_image_path: str = ""
    output_path: str | None = None
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    out_seq_length: int = 32
    num_partitions: int = 1
    partition_id: int = 0
    num_samples_per_partition: int = 0
    prompt: str | None = None

    @staticmethod
    def read_yaml_config(path: str) -> OnlineEvaluationConfig:
        """Read and check the YAML file of --online-evaluation-config. Raises `ConfigError` that names what is wrong."""
        try:
            content = yaml.safe_load(read_flag_file_text(path, _FLAG))
        except yaml.YAMLError as error:
            raise ConfigError(f"{_FLAG} {path} is no YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{_FLAG} {path} holds no mapping")
        known = {field.name: field for field in fields(OnlineEvaluationConfig)}
        if strange := [str(key) for key in content if key not in known]:
            raise ConfigError(f"{_FLAG} {path}: {', '.join(strange)} is not known; keys are {', '.join(known)}")
        if lacking := [key for key in ("task", "gt_path") if not content.get(key)]:
            raise ConfigError(f"{_FLAG} {path} lacks {' and '.join(lacking)}")
        task = str(content["task"]).lower()
        task = _TASKS.get(task, task)
        if task not in BENCHMARKS:
            names = ", ".join([*BENCHMARKS, *_TASKS])
            raise ConfigError(f"{_FLAG} {path}: the task {content['task']} is not known; tasks are {names}")
        result = OnlineEvaluationConfig(**{**content, "task": task})
        result._check_values(path)
        return result

    def _check_values(self, path: str) -> None:
        """Raise `ConfigError` for numbers of a wrong type or range. path: the file, for the message."""
        least = {
            "top_k": 0,
            "out_seq_length": 1,
            "num_partitions": 1,
            "partition_id": 0,
            "num_samples_per_partition": 0,
        }
        problems = [
            f"{name} {getattr(self, name)!r} is no whole number from {low} on"
            for name, low in least.items()
            if type(getattr(self, name)) is not int or getattr(self, name) < low
        ]
        problems += [
            f"{name} {getattr(self, name)!r} is no number"
            for name in ("temperature", "top_p")
            if type(getattr(self, name)) not in (int, float)
        ]
        if problems:
            raise ConfigError("\n".join(f"{_FLAG} {path}: {problem}" for problem in problems))

    def select_questions(self) -> list[BenchmarkQuestion]:
        """Return the benchmark's questions of this partition. `ConfigError` if it is empty, or a question has no text."""
        paths = [self.gt_path] if isinstance(self.gt_path, str) else list(self.gt_path)
        every = read_benchmark_questions(self.task, paths, self.prompt)
        if any(not question.messages for question in every):
            raise ConfigError(f"{', '.join(paths)} holds answers without questions; give the file of questions too")
        size = self.num_samples_per_partition or -(-len(every) // self.num_partitions)
        chosen = every[self.partition_id * size :][:size]
        if not chosen:
            raise ConfigError(f"partition {self.partition_id} of {len(every)} questions is empty")
        return chosen


def build_online_evaluation(
    path: str, written: ImagePromptWriter, tokenizer: Tokenizer, *, positions: int, seed: int, save: str | None
) -> tuple[str, Callable[[Sequence[Any], int], dict[str, float]]]:
    """Return (task name, function that evaluates) for a config file; the function takes (this rank's stages,
    iteration), generates and scores the answers, and returns scores in percent by name. Collective.

    written: writes prompts with images. positions: the network's. seed: of sampling. save: answers go to its
    `online_eval` subfolder unless the file has an output_path; None: they are not written.
    """
    config = OnlineEvaluationConfig.read_yaml_config(path)
    questions = config.select_questions()
    room = positions - config.out_seq_length
    prompts_written = [
        encode_image_question(
            one.messages,
            one.images,
            written,
            config.input_image_path,
            where=f"{_FLAG} {path}, question {one.number!r}",
            positions=room,
        )
        for one in questions
    ]
    ids, images = zip(*prompts_written, strict=True)
    sampling = SamplingParams(config.temperature, config.top_k, config.top_p)
    prompts = EvaluationPrompts(("",) * len(ids), ids, config.out_seq_length, sampling, seed, images=images)
    folder = config.output_path or (None if save is None else str(Path(save) / "online_eval"))

    def generate_and_score_answers(stages: Sequence[Any], iteration: int) -> dict[str, float]:
        answers = [answer.strip() for answer in generate_continuation_texts(stages, tokenizer, prompts)]
        rows = list(zip(answers, questions, strict=True))
        if folder is not None and stages[0].build.mesh.world.is_first:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_official_answer_file(config.task, rows, Path(folder) / f"{config.task}-{iteration:07d}.json")
        return score_benchmark_answers(config.task, rows)

    return config.task, generate_and_score_answers
