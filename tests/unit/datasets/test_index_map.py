"""The GPT indices against a slow walk over the tokens, and their cache under damage and races."""

import logging
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import index_map
from megatron.core.datasets.index_map import (
    EpochAndSampleCounts,
    IndexCacheFolder,
    build_gpt_indices,
    gpt_index_shapes,
    load_or_build_arrays,
    plan_epochs,
)
from megatron.core.datasets.indexed import DataError


def walk(lengths, order, sequence_length, samples):
    """Where samples begin, by walking through the sequences as Megatron's compiled helper does."""
    rows, place, offset = [(0, 0)], 0, 0
    while len(rows) <= samples:
        remaining = sequence_length + 1
        while remaining != 0:
            left = lengths[order[place]] - offset
            remaining -= left
            if remaining <= 0:
                offset += remaining + left - 1
                remaining = 0
            elif place == len(order) - 1:
                assert len(rows) == samples, "only the last sample may be short"
                offset = lengths[order[place]] - 1
                break
            else:
                place, offset = place + 1, 0
        rows.append((place, offset))
    return rows


def reference(lengths, first, wanted, sequence_length, seed, keep_partial=False):
    """(separate last epoch?, document index, sample index, shuffle index), step by step as Megatron describes them."""
    tokens = sum(lengths)
    epochs, total = 1, tokens
    while wanted is not None and total < wanted * sequence_length + 1:
        epochs += 1
        total += tokens
    separate = False
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // sequence_length
        separate = wanted - before < int(0.80 * ((tokens - 1) // sequence_length))
    random = np.random.RandomState(seed)
    ids = list(range(first, first + len(lengths)))
    order = []
    for rounds in [epochs - 1, 1] if separate else [epochs]:
        part = np.array(ids * rounds, np.int32)
        random.shuffle(part)
        order += part.tolist()
    ratio = (epochs * tokens - 1) / sequence_length
    samples = math.ceil(ratio) if keep_partial else math.floor(ratio)
    rows = walk(dict(zip(ids, lengths)), order, sequence_length, samples)
    shuffled = []
    for part in [(0, before), (before, samples)] if separate else [(0, samples)]:
        piece = np.arange(*part, dtype=np.uint32)
        random.shuffle(piece)
        shuffled += piece.tolist()
    return separate, order, rows, shuffled


@pytest.mark.parametrize("at_once", [index_map.WALKED_AT_ONCE, 3])
def test_indices_equal_a_slow_walk_in_many_random_cases(monkeypatch, at_once):
    monkeypatch.setattr(index_map, "WALKED_AT_ONCE", at_once)
    random = np.random.default_rng(11)
    seen = {"separate": 0, "epochs": 0, "empty": 0}
    for _ in range(400):
        sequence_length = int(random.integers(1, 12))
        lengths = random.integers(0, 20, random.integers(1, 15)) * (random.random() < 0.9)
        lengths[random.integers(len(lengths))] += sequence_length + 1
        requested = None if random.random() < 0.2 else int(random.integers(1, 120))
        first, seed = int(random.integers(0, 5)), int(random.integers(0, 1000))
        lengths = lengths.astype(np.int32)
        plan = plan_epochs(int(lengths.sum()), requested, sequence_length=sequence_length)
        built = build_gpt_indices(lengths, plan, first=first, sequence_length=sequence_length, seed=seed)
        separate, order, rows, shuffled = reference(lengths.tolist(), first, requested, sequence_length, seed)
        case = (lengths, requested, sequence_length)
        assert plan.separates_last_epoch == separate, case
        assert built["document_index"].tolist() == order, case
        assert built["sample_index"].tolist() == [list(row) for row in rows], case
        assert built["shuffle_index"].tolist() == shuffled, case
        assert plan.samples >= (requested or 1), case
        shapes = {key: (array.shape, array.dtype.type) for key, array in built.items()}
        assert shapes == gpt_index_shapes(len(lengths), plan), case
        seen["separate"] += separate
        seen["epochs"] += plan.epochs > 2
        seen["empty"] += bool((lengths == 0).any())
    assert min(seen.values()) > 20, f"the random cases cover every rule: {seen}"


@pytest.mark.parametrize("at_once", [index_map.WALKED_AT_ONCE, 3])
def test_a_kept_partial_sample_equals_the_slow_walk(monkeypatch, at_once):
    monkeypatch.setattr(index_map, "WALKED_AT_ONCE", at_once)
    random = np.random.default_rng(5)
    partial = 0
    for _ in range(200):
        sequence_length = int(random.integers(1, 9))
        lengths = random.integers(1, 12, random.integers(1, 9)).astype(np.int32)
        if lengths.sum() < 2:
            continue
        plan = plan_epochs(int(lengths.sum()), None, sequence_length=sequence_length, keep_partial=True)
        built = build_gpt_indices(lengths, plan, first=0, sequence_length=sequence_length, seed=1)
        _, _, rows, shuffled = reference(lengths.tolist(), 0, None, sequence_length, 1, keep_partial=True)
        assert built["sample_index"].tolist() == [list(row) for row in rows]
        assert built["shuffle_index"].tolist() == shuffled
        partial += (int(lengths.sum()) - 1) % sequence_length != 0
    assert partial > 20


@pytest.mark.parametrize(
    "count, samples, place, order",
    [
        (10, 10, np.int32, np.uint32),
        (2**31 - 1, 2**32 - 3, np.int32, np.uint32),
        (2**31, 2**32 - 2, np.int64, np.int64),
    ],
)
def test_index_types_grow_where_32_bits_end(count, samples, place, order):
    shapes = gpt_index_shapes(count, EpochAndSampleCounts(1, samples, samples))
    assert shapes["document_index"][1] is np.int32
    assert shapes["sample_index"][1] is place
    assert shapes["shuffle_index"][1] is order


SHAPES = {"ids": ((1000,), np.int64)}


def numbers() -> dict[str, np.ndarray]:
    """A thousand numbers."""
    return {"ids": np.arange(1000, dtype=np.int64)}


def never() -> dict[str, np.ndarray]:
    """A build that must not happen."""
    raise AssertionError("the cache was not used")


def test_a_cache_is_built_once_and_then_mapped(tmp_path):
    cache = IndexCacheFolder(tmp_path / "deep" / "cache")
    first = load_or_build_arrays(cache, "Numbers-train", {"n": 1}, SHAPES, numbers)
    again = load_or_build_arrays(cache, "Numbers-train", {"n": 1}, SHAPES, never)
    assert (first["ids"] == again["ids"]).all() and not again["ids"].flags.writeable
    names = sorted(path.name.split("-", 1)[1] for path in cache.folder.iterdir())
    assert names == ["Numbers-train-description.txt", "Numbers-train-ids.npy"]
    with pytest.raises(AssertionError, match="not used"):
        load_or_build_arrays(cache, "Numbers-train", {"n": 2}, SHAPES, never)


@pytest.mark.parametrize(
    "damage",
    ["truncate", "header", "huge header", "content", "empty", "missing", "shape", "dtype", "description", "checksums"],
)
def test_a_damaged_cache_file_is_built_again_with_a_message(tmp_path, caplog, damage):
    cache = IndexCacheFolder(tmp_path)
    load_or_build_arrays(cache, "Numbers", {}, SHAPES, numbers)
    (path,) = tmp_path.glob("*.npy")
    content = path.read_bytes()
    (description,) = tmp_path.glob("*.txt")
    message = description.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "header":
        path.write_bytes(b"x" * 64 + content[64:])
    elif damage == "huge header":
        path.write_bytes(content.replace(b"(1000,)", b"(10**9)"))
    elif damage == "content":
        path.write_bytes(content[:-500] + b"\xff" + content[-499:])
    elif damage == "checksums":
        description.write_bytes(message[:-4])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    elif damage == "shape":
        np.save(path, np.arange(999, dtype=np.int64))
    elif damage == "dtype":
        np.save(path, np.arange(1000, dtype=np.int32))
    else:
        description.write_text("{")
    assert load_or_build_arrays(cache, "Numbers", {}, SHAPES, numbers)["ids"].tolist() == list(range(1000))
    assert (path.read_bytes(), description.read_bytes()) == (content, message), "the cache is whole again"
    assert "is damaged and is built again" in caplog.text


def test_a_cache_folder_that_cannot_be_written_stops_the_run_only_when_it_was_chosen(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(DataError, match="--data-cache-path"):
        load_or_build_arrays(IndexCacheFolder(blocked / "cache"), "Numbers", {}, SHAPES, numbers)
    with caplog.at_level(logging.WARNING):
        built = load_or_build_arrays(IndexCacheFolder(blocked / "cache", chosen=False), "Numbers", {}, SHAPES, numbers)
    assert built["ids"][-1] == 999 and "cannot be written" in caplog.text


def build_many_times(folder: str, seed: int) -> None:
    """Race for the same caches in an order of its own, now and then damaging one."""
    random = np.random.RandomState(seed)
    lengths = np.full(200, 17, np.int32)
    for number in random.permutation(12).tolist():
        plan = plan_epochs(int(lengths.sum()), 300 + number, sequence_length=8)
        result = load_or_build_arrays(
            IndexCacheFolder(Path(folder)),
            "Race-train",
            {"n": number},
            gpt_index_shapes(200, plan),
            lambda: build_gpt_indices(lengths, plan, first=0, sequence_length=8, seed=3),
        )
        expected = build_gpt_indices(lengths, plan, first=0, sequence_length=8, seed=3)
        assert all((result[key] == expected[key]).all() for key in expected)
        if number % 4 == 0:
            for path in Path(folder).glob("*-sample_index.npy"):
                path.unlink(missing_ok=True)


def test_processes_may_race_for_one_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    racers = [context.Process(target=build_many_times, args=(str(tmp_path), seed)) for seed in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0, 0]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_size_that_only_building_tells_is_cached_too(tmp_path):
    shapes = {"ids": ((None,), np.int64)}
    load_or_build_arrays(IndexCacheFolder(tmp_path), "Numbers", {}, shapes, numbers)
    assert len(load_or_build_arrays(IndexCacheFolder(tmp_path), "Numbers", {}, shapes, never)["ids"]) == 1000


def build_slowly(folder: str, seconds: float) -> None:
    """Build the numbers in so many seconds; a file a build tells how often that happened."""

    def build() -> dict[str, np.ndarray]:
        Path(folder, f"built-by-{os.getpid()}").write_text("")
        time.sleep(seconds)
        return numbers()

    result = load_or_build_arrays(IndexCacheFolder(Path(folder, "cache")), "Numbers", {}, SHAPES, build)
    assert result["ids"].tolist() == list(range(1000))


def start(*arguments: object) -> multiprocessing.Process:
    """`build_slowly` in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=build_slowly, args=arguments)
    process.start()
    return process


def test_of_many_processes_of_a_machine_one_builds(tmp_path):
    racers = [start(str(tmp_path), 0.3) for _ in range(6)]
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * 6
    assert len(list(tmp_path.glob("built-by-*"))) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 2, "no lock and no temporary file stays"


def test_when_the_process_that_builds_is_killed_the_next_one_builds(tmp_path):
    first = start(str(tmp_path), 60)
    while not list(tmp_path.glob("built-by-*")):
        time.sleep(0.01)
    second = start(str(tmp_path), 0)
    time.sleep(0.2)
    assert second.is_alive() and len(list(tmp_path.glob("built-by-*"))) == 1, "the second waits for the first"
    os.kill(first.pid, signal.SIGKILL)
    second.join(30)
    first.join(30)
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0)
    assert len(list(tmp_path.glob("built-by-*"))) == 2 and len(list((tmp_path / "cache").iterdir())) == 2


def test_a_process_killed_while_it_writes_leaves_a_cache_that_works(tmp_path, monkeypatch):
    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for moment in ("save", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(*{"save": (index_map.np, "save"), "replace": (index_map.os, "replace")}[moment], die)
            writer = start(str(tmp_path), 0)
            writer.join(30)
            assert writer.exitcode == -signal.SIGKILL
    left = list((tmp_path / "cache").glob("*.tmp"))
    assert len(left) == 2, "the test kills between beginning and end"
    os.utime(left[0], (0, 0))
    build_slowly(str(tmp_path), 0)
    assert [path.exists() for path in left] == [False, True], "what is a day old is swept up"


def test_waiting_for_another_process_ends_at_last(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(index_map, "LONGEST_WAIT", 0.2)
    first = start(str(tmp_path), 60)
    while not list(tmp_path.glob("built-by-*")):
        time.sleep(0.01)
    build_slowly(str(tmp_path), 0)
    assert "this one builds for itself" in caplog.text
    first.kill()
    first.join(30)


def test_a_file_system_without_locks_is_no_hindrance(tmp_path, monkeypatch):
    def unsupported(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(index_map.fcntl, "flock", unsupported)
    build_slowly(str(tmp_path), 0)
    assert load_or_build_arrays(IndexCacheFolder(tmp_path / "cache"), "Numbers", {}, SHAPES, never)["ids"][-1] == 999


def test_an_error_of_the_build_itself_is_not_taken_for_one_of_the_cache(tmp_path):
    def fail() -> dict[str, np.ndarray]:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        load_or_build_arrays(IndexCacheFolder(tmp_path), "Numbers", {}, SHAPES, fail)
    assert not list(tmp_path.iterdir())
