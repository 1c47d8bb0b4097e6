"""Objects behind fsspec read as files are: by range, whole, from a cache that processes race for."""

import multiprocessing
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megatron.core.config.flags.declare import add_config_arguments
from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets import sidecar, storage
from megatron.core.datasets.bin_idx_check import bin_idx_pair_problems
from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.storage import (
    DataError,
    ObjectBlockReader,
    atomic_file,
    cached_local_copy,
    read_with_retries,
)

BLOCK = storage.BLOCK_BYTES


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """A pair as objects in fsspec's memory, for this process only."""
    content = pair_bytes(2000)
    system = fsspec.filesystem("memory")
    for ending, part in content.items():
        system.pipe_file(f"/bucket/{tmp_path.name}.{ending}", part)
    yield f"memory://bucket/{tmp_path.name}"
    system.rm("/bucket", recursive=True)


def pair_bytes(sequences: int) -> dict[str, bytes]:
    """A pair whose sequence i is i ids i % 7 + 1 long: 0 1 2 ..."""
    lengths = np.arange(sequences, dtype=np.int32) % 7 + 1
    ids = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]).astype(np.int64) * 4
    return {
        "bin": ids.tobytes(),
        "idx": b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 4, sequences, sequences + 1)
        + lengths.tobytes()
        + starts.tobytes()
        + np.arange(sequences + 1, dtype=np.int64).tobytes(),
    }


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_remote_pair_reads_like_a_local_one(tmp_path, remote, kept, mmap):
    cache = tmp_path / "cache"
    data = IndexedDataset(remote, mmap, cache=str(cache) if kept else None)
    assert len(data) == 2000
    for sequence in (0, 6, 7, 1234, 1999):
        assert data[sequence].tolist() == list(range(sequence % 7 + 1))
    assert data.get(13, 2, 3).tolist() == [2, 3, 4]
    again = pickle.loads(pickle.dumps(data))
    assert again[1999].tolist() == data[1999].tolist() and again.cache == data.cache
    assert [path.name.split("-", 1)[1] for path in cache.glob("*")] == ([f"{tmp_path.name}.idx"] if kept else [])
    assert bin_idx_pair_problems(remote) == []


def test_a_prefix_with_file_scheme_is_read_through_fsspec(tmp_path):
    for ending, part in pair_bytes(10).items():
        (tmp_path / f"data.{ending}").write_bytes(part)
    assert IndexedDataset(f"file://{tmp_path}/data", cache=str(tmp_path / "cache"))[6].tolist() == list(range(7))


def test_the_sidecar_of_a_remote_pair_is_read(remote):
    assert sidecar.read_sidecar(remote) is None
    with fsspec.open(f"{remote}.json", "wb") as file:
        file.write(sidecar.encode_sidecar(sidecar.DatasetSidecar(1, 2, 3, "int32")))
    assert sidecar.read_sidecar(remote).tokens == 3


def test_an_index_is_fetched_once_and_again_when_it_changes(tmp_path, remote, monkeypatch):
    fetched = []
    fetch = storage.fetch_object_range
    monkeypatch.setattr(
        storage, "fetch_object_range", lambda url, start, end: fetched.append(url) or fetch(url, start, end)
    )
    first = cached_local_copy(f"{remote}.idx", tmp_path)
    assert cached_local_copy(f"{remote}.idx", tmp_path) == first and len(fetched) == 1
    first.write_bytes(b"short")
    assert (
        cached_local_copy(f"{remote}.idx", tmp_path).stat().st_size == len(pair_bytes(2000)["idx"])
        and len(fetched) == 2
    )
    for content in (pair_bytes(2000)["idx"][:-1] + b"x", pair_bytes(30)["idx"]):  # of the same size, and of another
        fsspec.filesystem("memory").pipe_file(f"{remote.removeprefix('memory:/')}.idx", content)
        changed = cached_local_copy(f"{remote}.idx", tmp_path)
        assert changed != first and changed.read_bytes() == content


def race(url: str, folder: str) -> None:
    """Copy an object and look at the copy, many times."""
    for _ in range(20):
        copy = cached_local_copy(url, Path(folder))
        assert copy.read_bytes() == pair_bytes(5000)["idx"]
        copy.unlink(missing_ok=True)


