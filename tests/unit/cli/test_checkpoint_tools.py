"""megatron checkpoint: inspect, verify, diff, reshard and export, over checkpoints of every format."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from megatron.cli.commands.checkpoint import diff, export, inspect, reshard, verify
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.saved import NativeCheckpoint, open_native_checkpoint
from megatron.core.families import hf_export
from megatron.megatron_lm.checkpoint.export import write_legacy_checkpoint, write_torch_dist_checkpoint
from megatron.training.checkpoint.checkpointing import Checkpointer
from tests.helpers import tiny
from tests.helpers.architecture import ROOT
from tests.helpers.training import held_weights, train_alone, train_on
from tests.helpers.world import Worlds

LAYOUT: dict[str, Any] = {"tensor_model_parallel_size": 2, "hidden_dropout": 0.1, "bf16": True, "openai_gelu": True}
TENSOR = "model.decoder.layers.1.mlp.linear_fc1.weight"


def train_and_save(folder: Path, changes: dict[str, Any]) -> None:
    """On every rank: two checkpoints."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{**LAYOUT, **changes}, save=str(folder))))
    for _ in range(2):
        train_on(trainer, 1)
        Checkpointer(trainer).save()


def resumed_streams(folder: Path) -> list[torch.Tensor]:
    """On every rank: the dropout streams after a load."""
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(2, **LAYOUT, load=str(folder))))
    assert Checkpointer(trainer).resume() and trainer.progress.iteration == 2
    return [*trainer.run.streams.state().values(), *(tensor for *_, tensor in held_weights(trainer))]


