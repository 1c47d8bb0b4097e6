"""Launchers of the tasks: their flags fit together, and their samples are what the tasks read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.arguments import parse_args_unchecked
from megatron.core.config.flags.declare import config_from_namespace
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.models.describe import count_parameters
from megatron.core.tokenizers.build import build_tokenizer
from megatron.tasks.flags import TaskConfig, task_flag_defaults
from megatron.tasks.glue import read_glue_samples
from megatron.tasks.race import read_race_questions
from megatron.tasks.zeroshot import read_lambada_passages, read_perplexity_text
from tests.helpers.architecture import ROOT
from tests.helpers.flags import parse_args_or_raise, run_config_of_args
from tests.unit.tools_and_examples.test_launchers import bash, launch

FOLDER = ROOT / "examples/tasks"
SAMPLES = FOLDER / "data"
RECIPES: dict[str, dict[str, Any]] = {
    "MNLI": {"epochs": 5, "micro": 8, "lr": 5e-5, "warm": 0.065, "valid": 2, "train": 1},
    "RACE": {"epochs": 3, "micro": 4, "lr": 1e-5, "warm": 0.06, "valid": 2, "train": 2},
}
PATHS = ("pretrained", "vocab.txt", "data", "checkpoints")


def read(flags: list[str], ranks: int) -> tuple[TaskConfig, RunConfig]:
    """What tasks/main.py makes of its command line."""
    args = parse_args_or_raise(flags, world_size=ranks, extra=(TaskConfig,), defaults=task_flag_defaults(flags))
    return config_from_namespace(TaskConfig, args), run_config_of_args(args, ranks)


@pytest.mark.parametrize("name", RECIPES)
def test_the_large_launchers_have_megatrons_recipe(name: str, tmp_path: Path) -> None:
    command = launch(f"examples/tasks/finetune_{name.lower()}_distributed.sh", *PATHS, "--seed", "7", folder=tmp_path)
    task, config = read(command.flags, command.ranks)
    recipe = RECIPES[name]
    assert (command.ranks, task.task, task.epochs, config.train.seed) == (8, name, recipe["epochs"], 7)
    assert (len(task.train_data), len(task.valid_data)) == (recipe["train"], recipe["valid"])
    assert all(
        path.startswith(f"data/{'MNLI' if name == 'MNLI' else ''}") for path in (*task.train_data, *task.valid_data)
    )
    assert (config.train.micro_batch_size, config.schedule.lr, config.schedule.lr_warmup_fraction) == (
        recipe["micro"],
        recipe["lr"],
        recipe["warm"],
    )
    assert (config.checkpoint.pretrained_checkpoint, config.checkpoint.save, config.tokenizer.vocab_file) == (
        PATHS[0],
        PATHS[3],
        PATHS[1],
    )
    assert task.output_file == "checkpoints/predictions.jsonl" and config.precision.fp16
    assert count_parameters(config.model.with_vocabulary(30522, 1)).total == pytest.approx(340e6, rel=0.025)


@pytest.mark.parametrize("name", ["WIKITEXT103", "LAMBADA"])
def test_the_zero_shot_launcher_takes_the_network_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    words = (name, "saved", "v.json", "m.txt", "text", "--overlapping-eval", "8")
    command = launch("examples/tasks/evaluate_zeroshot_gpt.sh", *words, folder=tmp_path)
    args = parse_args_unchecked(command.flags, extra=(TaskConfig,), defaults=task_flag_defaults(command.flags))
    assert [problem for problem in args.problems if "holds no" not in problem] == [], "only the checkpoint is missing"
    assert (args.task, args.valid_data, args.strict_lambada, args.overlapping_eval) == (
        name,
        ["text"],
        name == "LAMBADA",
        8,
    )
    assert (args.load, args.use_checkpoint_args, args.vocab_file, args.merge_file) == ("saved", True, "v.json", "m.txt")


@pytest.mark.parametrize(
    "launcher", ["finetune_mnli_distributed.sh", "finetune_race_distributed.sh", "evaluate_zeroshot_gpt.sh"]
)
def test_a_launcher_without_its_arguments_says_what_it_needs(launcher: str, tmp_path: Path) -> None:
    done = bash([str(FOLDER / launcher)], tmp_path)
    assert done.returncode == 2
    assert f"bash examples/tasks/{launcher} " in done.stderr and "LAUNCH=echo" not in done.stderr.splitlines()[0]


@pytest.mark.parametrize("name", RECIPES)
def test_the_small_runs_need_nothing_but_the_repository(name: str, tmp_path: Path) -> None:
    command = launch(f"examples/tasks/finetune_{name.lower()}_small.sh", "--seed", "7", folder=tmp_path)
    task, config = read(command.flags, command.ranks)
    assert task.task == name and task.epochs == RECIPES[name]["epochs"] and config.train.seed == 7
    assert all(Path(path).exists() for path in (*task.train_data, *task.valid_data, config.tokenizer.vocab_file))
    assert config.model.num_layers <= 4 and config.model.hidden_size <= 256


def test_the_small_zero_shot_run_scores_both_tasks(tmp_path: Path) -> None:
    done = bash([str(FOLDER / "zeroshot_small.sh")], tmp_path, LAUNCH="echo")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "--task" in line]
    assert [line[line.index("--task") + 1] for line in lines] == ["WIKITEXT103", "LAMBADA"]
    assert all(Path(line[line.index("--valid-data") + 1]).is_file() for line in lines)


def test_the_samples_are_in_the_published_formats() -> None:
    for name, count in (("train", 480), ("dev_matched", 90), ("dev_mismatched", 90)):
        texts = read_glue_samples("MNLI", SAMPLES / f"MNLI/{name}.tsv")
        assert len(texts) == count and Counter(text.label for text in texts) == dict.fromkeys(range(3), count // 3)
    for folder, count in (("train/middle", 120), ("train/high", 120), ("dev/middle", 40), ("dev/high", 40)):
        questions = read_race_questions(SAMPLES / "RACE" / folder)
        assert len(questions) == count and set(question.label for question in questions) == set(range(4))
    tokenizer = build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(ROOT / "examples/data/demo-vocab.json"),
            merge_file=str(ROOT / "examples/data/demo-merges.txt"),
        )
    )
    assert len(read_lambada_passages([str(SAMPLES / "lambada.jsonl")], tokenizer, length=128, strict=True)) == 16
    windows, words = read_perplexity_text(str(SAMPLES / "wiki.valid.tokens"), tokenizer, length=128, stride=32)
    assert "1,900 whales" in tokenizer.detokenize(windows.ids.tolist()) and words > 400
