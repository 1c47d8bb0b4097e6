"""The converting tool: any format to any, there and back, and what it refuses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, checkpoint_model_settings
from megatron.core.dist_checkpointing.files import FileSystem
from megatron.core.dist_checkpointing.load import verify_checkpoint
from megatron.core.dist_checkpointing.rewrite import CastSource, rewrite_checkpoint
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.families import hf, hf_export
from tests.unit.families.made import GPT2, LLAMA, Made, same_tensors

TOOL = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "convert.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.checkpoint.convert")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a tokenizer."""
    hf_export.export_hf_folder(Made(LLAMA, torch.bfloat16), tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    return tmp_path / "llama"


def weights(path: Path) -> bytes:
    """The file of a folder's weights."""
    return (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "middle, flags",
    [
        ("own", []),
        ("own", ["--max-shard-size", "2KB"]),
        ("megatron", []),
        ("hf", ["--max-shard-size", "2KB"]),
        ("megatron", ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]),
        ("megatron", ["--saver-transformer-impl", "local"]),
    ],
)
def test_there_and_back_through_any_format_gives_the_same_file(
    tool: ModuleType, folder: Path, tmp_path: Path, middle: str, flags: list[str]
) -> None:
    tool.main(["--load", str(folder), "--save", str(tmp_path / "middle"), "--saver", middle, "--verify", *flags])
    tool.main(
        [
            "--load-dir",
            str(tmp_path / "middle"),
            "--save-dir",
            str(tmp_path / "back"),
            "--saver",
            "hf",
            "--like",
            str(folder),
            "--verify",
            "--true-vocab-size",
            str(LLAMA["true_vocab_size"]),
        ]
    )
    assert weights(tmp_path / "back") == weights(folder)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_the_command_says_what_it_did(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(TOOL),
            "--load",
            str(folder),
            "--save",
            "own",
            "--verify",
            "--max-queue-size",
            "50",
            "--target-tensor-parallel-size",
            "8",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    needless, cut, summary = done.stdout.splitlines()
    assert needless == "--max-queue-size has nothing to set: reader and writer are one process"
    assert cut.startswith("--target-tensor-parallel-size 8 has nothing to cut")
    assert "(Hugging Face): " in summary and summary.endswith("-> own/iter_0000000 (this project), verified")


def test_a_converted_folder_is_a_checkpoint_whose_settings_a_run_can_take(
    tool: ModuleType, folder: Path, tmp_path: Path
) -> None:
    tool.main(["--load", str(folder), "--save", str(tmp_path / "own"), "--iteration", "12"])
    saved = open_native_checkpoint(tmp_path / "own" / "iter_0000012")
    assert verify_checkpoint(saved) == []
    same_tensors(saved, hf.open_hf_folder(folder))
    found = checkpoint_model_settings(tmp_path / "own")
    assert {
        name: found[name] for name in ("num_layers", "hidden_size", "swiglu", "tokenizer_type", "tokenizer_model")
    } == {
        "num_layers": 2,
        "hidden_size": 16,
        "swiglu": True,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(folder),
    }


def test_weights_get_the_dtype_that_is_asked_for(tool: ModuleType, folder: Path, tmp_path: Path) -> None:
    tool.main(["--load", str(folder), "--save", str(tmp_path / "own"), "--dtype", "float32", "--verify"])
    same_tensors(
        open_native_checkpoint(tmp_path / "own" / "iter_0000000"), CastSource(hf.open_hf_folder(folder), torch.float32)
    )


def test_everything_else_of_a_source_is_kept_in_our_own_format(tmp_path: Path) -> None:
    source = Made(GPT2)
    source.formats |= {
        "optimizer.exp_avg.x": ShapeAndDtype((3, 2), torch.float32),
        "optimizer.steps": ShapeAndDtype((1,), torch.int64),
        "optimizer.none": ShapeAndDtype((0, 4), torch.float32),
    }
    source.values = {"run.progress": {"iteration": 7}}
    rewrite_checkpoint(
        CastSource(source, torch.bfloat16), tmp_path, iteration=7, settings={"num_layers": 2}, num_files=3
    )
    saved = open_native_checkpoint(tmp_path / "iter_0000007")
    assert len(saved.manifest.files) == 3 and saved.values == source.values and verify_checkpoint(saved) == []
    assert max(facts.size for facts in saved.manifest.files.values()) < 0.5 * saved.size
    same_tensors(saved, CastSource(source, torch.bfloat16))
    assert saved.formats["optimizer.exp_avg.x"].dtype == torch.float32


def test_a_rewrite_holds_few_tensors_and_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    source = Made(LLAMA)
    rewrite_checkpoint(source, tmp_path, iteration=1, settings={})
    assert source.most <= 2, f"{source.most} tensors were still held when the next was read"
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="is there already"):
        rewrite_checkpoint(source, tmp_path, iteration=1, settings={})

    class Full(FileSystem):
        """A disk without room for the manifest."""

        def create(self, path: Path) -> Any:
            """See `Files`."""
            if path.name == "manifest.json":
                raise OSError(28, "No space left on device")
            return super().create(path)

    with pytest.raises(CheckpointError, match="No space left on device"):
        rewrite_checkpoint(source, tmp_path, iteration=2, settings={}, files=Full())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_bad_copy_is_found_by_verify(
    tool: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(source: Any, target: Path, **others: Any) -> None:
        real(source, target, **others)
        content = bytearray(weights(target))
        content[-1] ^= 1
        (target / "model.safetensors").write_bytes(bytes(content))

    real = hf_export.export_hf_folder
    monkeypatch.setattr(hf_export, "export_hf_folder", careless)
    with pytest.raises(SystemExit, match="elements differ"):
        tool.main(["--load", str(folder), "--save", str(tmp_path / "out"), "--saver", "hf", "--verify"])


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--load", "none", "--save", "x"], "none holds no checkpoint"),
        (["--load", "llama", "--save", "x", "--loader", "megatron"], "holds no checkpoint of the format megatron"),
        (["--load", "llama", "--save", "x", "--model-type", "BERT"], "--model-type BERT: llama holds a GPT"),
        (["--load", "llama", "--save", "llama", "--saver", "hf"], "llama is there already"),
        (
            ["--load", "llama", "--save", "x", "--saver", "hf", "--family", "gpt2"],
            "gpt2 does not compute what this network does",
        ),
        (["--load", "llama", "--save", "x", "--like", "llama"], "--family and --like are for --saver hf"),
        (["--load", "llama", "--save", "x", "--true-vocab-size", "99"], "the tokenizer has 99 ids"),
        (
            ["--load", "llama", "--save", "x", "--saver", "megatron", "--target-tensor-parallel-size", "3"],
            "cannot be divided over 3 tensor",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(
    tool: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], complaint: str
) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(SystemExit, match=complaint):
        tool.main(flags)
    assert [path.name for path in folder.parent.iterdir()] == ["llama"]


@pytest.mark.parametrize("word, size", [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("1.5KB", 1500)])
def test_sizes_of_files_are_read_as_people_write_them(tool: ModuleType, word: str, size: int) -> None:
    assert tool.parse_shard_size(word) == size


@pytest.mark.parametrize("word", ["5", "0GB", "GB", "5 parsecs"])
def test_other_sizes_are_refused(tool: ModuleType, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--load", "a", "--save", "b", "--max-shard-size", word])
    assert "write it as 5GB or 500MB" in capsys.readouterr().err