@pytest.fixture(scope="module")
def made(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A --save folder of two tensor ranks, with iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("made") / "save"
    world(2).run(train_and_save, folder, {})
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture(scope="module")
def checkpoint_formats(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in every format."""
    there = tmp_path_factory.mktemp("formats")
    source = open_native_checkpoint(made / "iter_0000002")
    hf_export.export_hf_folder(source, there / "published")
    write_legacy_checkpoint(source, there / "megatron", iteration=2, tensor_size=2, pipeline_size=1, fused_norms=True)
    return {"ours": made, "published": there / "published", "megatron": there / "megatron"}


@pytest.mark.parametrize("write", [write_torch_dist_checkpoint, write_legacy_checkpoint])
def test_a_checkpoint_for_megatron_on_a_full_disk_is_not_there(write: Any, made: Path, tmp_path: Path) -> None:
    source, (soft, hard) = open_native_checkpoint(made / "iter_0000002"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(CheckpointError, match="iter_0000000 cannot be written"):
            write(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def code(tool: Any, *arguments: object) -> int:
    """The exit code of a tool; its message counts as 1."""
    try:
        tool.main([str(one) for one in arguments])
    except SystemExit as leaving:
        print(leaving.code if isinstance(leaving.code, str) else "", end="")
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0


def printed(capsys: pytest.CaptureFixture[str], tool: Any, *arguments: object, expected: int = 0) -> str:
    """What a tool prints."""
    capsys.readouterr()
    found = code(tool, *arguments)
    out = capsys.readouterr()
    assert found == expected, out
    return out.out + out.err


def flip(path: Path, place: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_inspect_says_what_a_reader_of_safetensors_finds_in_the_files(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(capsys, inspect, made, "--json"))
    assert (found["iteration"], found["world_size"], found["format"]) == (2, 2, "this project")
    total, boxes = 0, set()
    for path in sorted((made / "iter_0000002").glob("*.safetensors")):
        assert found["files"][path.name] == path.stat().st_size
        with safetensors.safe_open(str(path), "pt") as file:
            for key in file.keys():
                tensor, name = file.get_tensor(key), key.split("[")[0]
                total += tensor.nbytes
                boxes.add((path.name, name, tuple(tensor.shape)))
                assert (
                    found["tensors"][name]["dtype"]
                    == {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}[tensor.dtype]
                )
    assert boxes == {
        (box["file"], name, tuple(box["shape"])) for name, one in found["tensors"].items() for box in one["boxes"]
    }
    assert found["bytes"] == total == sum(one["bytes"] for one in found["groups"].values())
    assert found["tensors"][TENSOR]["shape"] == [128, 32] and len(found["tensors"][TENSOR]["boxes"]) == 2
    assert found["settings"]["tensor_model_parallel_size"] == 2 and found["values"]["run.progress"]["iteration"] == 2


def test_inspect_filters_lists_iterations_and_shows_boxes_and_settings(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, inspect, made, "--match", TENSOR, "--boxes", "--config")
    assert f"iterations in {made}: 1, 2" in text and "written by 2 ranks" in text
    assert "[0:64, 0:32]" in text and "[64:128, 0:32]" in text and "rank_00001.safetensors" in text
    assert (
        "optimizer.exp_avg.decoder.layers.1" not in text
        and "hidden_size = 32" in text
        and "optimizer.exp_avg_sq" in text
    )
    assert "iteration 1," in printed(capsys, inspect, made, "--ckpt-step", 1, "--summary")


@pytest.mark.parametrize("checkpoint_format", ["ours", "published", "megatron"])
def test_inspect_and_verify_take_every_format(
    checkpoint_format: str, checkpoint_formats: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(capsys, inspect, checkpoint_formats[checkpoint_format], "--json", "--match", "model.*"))
    own = open_native_checkpoint(checkpoint_formats["ours"] / "iter_0000002").formats
    names = [name for name in own if name.startswith("model.")]
    assert set(found["tensors"]) == set(names)
    for name in names:
        if "embedding" not in name:  # which is padded in Megatron's files
            assert tuple(found["tensors"][name]["shape"]) == own[name].shape, name
    assert "sound" in printed(capsys, verify, checkpoint_formats[checkpoint_format])
    assert "damaged" not in printed(capsys, inspect, checkpoint_formats[checkpoint_format], "--summary"), (
        "another project's folder lacks only our files"
    )


def test_inspect_of_our_own_format_needs_no_torch_and_the_folder_hides_no_standard_module(made: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megatron", "checkpoint", "inspect", str(made), "--summary"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and "optimizer.master" in done.stdout, done.stderr
    imported = {
        line.split("|")[-1].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "megatron" in imported and not imported & {"torch", "numpy"}


def test_scripts_do_not_hide_standard_modules() -> None:
    # The folder of a script leaves sys.path: tools/checkpoint would hide the standard library's `inspect`.
    for script in sorted((ROOT / "tools").rglob("*.py")):
        before, imported, after = script.read_text().partition(" import main\n")
        assert imported and "if Path(path).resolve() != HERE" in before and "main()" in after, script
    done = subprocess.run(
        [sys.executable, "tools/checkpoint/verify.py", "--help"], cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and "megatron checkpoint verify" in done.stdout, done.stderr


def test_verify_lists_every_problem_of_every_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "sound" in printed(capsys, verify, folder, "--all")
    first, second = folder / "iter_0000001", folder / "iter_0000002"
    for file in ("rank_00000.safetensors", "rank_00001.safetensors"):
        flip(second / file, (second / file).stat().st_size - 1)
    (second / "notes.txt").write_text("mine")
    (first / "rank_00001.safetensors").unlink()
    (folder / "iter_0000007").mkdir()
    text = printed(capsys, verify, folder, folder.parent / "nowhere", "--all", expected=1)
    assert (
        text.count("have not the hash that they were saved with") == 2
        and f"({second / 'notes.txt'} is none of its files)" in text
    )
    assert f"{first / 'rank_00001.safetensors'} is missing" in text
    assert "iter_0000007 is no complete checkpoint" in text and "nowhere holds no checkpoint" in text
    assert "is missing" not in printed(capsys, verify, folder, "--ckpt-step", 2, expected=1)
    report = [
        json.loads(line) for line in printed(capsys, verify, second, "--json", "--threads", 1, expected=1).splitlines()
    ]
    assert [len(one["problems"]) for one in report] == [2] and report[0]["remarks"]


def test_verify_reads_all_parts_of_a_large_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "PART", 40_000)
    assert "sound" in printed(capsys, verify, folder)
    first, last = (folder / "iter_0000002" / f"rank_0000{rank}.safetensors" for rank in (0, 1))
    for file, place in ((first, 9), (first, first.stat().st_size // 2), (last, last.stat().st_size - 1)):
        flip(file, place)
        assert "1 problem," in printed(capsys, verify, folder, expected=1), place
        flip(file, place)


def test_verify_names_a_damaged_folder_of_another_format(
    checkpoint_formats: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Path(shutil.copytree(checkpoint_formats["published"], tmp_path / "published"))
    (there / "model.safetensors").write_bytes((there / "model.safetensors").read_bytes()[:-10])
    assert "model.safetensors" in printed(capsys, verify, there, expected=1)


def test_diff_finds_no_difference_between_a_checkpoint_and_itself_in_any_layout_or_format(
    world: Worlds, made: Path, checkpoint_formats: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no differences" in printed(capsys, diff, made, made)
    for name in ("published", "megatron"):
        for pair in ((made, checkpoint_formats[name]), (checkpoint_formats[name], made)):
            text = printed(capsys, diff, *pair, "--match", "model.*")
            assert "no differences in 52 tensors" in text
    assert "settings that differ" not in printed(capsys, diff, made, made, "--ckpt-step", 1, 1)


def test_diff_names_what_differs_and_the_first_and_the_largest_place(
    folder: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(
        path
        for path in (folder / "iter_0000002").glob("*.safetensors")
        if "final_layernorm.weight" in path.read_bytes().decode("latin1")
    )
    saved = open_native_checkpoint(folder / "iter_0000002")
    piece = saved.manifest.tensors["model.decoder.final_layernorm.weight"].pieces[0]
    path = folder / "iter_0000002" / piece.file
    content = bytearray(path.read_bytes())
    for place, value in ((3, 1.25), (9, -2.0)):
        content[piece.start + 2 * place : piece.start + 2 * place + 2] = (
            torch.tensor([value], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        )
    path.write_bytes(content)
    text = printed(capsys, diff, folder, made, expected=1)
    before = open_native_checkpoint(made / "iter_0000002").read("model.decoder.final_layernorm.weight", piece.box)
    assert "1 difference in" in text and "2 of 32 elements differ" in text
    assert f"first [3] 1.25 and {before[3].item()!r}; largest [9] -2.0 and {before[9].item()!r}" in text
    assert "no differences" in printed(capsys, diff, folder, made, "--atol", 4.0)
    assert "iteration 1 and 2" in printed(capsys, diff, made, made, "--ckpt-step", 1, 2, expected=1)
    report = json.loads(printed(capsys, diff, folder, made, "--json", expected=1))
    assert report["differences"][0]["gap"]["largest"]["index"] == [9]


def test_diff_that_would_compare_nothing_or_cannot_read_is_an_error(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing would be compared" in printed(capsys, diff, made, made, "--match", "modle.*", expected=2)
    assert "holds no checkpoint" in printed(capsys, diff, made, tmp_path, expected=2)


def test_a_checkpoint_in_other_files_loads_as_before_dropout_streams_and_all(
    world: Worlds, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, reshard, "--load", made, "--save", tmp_path / "five", "--num-files", 5)
    assert "5 files, verified" in text and "no layout was chosen" in text
    sizes = [path.stat().st_size for path in (tmp_path / "five" / "iter_0000002").glob("*.safetensors")]
    assert len(sizes) == 5 and max(sizes) < 1.3 * min(sizes)
    assert "no differences" in printed(capsys, diff, made, tmp_path / "five")
    for before, after in zip(
        world(2).run(resumed_streams, made), world(2).run(resumed_streams, tmp_path / "five"), strict=True
    ):
        assert len(before) > 50 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_weights_alone_and_in_another_dtype_are_a_checkpoint_that_can_be_tuned(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(capsys, reshard, "--load", made, "--save", tmp_path / "weights", "--weights-only", "--dtype", "float32")
    saved: NativeCheckpoint = open_native_checkpoint(tmp_path / "weights" / "iter_0000002")
    assert all(name.startswith("model.") and one.dtype == torch.float32 for name, one in saved.formats.items())
    assert set(saved.values) == {"run.config", "run.progress", "run.tokenizer"}
    tuned = train_alone(
        {**LAYOUT, "tensor_model_parallel_size": 1, "bf16": False, "load": str(tmp_path / "weights"), "finetune": True},
        0,
    )
    assert tuned.weights
    trainer = tiny.trainer_of(
        tiny.run_of(tiny.config(1, openai_gelu=True, load=str(tmp_path / "weights"), finetune=True))
    )
    assert Checkpointer(trainer).resume() and trainer.progress.iteration == 0
    text = printed(capsys, diff, made, tmp_path / "weights", "--match", "model.*", expected=1)
    assert "dtype bfloat16 and float32" in text and "elements differ" not in text


def test_reshard_refuses_damage_and_never_overwrites(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is there already" in printed(capsys, reshard, "--load", folder, "--save", folder, expected=1)
    flip(folder / "iter_0000002" / "rank_00000.safetensors", 5000)
    assert "is damaged, and is not rewritten" in printed(
        capsys, reshard, "--load", folder, "--save", tmp_path / "new", expected=1
    )
    assert not (tmp_path / "new").exists()
    printed(capsys, reshard, "--load", folder, "--ckpt-step", 1, "--save", tmp_path / "new", "--iteration", 9)
    assert (tmp_path / "new" / "iter_0000009").is_dir()


def test_an_export_holds_the_weights_and_the_tokenizers_files(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, export, "--load", made, "--save", tmp_path / "out", "--dtype", "float32")
    assert "no tokenizer files" in text and "gpt2" in text
    theirs = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    ours = open_native_checkpoint(made / "iter_0000002")
    box = next(iter(ours.manifest.tensors["model.embedding.position_embeddings.weight"].pieces)).box
    assert torch.equal(
        theirs["transformer.wpe.weight"], ours.read("model.embedding.position_embeddings.weight", box).float()
    )
    words = tmp_path / "words"
    words.mkdir()
    (words / "tokenizer.json").write_text("{}")
    assert f"tokenizer files of {words}" in printed(
        capsys, export, "--load", made, "--save", tmp_path / "with", "--tokenizer", words
    )
    assert (tmp_path / "with" / "tokenizer.json").read_text() == "{}"
    assert "is there already" in printed(capsys, export, "--load", made, "--save", tmp_path / "with", expected=1)
