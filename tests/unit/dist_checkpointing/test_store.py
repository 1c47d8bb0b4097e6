"""Folders of checkpoints: completeness, what is newest, retention, and what is said when a folder is no good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config.flags import ConfigError, to_values
from megatron.core.config.model import ModelConfig
from megatron.core.config.run import RunConfig
from megatron.core.dist_checkpointing import store
from megatron.core.dist_checkpointing.store import CheckpointError, Description


def save(folder: Path, iteration: int, **values: object) -> Path:
    made = store.begin(folder, iteration)
    (made / "data").write_text(str(iteration))
    return store.finish(folder, iteration, Description(values, world_size=2))


def test_a_checkpoint_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    made = store.begin(tmp_path, 100)
    assert made.parent == tmp_path and store.complete_iterations(tmp_path) == [] and store.newest(tmp_path) is None
    target = store.finish(tmp_path, 100, Description({"a": 1}, world_size=4))
    assert target == tmp_path / "iter_0000100" and not made.exists()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "100"
    assert json.loads((target / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert store.newest(tmp_path) == 100
    assert store.describe(target) == Description({"a": 1}, world_size=4)


def test_a_save_that_died_is_neither_loaded_nor_left_behind(tmp_path: Path) -> None:
    save(tmp_path, 100)
    remains = store.begin(tmp_path, 200)
    (remains / "data").write_text("half")
    assert store.newest(tmp_path) == 100
    save(tmp_path, 300)
    assert not remains.exists() and store.complete_iterations(tmp_path) == [100, 300]


def test_the_same_iteration_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 100, a=1)
    save(tmp_path, 100, a=2)
    assert store.describe(tmp_path / "iter_0000100").values == {"a": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000100", "latest_checkpointed_iteration.txt"]


def test_the_tracker_chooses_and_a_damaged_one_does_not(tmp_path: Path) -> None:
    for iteration in (100, 200, 10_000_000):
        save(tmp_path, iteration)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, expected in (("100", 100), ("", 10_000_000), ("rubbish", 10_000_000), ("150", 10_000_000)):
        tracker.write_text(text)
        assert store.newest(tmp_path) == expected, repr(text)
    tracker.unlink()
    assert store.newest(tmp_path) == 10_000_000


def test_a_tracker_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match="holds no complete one"):
        store.newest(tmp_path)


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    assert store.find(tmp_path, 100) == 100 and store.find(tmp_path) == 200 and store.find(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="--ckpt-step 150: .* it has: 100, 200"):
        store.find(tmp_path, 150)


def test_retention_keeps_multiples_the_newest_later_ones_and_links(tmp_path: Path) -> None:
    for iteration in (50, 100, 150, 175, 200, 250):
        save(tmp_path, iteration)
    elsewhere = tmp_path.parent / f"{tmp_path.name}_kept"
    (tmp_path / "iter_0000050").rename(elsewhere)
    (tmp_path / "iter_0000050").symlink_to(elsewhere)
    assert store.retain(tmp_path, 100, saved=200) == [150, 175]
    assert store.complete_iterations(tmp_path) == [50, 100, 200, 250]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith((".old", ".tmp"))) == []


def test_a_save_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    store.check_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(ConfigError, match=rf"--save {folder} cannot be written: (File exists|Not a directory)"):
            store.check_writable(folder)
    with pytest.raises(CheckpointError, match="cannot be written"):
        store.begin(tmp_path / "file", 100)
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="Permission denied"):
            store.check_writable(tmp_path / "closed")


def test_the_shape_and_the_tokenizer_come_from_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(num_layers=3, hidden_size=64, swiglu=True, hidden_dropout=0.3, padded_vocab_size=128))
    save(tmp_path, 100, **to_values(config))
    found = store.checkpoint_values(tmp_path)
    assert {name: found[name] for name in ("num_layers", "hidden_size", "swiglu", "position_embedding_type")} == {
        "num_layers": 3, "hidden_size": 64, "swiglu": True, "position_embedding_type": "learned_absolute"}
    assert {"tokenizer_type", "vocab_size", "merge_file", "rotary_base"} <= found.keys()
    assert not {"lr", "seed", "hidden_dropout", "padded_vocab_size", "true_vocab_size"} & found.keys()
    assert "tensor_model_parallel_size" not in found
    with pytest.raises(CheckpointError, match="--use-checkpoint-args: .* holds no complete checkpoint"):
        store.checkpoint_values(tmp_path / "none")


def test_the_folders_are_read_without_torch() -> None:
    code = "import sys, megatron.core.dist_checkpointing.store; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(store.__file__).parents[3])


@pytest.mark.parametrize("name, content, said", [
    ("metadata.json", "{}", "not written by this program"),
    ("metadata.json", '{"format_version": 99}', "format version 99"),
    ("config.json", "{", "config.json cannot be read"),
    ("config.json", "[]", "it holds a list"),
    ("config.json", '{"values": 3}', "must hold values and world_size"),
])
def test_a_damaged_or_foreign_checkpoint_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    folder = save(tmp_path, 100)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=said):
        store.describe(folder)


def test_an_error_shows_its_first_problems_and_counts_the_rest() -> None:
    text = str(CheckpointError("wrong", [f"name {number}" for number in range(250)]))
    assert text.startswith("wrong\n  name 0\n  name 1\n") and text.endswith("  name 99\n  ... and 150 more")
