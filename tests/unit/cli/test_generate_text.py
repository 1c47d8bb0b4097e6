"""Text from a checkpoint: the same whatever layout wrote it, and the same as from the network that was trained."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.core.tokenizers.build import build_tokenizer
from megatron.inference.engine import Engine
from megatron.inference.generate import generate_texts
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import train_on
from tests.helpers.world import Worlds

ROOT = Path(__file__).resolve().parents[3]
MODEL: dict[str, Any] = {
    "fp64": True,
    "init_method_std": 0.4,
    "untie_embeddings_and_output_weights": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": tiny.VOCABULARY,
    "position_embedding_type": "rope",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "dp2": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 3000,
    },
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.generate_text")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits are a matter of one device."""
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


def train_and_save(changes: dict[str, Any], folder: str) -> None:
    """On every rank: two steps, then a checkpoint."""
    trained(changes, folder)


def trained(changes: dict[str, Any], folder: str) -> Trainer:
    """A trainer after two steps, and its checkpoint."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(size, **{**MODEL, **changes}, save=folder)))
    train_on(trainer, 2)
    Checkpointer(trainer).save()
    return trainer


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, str]:
    """The network that one process trained, and the folder it was saved in."""
    folder = str(tmp_path_factory.mktemp("serial"))
    return trained({}, folder), folder


GREEDY, WARM = ["--temperature", "0"], ["--temperature", "0.8", "--top-k", "20", "--top-p", "0.95", "--seed", "5"]


def generated(tool: ModuleType, capsys: pytest.CaptureFixture[str], folder: str, options: list[str]) -> list[str]:
    """The lines for two prompts."""
    tool.main(["--load", folder, "--prompt", "3 1 4", "--prompt", "7", "--num-tokens", "12", *options])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("options", [GREEDY, WARM], ids=["greedy", "warm"])
def test_the_text_is_that_of_the_network_that_was_trained(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    trainer = trained(
        {"hidden_dropout": 0.3, "attention_dropout": 0.3}, str(tmp_path)
    )  # dropout that generation must leave off
    sampling = SamplingParams(0.0) if options is GREEDY else SamplingParams(0.8, 20, 0.95)
    engine = Engine([trainer.stages[0].eval()], trainer.run.tokenizer)
    expected = [
        generate_texts(engine, [prompt], num_tokens=12, sampling=sampling, seed=5 if options is WARM else 1234)[0]
        for prompt in ("3 1 4", "7")
    ]
    found = generated(tool, capsys, str(tmp_path), options)
    assert found == expected and all(
        line.startswith(prompt + " ") for line, prompt in zip(found, ("3 1 4", "7"), strict=True)
    )
    assert len(set(found[0].split()[3:])) > 2, "a continuation of one token proves little"


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_text_does_not_depend_on_the_layout_that_wrote_the_checkpoint(
    tool: ModuleType,
    capsys: pytest.CaptureFixture[str],
    world: Worlds,
    serial: tuple[Trainer, str],
    tmp_path: Path,
    name: str,
) -> None:
    world(2).run(train_and_save, LAYOUTS[name], str(tmp_path))
    for options in (GREEDY, WARM):
        assert generated(tool, capsys, str(tmp_path), options) == generated(tool, capsys, serial[1], options)


@pytest.mark.parametrize(
    "changes, words",
    [
        (["--load", "no/such/folder"], "CheckpointError: no/such/folder holds no checkpoint"),
        (["--ckpt-step", "9"], "it has: 2"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named_without_a_traceback(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], serial: tuple[Trainer, str], changes: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main(["--load", serial[1], "--prompt", "3", *changes])
    assert caught.value.code == 1 and words in capsys.readouterr().err


def demo_run(folder: Path) -> tuple[str, dict[str, Path]]:
    """A run with a byte-level BPE, and its files."""
    files = {"vocab_file": folder / "vocab.json", "merge_file": folder / "merges.txt"}
    for path in files.values():
        shutil.copyfile(ROOT / "examples" / "data" / f"demo-{path.name}", path)
    changes = {
        **MODEL,
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_size": None,
        **{name: str(path) for name, path in files.items()},
    }
    config = tiny.config(save=str(folder / "run"), **changes)
    tokenizer = build_tokenizer(config.tokenizer)
    config = replace(config, model=replace(config.model, padded_vocab_size=None))
    trainer = tiny.trainer_of(
        replace(tiny.run_of(tiny.with_vocabulary(config, tokenizer.vocab_size)), tokenizer=tokenizer)
    )
    Checkpointer(trainer).save()
    return str(folder / "run"), files


def test_a_tokenizer_file_that_is_gone_is_named_and_can_be_given_anew(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, files = demo_run(tmp_path)
    moved = {name: path.rename(tmp_path / f"moved-{path.name}") for name, path in files.items()}
    with pytest.raises(SystemExit) as caught:
        tool.main(["--load", run, "--prompt", "a"])
    assert caught.value.code == 1 and "vocab.json" in capsys.readouterr().err
    tool.main(
        [
            "--load",
            run,
            "--prompt",
            "",
            "--num-tokens",
            "2",
            "--vocab-file",
            str(moved["vocab_file"]),
            "--merge-file",
            str(moved["merge_file"]),
        ]
    )


def test_another_tokenizer_than_that_of_the_run_is_refused(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, _ = demo_run(tmp_path)
    with pytest.raises(SystemExit):
        tool.main(["--load", run, "--prompt", "a", "--tokenizer-type", "ByteTokenizer"])
    assert "was trained with another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_published_folder_says_what_its_own_programme_says(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    published = pytest.importorskip("tests.unit.evaluation.published", reason="transformers is not installed")
    model = published.write(kind, tmp_path)
    tokenizer = published.transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = tokenizer("The state of the", return_tensors="pt")
    expected = model.generate(**asked, max_new_tokens=8, do_sample=False)
    tool.main(["--load", str(tmp_path), "--prompt", "The state of the", "--num-tokens", "8", "--temperature", "0"])
    assert capsys.readouterr().out == tokenizer.decode(expected[0], skip_special_tokens=True) + "\n"
