"""--online-evaluation-config: the YAML file, and a benchmark that a network answers between two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.core.config.flags.declare import ConfigError
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.evaluation.online import OnlineEvaluationConfig, build_online_evaluation
from megatron.inference.image_prompts import ImagePromptWriter
from tests.unit.datasets.test_images import content, picture
from tests.unit.inference.serving import stages_on
from tests.unit.inference.test_images import SEEING

SIZES = {**SEEING, "max_position_embeddings": 96, "seq_length": 96}


def config(folder: Path, **changes: Any) -> str:
    """A file of a benchmark of three questions about one picture, in TextVQA's format."""
    (folder / "0a.jpg").write_bytes(content(picture(20, 30), "JPEG"))
    rows = [{"question_id": n, "image_id": "0a", "question": f"Q{n}?", "answers": ["x"] * 10} for n in range(3)]
    (folder / "gt.json").write_text(json.dumps({"data": rows}))
    given = {
        "task": "TextVQA",
        "gt_path": str(folder / "gt.json"),
        "input_image_path": str(folder),
        "out_seq_length": 3,
        "prompt": "<image>{question}",
    }
    (folder / "online.yaml").write_text(yaml.safe_dump({**given, **changes}))
    return str(folder / "online.yaml")


def opened(path: str, positions: int = 96, save: str | None = None) -> Any:
    stages = stages_on(1, 257, **SIZES)
    written = ImagePromptWriter.from_model(
        stages[0].build.model, ByteTokenizer(), {"sft_tokenizer_prompt_format": "chatml"}
    )
    return stages, build_online_evaluation(path, written, ByteTokenizer(), positions=positions, seed=1, save=save)


def test_answers_are_scored_and_written_for_the_official_program(tmp_path: Path) -> None:
    stages, (task, evaluate) = opened(config(tmp_path, num_samples_per_partition=2), save=str(tmp_path / "run"))
    scores = evaluate(stages, 40)
    assert task == "textvqa" and scores == {"accuracy (official, nine of ten)": 0.0, "accuracy (all ten)": 0.0}
    written = json.loads((tmp_path / "run" / "online_eval" / "textvqa-0000040.json").read_text())
    assert [row["question_id"] for row in written] == [0, 1] and all(isinstance(row["answer"], str) for row in written)
    rows = json.loads((tmp_path / "gt.json").read_text())["data"]
    right = {"data": [{**row, "answers": [one["answer"]] * 10} for row, one in zip(rows, written)]}
    (tmp_path / "gt.json").write_text(json.dumps(right))
    again, (_, evaluate) = opened(str(tmp_path / "online.yaml"))
    assert set(evaluate(again, 41).values()) == {100.0} and not (tmp_path / "online_eval").exists()


@pytest.mark.parametrize("partition, numbers", [(0, [0, 1]), (1, [2])])
def test_partitions_share_the_questions(tmp_path: Path, partition: int, numbers: list[int]) -> None:
    path = config(tmp_path, num_partitions=2, partition_id=partition)
    assert [one.number for one in OnlineEvaluationConfig.read_yaml_config(path).select_questions()] == numbers


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"task": "VideoMME"}, "the task VideoMME is not known; tasks are vqav2"),
        ({"gt_path": None}, "lacks gt_path"),
        ({"out_seq_len": 3}, "out_seq_len is not known; keys are task"),
        ({"out_seq_length": 0, "partition_id": "a"}, "(?s)out_seq_length 0 is no whole number.*partition_id 'a'"),
        ({"temperature": "hot"}, "temperature 'hot' is no number"),
        ({"temperature": -1.0}, "temperature -1.0 is negative"),
        ({"input_image_path": "nowhere"}, "question 0 is no question about images: ImageError: it cannot be opened"),
        ({"out_seq_length": 90}, "more than the 6 positions"),
        ({"partition_id": 3}, "partition 3 of 3 questions is empty"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_before_training(tmp_path: Path, changes: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        opened(config(tmp_path, **changes))