def test_processes_may_race_for_a_copy(tmp_path):
    (tmp_path / "data.idx").write_bytes(pair_bytes(5000)["idx"])
    context = multiprocessing.get_context("fork")
    racers = [
        context.Process(target=race_safely, args=(f"file://{tmp_path}/data.idx", str(tmp_path / "cache")))
        for _ in range(3)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert not list((tmp_path / "cache").glob("*.tmp"))


def race_safely(url: str, folder: str) -> None:
    """Like `race`; another process may remove the copy between finding and reading it."""
    for _ in range(30):
        try:
            race(url, folder)
            return
        except FileNotFoundError:
            continue


@pytest.mark.parametrize(
    "start, count", [(0, 10), (BLOCK - 3, 6), (5 * BLOCK - 1, BLOCK + 2), (7, 12 * BLOCK), (0, 40 * BLOCK + 5)]
)
def test_ranges_of_an_object_equal_slices_of_its_bytes(start, count):
    content = np.random.default_rng(0).bytes(40 * BLOCK + 5)
    fsspec.filesystem("memory").pipe_file("/blocks/data.bin", content)
    reader = ObjectBlockReader("memory://blocks/data.bin", len(content))
    assert reader.read(start, count) == content[start : start + count]
    with pytest.raises(DataError, match="ends before byte"):
        reader.read(len(content) - 1, 2)
    fsspec.filesystem("memory").rm("/blocks", recursive=True)


def test_threads_share_the_kept_blocks_and_their_number_stays_bounded(monkeypatch):
    content = np.random.default_rng(0).bytes(40 * 1024)
    monkeypatch.setattr(storage, "BLOCK_BYTES", 1024)
    fetched = []
    monkeypatch.setattr(
        storage, "fetch_object_range", lambda url, start, end: fetched.append(start) or content[start:end]
    )
    reader = ObjectBlockReader("memory://x", len(content))
    assert reader.read(0, 8) == reader.read(0, 8) and fetched == [0], "a kept block is not fetched again"
    places = np.random.default_rng(1).integers(0, len(content) - 2000, 2000).tolist()
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda place: reader.read(place, 2000) == content[place : place + 2000], places))
    assert reader._cached_block.cache_info().currsize <= storage.KEPT_BLOCKS


def test_what_is_missing_or_unknown_is_explained(remote, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda pause: pytest.fail("waiting does not mend this"))
    with pytest.raises(DataError, match=r"memory://bucket/none\.idx cannot be opened"):
        IndexedDataset("memory://bucket/none")
    with pytest.raises(DataError, match=r"nonsense://bucket/x\.idx cannot be read: Protocol not known"):
        IndexedDataset("nonsense://bucket/x")
    with pytest.raises(DataError, match="write to a local folder"):
        IndexedDatasetBuilder(remote, np.int32)


def test_a_shortened_object_is_an_error(remote):
    data = IndexedDataset(remote)
    fsspec.filesystem("memory").pipe_file(f"{remote.removeprefix('memory:/')}.bin", b"")
    with pytest.raises(DataError, match="has become shorter"):
        data[5]


def test_a_busy_store_is_asked_again_and_then_given_up(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", pauses.append)
    answers = [ConnectionError("reset"), RuntimeError("slow down"), "content"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert read_with_retries(ask, "s3://b/x") == "content" and len(pauses) == 2
    answers[:] = [TimeoutError("too late")] * 4
    with pytest.raises(DataError, match="s3://b/x cannot be read: too late"):
        read_with_retries(ask, "s3://b/x")
    assert len(pauses) == 5 and not answers


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic_file(path) as file:
        file.write(b"new")
        raise RuntimeError("half way")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, remote):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="--object-storage-cache-path"):
        IndexedDataset(remote, cache=str(tmp_path / "file" / "cache"))


def test_the_cache_folder_is_megatrons_flag():
    import argparse

    parser = argparse.ArgumentParser()
    add_config_arguments(parser, DataConfig)
    assert parser.parse_args(["--object-storage-cache-path", "x"]).object_storage_cache_path == "x"
