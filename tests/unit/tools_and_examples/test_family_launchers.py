"""Launchers of published architectures: their flags fit together on their machines, and describe what was published."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.families.registry import FAMILIES, lost_settings
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.parallel.boxes import whole_box
from megatron.plan.command import parse_training_command
from tests.helpers.architecture import ROOT
from tests.unit.families.test_settings import PUBLISHED
from tests.unit.tools_and_examples.test_launchers import bash, launch

FOLDERS = ("llama", "mistral", "mixtral", "deepseek", "qwen", "gpt_oss", "nemotron")
ALL = sorted(
    path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / "examples" / folder).glob("*.sh")
)
SMALL = [path for path in ALL if "small" in path]
PATHS = ("checkpoints", "tensorboard", "tokenizer", "corpus_text_document")
# Machines, rows of the vocabulary, parameters in billions as published, and the family.
LARGE = {
    "llama/train_llama3_8b.sh": (1, 128256, 8.03, "llama"),
    "llama/train_llama3_70b.sh": (8, 128256, 70.6, "llama"),
    "llama/train_llama3_405b.sh": (64, 128256, 405.9, "llama"),
    "mixtral/train_mixtral_8x7b.sh": (4, 32000, 46.7, "mixtral"),
    "mistral/train_mistral_7b.sh": (1, 32000, 7.24, "mistral"),
    "deepseek/train_deepseek_v2.sh": (32, 102400, 235.7, "deepseek_v2"),
    "deepseek/train_deepseek_v2_lite.sh": (1, 102400, 15.7, "deepseek_v2"),
    "deepseek/train_deepseek_v3.sh": (128, 129280, 671 + 11.5, "deepseek_v3"),
    "qwen/train_qwen2.5_7b.sh": (1, 152064, 7.62, "qwen2"),
    "qwen/train_qwen3_8b.sh": (1, 151936, 8.19, "qwen3"),
    "qwen/train_qwen3_30b_a3b.sh": (4, 151936, 30.5, "qwen3_moe"),
    "qwen/train_qwen3_next_80b_a3b.sh": (8, 151936, 79.7, "qwen3_next"),
    "nemotron/train_nemotron_h_8b.sh": (4, 131072, 8.10, "nemotron_h"),
    "nemotron/train_nemotron_h_47b.sh": (16, 131072, 46.8, "nemotron_h"),
    "gpt_oss/train_gpt_oss_20b.sh": (1, 201088, 20.9, "gpt_oss"),
    "gpt_oss/train_gpt_oss_120b.sh": (8, 201088, 116.8, "gpt_oss"),
}
# Launchers of the same networks with adapters: parameters in millions that are trained.
LORA = {"lora/train_llama3_8b.sh": ("llama", 83.9), "lora/train_qwen3_30b_a3b.sh": ("qwen3_moe", 26.7)}
SAME = {
    "mistral/train_mistral_7b.sh": "Mistral 7B v0.1",
    "deepseek/train_deepseek_v2.sh": "DeepSeek V2",
    "mixtral/train_mixtral_8x7b.sh": "Mixtral 8x7B",
    "deepseek/train_deepseek_v2_lite.sh": "DeepSeek V2 Lite",
    "deepseek/train_deepseek_v3.sh": "DeepSeek V3",
    "gpt_oss/train_gpt_oss_20b.sh": "gpt-oss 20b",
}


def test_every_launcher_is_known() -> None:
    assert ALL == sorted([*SMALL, *(f"examples/{name}" for name in LARGE)])
    assert {Path(path).parent.name for path in SMALL} == {*FOLDERS} - {"mistral"}  # a Llama with a window


@pytest.mark.parametrize("name", LARGE)
def test_a_large_launcher_fits_its_machines_and_describes_the_published_network(name: str, tmp_path: Path) -> None:
    machines, rows, billions, family = LARGE[name]
    command = launch(f"examples/{name}", *PATHS, folder=tmp_path)
    config = command.config()
    assert command.ranks == 8 * machines
    assert (config.checkpoint.save, config.checkpoint.load, config.log.tensorboard_dir) == (
        PATHS[0],
        PATHS[0],
        PATHS[1],
    )
    assert (config.tokenizer.tokenizer_model, config.data.data_path) == (PATHS[2], (PATHS[3],))
    model = config.model.with_vocabulary(rows, 1)
    assert sum(
        whole_box(shape).num_elements for shape in global_parameter_shapes(model).values()
    ) / 1e9 == pytest.approx(billions, rel=0.006)
    assert lost_settings(model, FAMILIES[family]) == []


@pytest.mark.parametrize("name", LORA)
def test_a_launcher_with_adapters_trains_them_beside_the_published_network(name: str, tmp_path: Path) -> None:
    family, millions = LORA[name]
    command = launch(f"examples/{name}", *PATHS, "--lr", "0.125", folder=tmp_path)
    config = command.config()
    assert command.ranks == 8 and config.schedule.lr == 0.125
    assert config.checkpoint.pretrained_checkpoint == config.tokenizer.tokenizer_model == PATHS[2]
    model = config.model.with_vocabulary(128256, 1)
    shapes = {
        name: shape
        for name, shape in global_parameter_shapes(model).items()
        if is_trained_parameter(name, model.adapter)
    }
    assert sum(whole_box(shape).num_elements for shape in shapes.values()) / 1e6 == pytest.approx(millions, rel=0.01)
    assert lost_settings(replace(model, adapter=AdapterConfig()), FAMILIES[family]) == []
    done = bash([str(ROOT / "examples" / name)], tmp_path)
    assert done.returncode == 2 and f"bash examples/{name} CHECKPOINTS" in done.stderr and "LAUNCH=echo" in done.stderr


def test_the_launcher_of_preferences_trains_the_published_network_beside_its_reference(tmp_path: Path) -> None:
    name = "examples/dpo/train_llama3_8b.sh"
    printed = bash([str(ROOT / name), *PATHS, "--lr", "0.125"], tmp_path, LAUNCH="echo torchrun").stdout
    command = parse_training_command(shlex.split(printed))
    assert not command.unread and command.setting is not None and command.finetuning is not None
    config = command.setting.with_elastic_layout().config.resolve(8)
    assert command.setting.world_size == 8 and config.schedule.lr == 0.125
    assert (command.finetuning.finetune_task, config.checkpoint.save_best) == ("dpo", "loss")
    assert config.checkpoint.pretrained_checkpoint == config.tokenizer.tokenizer_model == PATHS[2]
    config = replace(config, model=config.model.with_vocabulary(128256, 2))
    assert lost_settings(config.model, FAMILIES["llama"]) == []
    reference = command.beside(config, 8)["reference"]  # half of the matrices, and all norms, in 16 bits
    assert reference == pytest.approx(8.03e9, rel=0.01)
    done = bash([str(ROOT / name)], tmp_path)
    assert done.returncode == 2 and f"bash {name} CHECKPOINTS" in done.stderr and "LAUNCH=echo" in done.stderr


@pytest.mark.parametrize("name", SAME)
def test_the_config_of_a_large_launcher_is_the_published_one(name: str, tmp_path: Path) -> None:
    published, (_, _, _, family) = PUBLISHED[SAME[name]], LARGE[name]
    model = (
        launch(f"examples/{name}", *PATHS, folder=tmp_path).config().model.with_vocabulary(published["vocab_size"], 1)
    )
    found = FAMILIES[family].to_hf_config(model, published)
    trained = ("attention_dropout", "initializer_range")  # how it is trained says nothing of the network
    assert {key: found.get(key) for key in published if key not in trained and published[key] is not False} == {
        key: value for key, value in published.items() if key not in trained and value is not False
    }


@pytest.mark.parametrize("path", [f"examples/{name}" for name in LARGE])
def test_flags_after_the_arguments_win_and_without_arguments_it_says_what_it_needs(path: str, tmp_path: Path) -> None:
    command = launch(path, *PATHS, "--lr", "0.125", "--seed", "7", folder=tmp_path, NODE_RANK="1")
    assert (command.config().schedule.lr, command.config().train.seed) == (0.125, 7)
    done = bash([str(ROOT / path)], tmp_path)
    assert done.returncode == 2 and f"bash {path} CHECKPOINTS" in done.stderr and "LAUNCH=echo" in done.stderr


@pytest.mark.parametrize("path", SMALL)
def test_a_small_run_needs_nothing_but_the_repository_and_can_be_published(path: str, tmp_path: Path) -> None:
    config = launch(path, "--seed", "7", folder=tmp_path).config()
    assert config.train.seed == 7 and Path(config.tokenizer.tokenizer_model).is_file()
    assert config.model.num_layers <= 4 and config.model.hidden_size <= 128 and config.train.train_iters <= 200
    model = config.model.with_vocabulary(8000, 1)
    assert any(lost_settings(model, family) == [] for family in FAMILIES.values())


@pytest.mark.parametrize("scale, layers, billions", [("800M", "24 MLPs", 0.448), ("8B", "28 MLPs", 8.66)])
def test_megatrons_hybrids_start_with_its_flags(scale: str, layers: str, billions: float, tmp_path: Path) -> None:
    command = launch("examples/mamba/train.sh", "corpus", "tokenizer", folder=tmp_path, MODEL_SCALE=scale)
    config = command.config()
    symbols = config.model.hybrid.layer_symbols
    assert command.entry == "pretrain_mamba.py" and command.ranks == 8 and f"{symbols.count('-')} MLPs" == layers
    assert symbols.count("*") == 4 and len(symbols) == config.model.num_layers
    shapes = global_parameter_shapes(config.model.with_vocabulary(32000 if scale == "800M" else 256000, 1))
    assert sum(whole_box(shape).num_elements for shape in shapes.values()) / 1e9 == pytest.approx(billions, rel=0.005)
    done = bash([str(ROOT / "examples/mamba/train.sh")], tmp_path)
    assert done.returncode == 2 and "bash examples/mamba/train.sh DATA TOKENIZER" in done.stderr
