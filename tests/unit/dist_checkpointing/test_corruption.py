"""Whatever happens to the bytes of a checkpoint is found before anything is loaded, and named."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import checkpoint_folders
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, NewerFormatError
from megatron.core.dist_checkpointing.load import load_into_sharded_state, open_first_valid
from megatron.core.dist_checkpointing.manifest import parse_manifest
from megatron.core.dist_checkpointing.rank_file import HashedByteRange
from megatron.core.dist_checkpointing.saved import _part_of_ranges, open_native_checkpoint, unknown_files
from megatron.training.checkpoint.formats import open_checkpoint
from tests.unit.dist_checkpointing.model_files import ModelFiles
from tests.unit.dist_checkpointing.two_ranks import content, save_as_two, version_in

SAVE = Path("/save")
FOLDER = SAVE / "iter_0000020"
SHARDS = ("rank_00000.safetensors", "rank_00001.safetensors")


def saved_twice(files: ModelFiles) -> None:
    save_as_two(SAVE, 10, 1, files=files)
    save_as_two(SAVE, 20, 2, files=files)


def refusal(files: ModelFiles) -> str:
    """Why the newest checkpoint is not loaded; checks that the one before it is loaded instead."""
    with pytest.raises(CheckpointError) as caught:
        version_in(SAVE, step=20, files=files)
    assert version_in(SAVE, files=files) == (10, 1), "the last good one is loaded instead"
    return str(caught.value)


@pytest.mark.parametrize(
    "name", [*SHARDS, checkpoint_folders.MANIFEST, checkpoint_folders.CONFIG, checkpoint_folders.COMMIT]
)
def test_any_flipped_bit_of_any_byte_is_found_and_its_file_named(name: str) -> None:
    files = ModelFiles()
    saved_twice(files)
    file, random_ = files._file_at(FOLDER / name), random.Random(name)
    bits = [(place, random_.randrange(8)) for place in range(len(file.content))]
    for place, bit in bits:
        file.content[place] ^= 1 << bit
        message = refusal(files)
        assert str(FOLDER / name) in message or (name == checkpoint_folders.COMMIT and str(FOLDER) in message), (
            f"bit {bit} of byte {place}: {message}"
        )
        file.content[place] ^= 1 << bit
    assert version_in(SAVE, files=files) == (20, 2), "as it was, it is loaded"


def test_every_byte_of_a_data_file_is_hashed_once() -> None:
    files = ModelFiles()
    saved_twice(files)
    saved = open_native_checkpoint(FOLDER, files=files)
    for name in SHARDS:
        ranges = sorted((one.start, one.length) for one in saved._byte_ranges() if one.file == name)
        ends = [start + length for start, length in ranges]
        assert [0, *ends[:-1]] == [start for start, _ in ranges] and ends[-1] == len(
            files._file_at(FOLDER / name).content
        )


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_ranks_that_share_the_work_read_everything_once_between_them(parts: int) -> None:
    files = ModelFiles()
    saved_twice(files)
    file = files._file_at(FOLDER / SHARDS[1])
    for place in range(0, len(file.content), 17):
        file.content[place] ^= 4
        finders = [
            part for part in range(parts) if open_native_checkpoint(FOLDER, files=files).verify(part=part, parts=parts)
        ]
        file.content[place] ^= 4
        assert len(finders) == 1, f"byte {place} is looked at by parts {finders} of {parts}"


def test_ranks_that_share_the_work_have_equal_parts_of_it(tmp_path: Path) -> None:
    ranges = [HashedByteRange("a", place * 10, 10, "", "") for place in range(100)]
    parts = [_part_of_ranges(ranges, part, 4) for part in range(4)]
    assert [len(part) for part in parts] == [25] * 4 and [one for part in parts for one in part] == ranges


def cut(name: str, to: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, to)


def swap(folder: Path) -> None:
    (folder / SHARDS[0]).rename(folder / "aside")
    (folder / SHARDS[1]).rename(folder / SHARDS[0])
    (folder / "aside").rename(folder / SHARDS[1])


def from_other(*names: str) -> Callable[[Path], None]:
    def mix(folder: Path) -> None:
        for name in names:
            shutil.copy(folder.parent / "iter_0000010" / name, folder / name)

    return mix


def missing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def extra(folder: Path) -> None:
    shutil.copy(folder / SHARDS[0], folder / "rank_00002.safetensors")


def longer(folder: Path) -> None:
    with open(folder / SHARDS[0], "ab") as file:
        file.write(b"more")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated shard": (
        cut(SHARDS[1], 100),
        r"rank_00001.safetensors is cut short: it has 100 bytes, the manifest says \d+",
    ),
    "an empty shard": (cut(SHARDS[0], 0), "rank_00000.safetensors is cut short: it has 0 bytes"),
    "a shard that goes on": (longer, "rank_00000.safetensors is too long"),
    "a truncated manifest": (cut(checkpoint_folders.MANIFEST, 50), "manifest.json is cut short"),
    "an empty config": (cut(checkpoint_folders.CONFIG, 0), "config.json is cut short"),
    "a truncated commit": (cut(checkpoint_folders.COMMIT, 60), "commit.txt is damaged"),
    "swapped shards": (swap, "rank_00000.safetensors is rank_00001.safetensors of the same save, under a wrong name"),
    "a shard of another step": (
        from_other(SHARDS[0]),
        "rank_00000.safetensors belongs to another save, of iteration 10: the folder mixes two checkpoints",
    ),
    "a stale manifest": (
        from_other(checkpoint_folders.MANIFEST),
        "manifest.json is stale: it belongs to another save, of iteration 10",
    ),
    "a stale config": (from_other(checkpoint_folders.CONFIG), "config.json is damaged, changed, or of another save"),
    "a stale commit": (
        from_other(checkpoint_folders.COMMIT),
        "iter_0000020 was renamed: its commit.txt says iteration 10",
    ),
    "a missing shard": (missing(SHARDS[1]), "rank_00001.safetensors is missing"),
    "a missing manifest": (missing(checkpoint_folders.MANIFEST), "manifest.json is missing"),
    "a missing config": (missing(checkpoint_folders.CONFIG), "config.json is missing"),
    "a missing commit": (missing(checkpoint_folders.COMMIT), "it has no commit.txt"),
    "a shard too many": (extra, "rank_00002.safetensors is no part of this checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_damage_is_named_in_its_own_words(tmp_path: Path, name: str) -> None:
    harm, words = DAMAGE[name]
    save_as_two(tmp_path, 10, 1)
    harm(save_as_two(tmp_path, 20, 2).folder)
    with pytest.raises(CheckpointError, match=words):
        version_in(tmp_path, step=20)
    assert version_in(tmp_path) == (10, 1)
    for other, (_, others_words) in DAMAGE.items():
        assert other == name or others_words != words, "each has words of its own"


def test_all_that_is_damaged_is_told_when_nothing_is_sound(tmp_path: Path) -> None:
    for iteration, version in ((10, 1), (20, 2)):
        missing(SHARDS[0])(save_as_two(tmp_path, iteration, version).folder)
    with pytest.raises(CheckpointError) as caught:
        version_in(tmp_path)
    assert [line.strip() for line in caught.value.problems] == [
        "the checkpoint of iteration 20 is refused:",
        f"{tmp_path}/iter_0000020/{SHARDS[0]} is missing",
        "the checkpoint of iteration 10 is refused:",
        f"{tmp_path}/iter_0000010/{SHARDS[0]} is missing",
    ]


def test_without_verification_the_sizes_are_still_looked_at_but_no_tensor_is_read(tmp_path: Path) -> None:
    folder = save_as_two(tmp_path, 10, 1).folder
    with open(folder / SHARDS[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    saved, refused = open_first_valid(checkpoint_folders.checkpoints_to_try(tmp_path), verified=False)
    assert saved.folder == folder and refused == []
    cut(SHARDS[0], 100)(folder)
    with pytest.raises(CheckpointError, match="no checkpoint is sound"):
        open_first_valid(checkpoint_folders.checkpoints_to_try(tmp_path), verified=False)


def test_files_that_people_put_beside_do_no_harm(tmp_path: Path) -> None:
    folder = save_as_two(tmp_path, 10, 1).folder
    (folder / "notes.txt").write_text("our best one")
    (folder / "tokenizer").mkdir()
    assert version_in(tmp_path) == (10, 1)
    assert unknown_files(open_native_checkpoint(folder)) == ["notes.txt", "tokenizer"]


HOSTILE = {
    "leaves the folder": lambda text: text.replace("rank_00000.safetensors", "../rank_00000.safetensors"),
    "starts in the header": lambda text: text.replace('["rank_00000.safetensors",', '["rank_00000.safetensors",-', 1),
    "has a box outside": lambda text: text.replace("[0,0],[2,3]", "[9,0],[2,3]"),
    "has a hole": lambda text: text.replace("[0,0],[2,3]", "[0,0],[1,3]"),
    "has an unknown dtype": lambda text: text.replace('"F32"', '"F128"'),
    "has words for numbers": lambda text: text.replace("[2,3]", '["2",3]'),
    "has no tensors": lambda text: text.replace('"tensors"', '"sensors"'),
    "is a list": lambda text: f"[{text}]",
    "nests without end": lambda text: "[" * 100_000,
    "is no text": lambda text: "\udcff",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_is_sealed_but_makes_no_sense_is_refused(tmp_path: Path, name: str) -> None:
    step = save_as_two(tmp_path, 10, 1)
    text = (step.folder / checkpoint_folders.MANIFEST).read_text()
    bad = HOSTILE[name](text).encode(errors="surrogateescape")
    assert bad != text.encode()
    (step.folder / checkpoint_folders.MANIFEST).write_bytes(bad)
    sealed = checkpoint_folders.FileSizeAndHash(len(bad), checkpoint_folders.xxh3_hex_digest(bad))
    commit = checkpoint_folders.CommitRecord(step.commit.save, 10, 1, sealed, step.commit.config)
    (step.folder / checkpoint_folders.COMMIT).write_text(commit.text())
    with pytest.raises(CheckpointError, match="manifest.json"):
        version_in(tmp_path)


def of_a_newer_format(folder: Path) -> None:
    """Write the commit of a checkpoint as a later program would."""
    text = (folder / checkpoint_folders.COMMIT).read_text()
    body = text[: text.index("seal ")].replace("megatron boxes 2", "megatron boxes 99")
    (folder / checkpoint_folders.COMMIT).write_text(f"{body}seal {checkpoint_folders.xxh3_hex_digest(body.encode())}\n")


def test_a_newer_format_asks_for_a_newer_program(tmp_path: Path) -> None:
    of_a_newer_format(save_as_two(tmp_path, 10, 1).folder)
    with pytest.raises(CheckpointError, match="format version 99; this program reads up to 2, use a newer one"):
        version_in(tmp_path)


def test_a_newer_checkpoint_stops_an_older_program_which_neither_goes_back_nor_replaces_it(tmp_path: Path) -> None:
    save_as_two(tmp_path, 10, 1)
    newer = save_as_two(tmp_path, 20, 2).folder
    of_a_newer_format(newer)
    before = {path: path.read_bytes() for path in newer.iterdir()}
    for find in (checkpoint_folders.checkpoints_to_try, checkpoint_folders.newest_iteration, open_checkpoint):
        with pytest.raises(NewerFormatError, match="a newer program has saved here(.|\n)*format version 99"):
            find(tmp_path)
    assert [one.iteration for one in checkpoint_folders.checkpoints_to_try(tmp_path, 10)] == [10]
    assert checkpoint_folders.newest_iteration(tmp_path, 10) == 10
    with pytest.raises(NewerFormatError, match="format version 99"):
        save_as_two(tmp_path, 20, 3)
    assert {path: path.read_bytes() for path in newer.iterdir()} == before


def test_an_independent_reader_finds_the_same_bytes_where_the_manifest_says(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = save_as_two(tmp_path, 10, 1).folder
    manifest = parse_manifest(json.loads((folder / checkpoint_folders.MANIFEST).read_text()))
    result = {name: torch.full_like(value, float("nan")) for name, value in content(1).items()}
    for name, whole in manifest.tensors.items():
        for piece in whole.pieces:
            with safe_open(folder / piece.file, "pt") as file:
                keys = [key for key in file.keys() if key == name or key.startswith(name + "[")]
                assert file.metadata()["save"] == manifest.save
                (key,) = keys
                result[name][piece.box.slices()] = file.get_tensor(key)
    assert all(torch.equal(result[name], value) for name, value in content(1).items())
    target = {name: torch.zeros_like(value) for name, value in content(1).items()}
    load_into_sharded_state(target, open_native_checkpoint(folder))
    assert all(torch.equal(target[name], result[name]) for name in result)
