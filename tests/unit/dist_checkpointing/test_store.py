"""Folders of checkpoints: completeness, what is newest, retention, and what is said when a folder is no good."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.flags.declare import ConfigError, config_to_flat_dict
from megatron.core.config.settings.model import ModelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, SavedRunConfig
from megatron.core.dist_checkpointing.files import FileSystem
from tests.helpers.checkpoints import complete_iterations


def save(folder: Path, iteration: int, **values: object) -> Path:
    checkpoint_folders.remove_interrupted_saves(folder)
    made = checkpoint_folders.begin_save(folder, iteration, "0" * 32)
    (made / "data").write_text(str(iteration))
    step, note = checkpoint_folders.commit_save(
        folder, iteration, save="0" * 32, manifest=b"{}", sizes={}, description=SavedRunConfig(values, world_size=2)
    )
    assert note == ""
    return step.folder


def retain(folder: Path, saved: int, interval: int | None = None, keep_last: int | None = None) -> list[int]:
    gone = checkpoint_folders.expired_checkpoints(folder, saved=saved, interval=interval, keep_last=keep_last)
    assert checkpoint_folders.delete_checkpoints(gone) == ""
    return sorted(step.iteration for step in gone)


def test_a_checkpoint_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    made = checkpoint_folders.begin_save(tmp_path, 100, "f" * 32)
    assert (
        made.parent == tmp_path
        and complete_iterations(tmp_path) == []
        and checkpoint_folders.newest_iteration(tmp_path) is None
    )
    target = save(tmp_path, 100, a=1)
    assert target == tmp_path / "iter_0000100" and not made.exists(), "another save is over, its remains are collected"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "100"
    assert (
        checkpoint_folders.newest_iteration(tmp_path) == 100 and checkpoint_folders.tracker_iteration(tmp_path) == 100
    )
    assert checkpoint_folders.read_saved_run_config(target) == SavedRunConfig({"a": 1}, world_size=2)


def test_a_save_that_died_is_neither_loaded_nor_left_behind(tmp_path: Path) -> None:
    save(tmp_path, 100)
    remains = checkpoint_folders.begin_save(tmp_path, 200, "f" * 32)
    (remains / "data").write_text("half")
    assert checkpoint_folders.newest_iteration(tmp_path) == 100
    save(tmp_path, 300)
    assert not remains.exists() and complete_iterations(tmp_path) == [100, 300]


def test_the_same_iteration_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 100, a=1)
    save(tmp_path, 100, a=2)
    assert checkpoint_folders.read_saved_run_config(tmp_path / "iter_0000100").values == {"a": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000100", "latest_checkpointed_iteration.txt"]


def test_the_newest_is_what_was_committed_last_even_after_going_back(tmp_path: Path) -> None:
    for iteration in (100, 200, 300, 150):
        save(tmp_path, iteration)
    assert [step.iteration for step in checkpoint_folders.checkpoints_to_try(tmp_path)] == [150, 300, 200, 100]
    save(tmp_path, 200)
    assert checkpoint_folders.newest_iteration(tmp_path) == 200 and complete_iterations(tmp_path) == [
        100,
        150,
        200,
        300,
    ]


@pytest.mark.parametrize("text", ["100", "", "rubbish", "150", "-1", "\u00e9", None])
def test_the_tracker_is_a_hint_and_decides_nothing(tmp_path: Path, text: str | None) -> None:
    for iteration in (100, 200, 10_000_000):
        save(tmp_path, iteration)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    if text is not None:
        tracker.write_text(text, encoding="utf-8")
    assert checkpoint_folders.newest_iteration(tmp_path) == 10_000_000


def test_a_tracker_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match="holds no complete one"):
        checkpoint_folders.checkpoints_to_try(tmp_path)


def test_folders_that_lost_their_commit_are_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    (save(tmp_path, 100) / checkpoint_folders.COMMIT).unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(
        CheckpointError,
        match="holds no complete checkpoint\n.*iter_0000100 is no complete checkpoint: it has no commit.txt",
    ):
        checkpoint_folders.checkpoints_to_try(tmp_path)


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    assert (
        checkpoint_folders.checkpoints_to_try(tmp_path, 100)[0].iteration == 100
        and checkpoint_folders.checkpoints_to_try(tmp_path)[0].iteration == 200
    )
    assert checkpoint_folders.checkpoints_to_try(tmp_path / "none") == []
    with pytest.raises(CheckpointError, match="--ckpt-step 150: .* it has: 100, 200"):
        checkpoint_folders.checkpoints_to_try(tmp_path, 150)


def test_a_required_iteration_must_be_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    assert [step.iteration for step in checkpoint_folders.checkpoints_to_try(tmp_path, required=200)] == [200], (
        "there is no going back from it"
    )
    for required in (100, 300):
        with pytest.raises(
            CheckpointError,
            match=f"--require-iteration {required}: the newest .* is not of that iteration; it has: 100, 200",
        ):
            checkpoint_folders.checkpoints_to_try(tmp_path, required=required)
    with pytest.raises(CheckpointError, match="--require-iteration 5: .* it has: none"):
        checkpoint_folders.checkpoints_to_try(tmp_path / "none", required=5)


def test_retention_keeps_multiples_the_newest_later_ones_and_links(tmp_path: Path) -> None:
    for iteration in (50, 100, 150, 175, 200, 250):
        save(tmp_path, iteration)
    elsewhere = tmp_path.parent / f"{tmp_path.name}_kept"
    (tmp_path / "iter_0000050").rename(elsewhere)
    (tmp_path / "iter_0000050").symlink_to(elsewhere)
    assert retain(tmp_path, saved=200, interval=100) == [150, 175]
    assert complete_iterations(tmp_path) == [50, 100, 200, 250]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith((".old", ".tmp", ".gone"))) == []


@pytest.mark.parametrize(
    "interval, keep_last, left",
    [
        (None, None, [10, 20, 30, 40, 50]),
        (None, 1, [50]),
        (None, 2, [40, 50]),
        (None, 9, [10, 20, 30, 40, 50]),
        (20, None, [20, 40, 50]),
        (20, 1, [20, 40, 50]),
        (20, 3, [20, 30, 40, 50]),
        (30, 2, [30, 40, 50]),
    ],
)
def test_both_rules_of_retention_keep_what_they_name(
    tmp_path: Path, interval: int | None, keep_last: int | None, left: list[int]
) -> None:
    for iteration in (10, 20, 30, 40, 50):
        save(tmp_path, iteration)
    retain(tmp_path, saved=50, interval=interval, keep_last=keep_last)
    assert complete_iterations(tmp_path) == left


def test_the_best_checkpoint_is_kept_and_linked_where_it_is_complete(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    assert checkpoint_folders.iteration_of_best_link(tmp_path) is None
    assert (
        checkpoint_folders.link_best_checkpoint(tmp_path, 15) == "" and not (tmp_path / "best").exists()
    )  # its save has failed
    assert checkpoint_folders.link_best_checkpoint(tmp_path, 10) == "" and (tmp_path / "best").readlink() == Path(
        "iter_0000010"
    )
    (tmp_path / "best.tmp").symlink_to("nowhere")  # of a process that was killed
    assert retain(tmp_path, saved=30, keep_last=1) == [20]
    assert (
        checkpoint_folders.link_best_checkpoint(tmp_path, 30) == ""
        and checkpoint_folders.iteration_of_best_link(tmp_path) == 30
    )
    assert [path.name for path in tmp_path.glob("best*")] == ["best"]
    save(tmp_path, 40)
    assert [
        step.iteration
        for step in checkpoint_folders.expired_checkpoints(tmp_path, saved=40, interval=None, keep_last=1, best=10)
    ] == []


def test_a_folder_that_takes_no_links_is_told_of(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "best").mkdir()
    assert (
        f"{tmp_path / 'best'} does not lead to iter_0000010, the best checkpoint: "
        in checkpoint_folders.link_best_checkpoint(tmp_path, 10)
    )


def test_retention_counts_and_deletes_only_what_is_ours(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    foreign = tmp_path / "iter_0000015"
    foreign.mkdir()
    (foreign / "metadata.json").write_text("{}")
    assert retain(tmp_path, saved=30, keep_last=2) == [10]
    assert foreign.is_dir() and complete_iterations(tmp_path) == [20, 30]


def test_a_save_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    checkpoint_folders.check_save_folder_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(ConfigError, match=rf"--save {folder} cannot be written: (File exists|Not a directory)"):
            checkpoint_folders.check_save_folder_writable(folder)
    with pytest.raises(CheckpointError, match="cannot be made"):
        checkpoint_folders.begin_save(tmp_path / "file", 100, "0" * 32)
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="Permission denied"):
            checkpoint_folders.check_save_folder_writable(tmp_path / "closed")


def test_the_shape_and_the_tokenizer_come_from_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    config = RunConfig(
        model=ModelConfig(num_layers=3, hidden_size=64, swiglu=True, hidden_dropout=0.3, padded_vocab_size=128)
    )
    save(tmp_path, 100, **config_to_flat_dict(config))
    result = checkpoint_folders.checkpoint_model_settings(tmp_path)
    assert {name: result[name] for name in ("num_layers", "hidden_size", "swiglu", "position_embedding_type")} == {
        "num_layers": 3,
        "hidden_size": 64,
        "swiglu": True,
        "position_embedding_type": "learned_absolute",
    }
    assert {"tokenizer_type", "vocab_size", "merge_file", "rotary_base"} <= result.keys()
    assert not {"lr", "seed", "hidden_dropout", "padded_vocab_size", "true_vocab_size"} & result.keys()
    assert "tensor_model_parallel_size" not in result
    with pytest.raises(CheckpointError, match="--use-checkpoint-args: .* holds no complete checkpoint"):
        checkpoint_folders.checkpoint_model_settings(tmp_path / "none")


def test_the_folders_are_read_without_torch() -> None:
    code = "import sys, megatron.core.dist_checkpointing.checkpoint_folders; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(checkpoint_folders.__file__).parents[3])


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "config.json cannot be read"),
        ("[]", "it holds a list"),
        ('{"values": 3}', "must hold values and world_size"),
    ],
)
def test_a_config_that_is_sealed_but_makes_no_sense_is_named(tmp_path: Path, content: str, said: str) -> None:
    folder = save(tmp_path, 100)
    commit = checkpoint_folders.read_commit_record(folder)
    (folder / "config.json").write_text(content)
    sealed = checkpoint_folders.FileSizeAndHash(len(content), checkpoint_folders.xxh3_hex_digest(content.encode()))
    (folder / checkpoint_folders.COMMIT).write_text(dataclasses.replace(commit, config=sealed).text())
    with pytest.raises(CheckpointError, match=said):
        checkpoint_folders.read_saved_run_config(folder)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: ("megatron boxes 2\n" + text).encode()))
def test_no_content_of_a_commit_ends_in_anything_but_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "commit"
    folder.mkdir(exist_ok=True)
    (folder / checkpoint_folders.COMMIT).write_bytes(content)
    with pytest.raises(CheckpointError, match="commit.txt"):
        checkpoint_folders.read_commit_record(folder)


def test_settings_are_taken_from_the_newest_config_that_is_sound(tmp_path: Path) -> None:
    save(tmp_path, 100, num_layers=3)
    with (save(tmp_path, 200, num_layers=4) / "config.json").open("a") as file:
        file.write(" ")
    assert checkpoint_folders.checkpoint_model_settings(tmp_path) == {"num_layers": 3}
    with pytest.raises(
        CheckpointError, match="holds no sound checkpoint to take the settings from\n.*config.json is damaged"
    ):
        checkpoint_folders.checkpoint_model_settings(tmp_path, 200)


def test_an_error_shows_its_first_problems_and_counts_the_rest() -> None:
    text = str(CheckpointError("wrong", [f"name {number}" for number in range(250)]))
    assert text.startswith("wrong\n  name 0\n  name 1\n") and text.endswith("  name 99\n  ... and 150 more")


@pytest.mark.parametrize(
    "spoil, said",
    [
        (os.unlink, "rank_00001.safetensors has gone, where 3 were written"),
        (lambda path: os.truncate(path, 1), "rank_00001.safetensors has 1 bytes, where 3 were written"),
    ],
)
def test_a_folder_that_lacks_what_was_written_is_not_committed(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    made = checkpoint_folders.begin_save(tmp_path, 5, "0" * 32)
    for rank in (0, 1):
        (made / f"rank_0000{rank}.safetensors").write_text("abc")
    spoil(made / "rank_00001.safetensors")
    sizes = {f"rank_0000{rank}.safetensors": 3 for rank in (0, 1)}
    with pytest.raises(CheckpointError, match="does another job write into this folder") as refused:
        checkpoint_folders.commit_save(
            tmp_path, 5, save="0" * 32, manifest=b"{}", sizes=sizes, description=SavedRunConfig({}, world_size=2)
        )
    assert list(refused.value.problems) == [said] and checkpoint_folders.newest_iteration(tmp_path) is None


def test_remains_lose_their_name_before_their_files(tmp_path: Path) -> None:
    remains = checkpoint_folders.begin_save(tmp_path, 5, "f" * 32)
    (remains / "data").write_text("")

    class Stuck(FileSystem):
        """Deletes nothing."""

        def remove(self, path: Path) -> None:
            raise OSError(5, "no")

    checkpoint_folders.remove_interrupted_saves(tmp_path, files=Stuck())
    assert not remains.exists() and (remains.with_suffix(".gone") / "data").exists()
    checkpoint_folders.remove_interrupted_saves(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link to a folder", "link that loops", "pipe", "file"])
def test_what_stands_in_the_place_of_a_checkpoint_goes_and_what_a_link_leads_to_stays(
    tmp_path: Path, kind: str
) -> None:
    other, place = tmp_path / "other", tmp_path / "save" / "iter_0000005"
    other.mkdir()
    (other / "precious").write_text("")
    place.parent.mkdir()
    if kind == "link to a folder":
        place.symlink_to(other)
    elif kind == "link that loops":
        place.symlink_to(place)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.write_text("")
    assert checkpoint_folders.scan_checkpoint_folder(tmp_path / "save").steps == ()
    save(tmp_path / "save", 5)
    assert checkpoint_folders.newest_iteration(tmp_path / "save") == 5 and (other / "precious").exists()
    assert sorted(path.name for path in place.parent.iterdir()) == ["iter_0000005", checkpoint_folders.TRACKER]


@pytest.mark.parametrize(
    "name",
    [
        checkpoint_folders.TRACKER,
        f"iter_0000005/{checkpoint_folders.COMMIT}",
        f"iter_0000005/{checkpoint_folders.CONFIG}",
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(tmp_path: Path, name: str) -> None:
    save(tmp_path, 5)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert checkpoint_folders.tracker_iteration(tmp_path) == (None if name == checkpoint_folders.TRACKER else 5)
    result = checkpoint_folders.scan_checkpoint_folder(tmp_path)
    assert bool(result.steps) == (not name.endswith(checkpoint_folders.COMMIT))
    if name.endswith(checkpoint_folders.CONFIG):
        with pytest.raises(CheckpointError, match="config.json cannot be read: it is no file"):
            checkpoint_folders.read_saved_run_config(tmp_path / "iter_0000005")
    save(tmp_path, 6)
    assert checkpoint_folders.tracker_iteration(tmp_path) == 6
