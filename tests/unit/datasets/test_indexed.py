"""The .bin/.idx pair against bytes written by hand from the table of the format."""

import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import indexed, sidecar, storage
from megatron.core.datasets.bin_idx_check import bin_idx_pair_problems, write_sidecar_of_pair
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.gpt import GPTDataset, GPTSampleOptions
from megatron.core.datasets.indexed import (
    BuilderResumePoint,
    DataError,
    IndexedDataset,
    IndexedDatasetBuilder,
    token_id_dtype,
)
from megatron.core.datasets.sidecar import DatasetSidecar
from tests.helpers.sentences import some_documents
from tests.helpers.sentences import write as write_sentences

# Three documents: [5, 6, 7], nothing, and two sequences [8] and [9, 10].
SEQUENCES = ([5, 6, 7], [8], [9, 10])
DOCUMENTS = (0, 1, 1, 3)


def idx_bytes(code: int, itemsize: int) -> bytes:
    """The index of the three documents, field by field."""
    lengths = [len(ids) for ids in SEQUENCES]
    offsets = [0, 3 * itemsize, 4 * itemsize]
    return (
        b"\x4d\x4d\x49\x44\x49\x44\x58\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", 3)
        + struct.pack("<Q", 4)
        + struct.pack("<3i", *lengths)
        + struct.pack("<3q", *offsets)
        + struct.pack("<4q", *DOCUMENTS)
    )


FORMATS = [
    (1, "B", np.uint8),
    (2, "b", np.int8),
    (3, "h", np.int16),
    (4, "i", np.int32),
    (5, "q", np.int64),
    (6, "d", np.float64),
    (7, "f", np.float32),
    (8, "H", np.uint16),
]


@pytest.fixture
def by_hand(tmp_path: Path) -> str:
    """A pair of int32 ids written without the code under test."""
    prefix = tmp_path / "by_hand"
    Path(f"{prefix}.idx").write_bytes(idx_bytes(4, 4))
    Path(f"{prefix}.bin").write_bytes(struct.pack("<6i", 5, 6, 7, 8, 9, 10))
    return str(prefix)


@pytest.mark.parametrize("code, letter, dtype", FORMATS)
@pytest.mark.parametrize("mmap", [True, False])
def test_a_pair_written_by_hand_is_read(tmp_path, code, letter, dtype, mmap):
    prefix = tmp_path / "data"
    Path(f"{prefix}.idx").write_bytes(idx_bytes(code, struct.calcsize(letter)))
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<6{letter}", 5, 6, 7, 8, 9, 10))
    data = IndexedDataset(prefix, mmap)
    assert data.dtype == dtype and len(data) == 3
    assert data.sequence_lengths.tolist() == [3, 1, 2]
    assert tuple(data.document_indices.tolist()) == DOCUMENTS
    assert [data[i].tolist() for i in range(3)] == list(SEQUENCES)
    assert data[1].dtype == dtype
    assert data.get(0, 1).tolist() == [6, 7]
    assert data.get(2, 0, 1).tolist() == [9]
    assert data.get(2, 2).tolist() == []


@pytest.mark.parametrize("code, letter, dtype", FORMATS)
def test_a_written_pair_has_the_bytes_of_the_table(tmp_path, code, letter, dtype):
    with IndexedDatasetBuilder(tmp_path / "data", dtype) as builder:
        builder.add_sequence(SEQUENCES[0])
        builder.end_document()
        builder.end_document()
        builder.add_sequence(SEQUENCES[1])
        builder.add_sequence(np.array(SEQUENCES[2], dtype))
        builder.end_document()
    assert (tmp_path / "data.idx").read_bytes() == idx_bytes(code, struct.calcsize(letter))
    assert (tmp_path / "data.bin").read_bytes() == struct.pack(f"<6{letter}", 5, 6, 7, 8, 9, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx", "data.json"]


def test_a_pair_without_sequences_is_written_and_read(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "empty", np.uint16) as builder:
        builder.end_document()
    assert (tmp_path / "empty.bin").read_bytes() == b""
    for mmap in (True, False):
        data = IndexedDataset(tmp_path / "empty", mmap)
        assert (len(data), data.document_indices.tolist()) == (0, [0, 0])


def test_joining_pairs_equals_writing_all_their_documents(tmp_path, by_hand):
    parts = [[[1, 2], []], [[3]], []]
    for number, documents in enumerate(parts):
        with IndexedDatasetBuilder(tmp_path / f"part{number}", np.int32) as builder:
            for ids in documents:
                if ids:
                    builder.add_sequence(ids)
                builder.end_document()
    with IndexedDatasetBuilder(tmp_path / "joined", np.int32) as joined:
        for prefix in (tmp_path / "part0", by_hand, tmp_path / "part1", tmp_path / "part2"):
            joined.add_index(prefix)
    with IndexedDatasetBuilder(tmp_path / "whole", np.int32) as whole:
        for document in ([[1, 2]], [], [SEQUENCES[0]], [], [SEQUENCES[1], SEQUENCES[2]], [[3]]):
            for ids in document:
                whole.add_sequence(ids)
            whole.end_document()
    for ending in ("bin", "idx"):
        assert (tmp_path / f"joined.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()


def test_pairs_of_two_dtypes_are_not_joined(tmp_path, by_hand):
    with pytest.raises(DataError, match=r"by_hand\.idx holds ids of type int32, not uint16"):
        with IndexedDatasetBuilder(tmp_path / "joined", np.uint16) as joined:
            joined.add_index(by_hand)
    assert not list(tmp_path.glob("joined*"))


def test_small_vocabularies_are_written_in_two_bytes():
    assert [token_id_dtype(size) for size in (65499, 65500, None)] == [np.uint16, np.int32, np.int32]


@pytest.mark.parametrize("ids", [[70000], [-1], np.array([1, 65536])])
def test_an_id_that_does_not_fit_the_dtype_is_refused(tmp_path, ids):
    with pytest.raises(DataError, match="does not fit uint16"):
        with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
            builder.add_sequence(ids)


def test_an_existing_pair_stays_when_writing_its_successor_fails(tmp_path, by_hand):
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="half way"):
        with IndexedDatasetBuilder(by_hand, np.int32) as builder:
            builder.add_sequence([1, 2, 3])
            builder.end_document()
            raise RuntimeError("half way")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_failure_while_finishing_leaves_the_old_pair_and_no_temporary_files(tmp_path, by_hand, monkeypatch):
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(indexed, "fsync_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        with IndexedDatasetBuilder(by_hand, np.int32) as builder:
            builder.end_document()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("keep", range(0, len(idx_bytes(4, 4)), 7))
def test_a_truncated_index_is_named_with_both_sizes(by_hand, keep):
    path = Path(f"{by_hand}.idx")
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(DataError, match=rf"by_hand\.idx has {keep} bytes, .*(34|{len(whole)})"):
        IndexedDataset(by_hand)


def test_a_truncated_bin_file_is_named_with_both_sizes(by_hand):
    Path(f"{by_hand}.bin").write_bytes(b"\0" * 23)
    with pytest.raises(DataError, match=r"by_hand\.bin has 23 bytes, but .*by_hand\.idx describes 24"):
        IndexedDataset(by_hand)


@pytest.mark.parametrize(
    "at, value, message",
    [
        (0, b"TNTIDX\x00\x00", "begins with b'TNTIDX.*'lazy' or 'cached'.*tools/preprocess_data.py"),
        (0, b"GARBAGE", "begins with b'GARBAGE"),
        (9, struct.pack("<Q", 2), "has format version 2"),
        (17, b"\x09", "has dtype code 9"),
        (17, b"\x00", "has dtype code 0"),
        (18, struct.pack("<Q", 2**40), "need"),
        (18, struct.pack("<Q", 2**64 - 1), "need"),
        (34, struct.pack("<i", -3), "a sequence of -3 tokens"),
        (34, struct.pack("<i", 4), "from byte 0 to 24, but their lengths take bytes 0 to 28"),
        (34 + 12, struct.pack("<q", 4), "from byte 4 to 24"),
        (34 + 12 * 3, struct.pack("<q", 1), r"document array from \(1, 3\), expected \(0, 3\)"),
        (34 + 12 * 3 + 8 * 3, struct.pack("<q", 4), r"document array from \(0, 4\), expected \(0, 3\)"),
        (
            34 + 12 * 3 + 8,
            struct.pack("<q", -1),
            "1 documents end before they begin, first document 0; the index is damaged",
        ),
        (
            34 + 12 * 3 + 8,
            struct.pack("<q", 9),
            "1 documents end before they begin, first document 1; the index is damaged",
        ),
    ],
)
def test_a_damaged_field_of_the_index_is_named(by_hand, at, value, message):
    path = Path(f"{by_hand}.idx")
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"by_hand\.idx.* {message}"):
        IndexedDataset(by_hand)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_missing_file_is_named(by_hand, ending):
    Path(f"{by_hand}.{ending}").unlink()
    with pytest.raises(DataError, match=rf"by_hand\.{ending} cannot be opened: No such file"):
        IndexedDataset(by_hand)


def test_a_file_name_given_as_prefix_is_explained(by_hand):
    with pytest.raises(DataError, match=r"by_hand\.bin\.idx cannot be opened.*without the ending: .*by_hand$"):
        IndexedDataset(f"{by_hand}.bin")


@pytest.mark.parametrize("arguments", [(3,), (-1,), (0, 4), (0, -1), (0, 1, 3), (0, 0, -1)])
def test_reading_outside_a_sequence_is_refused(by_hand, arguments):
    with pytest.raises(IndexError, match="by_hand"):
        IndexedDataset(by_hand).get(*arguments)


@pytest.mark.parametrize("mmap", [True, False])
def test_an_open_pair_can_be_sent_to_another_process(by_hand, mmap):
    copy = pickle.loads(pickle.dumps(IndexedDataset(by_hand, mmap)))
    assert copy[2].tolist() == [9, 10] and copy.mmap is mmap


def test_a_read_that_fails_for_a_moment_is_tried_again(by_hand, monkeypatch):
    answers = [OSError(5, "Input/output error"), OSError(5, "Input/output error"), None]
    pread = storage.os.pread

    def flaky(*arguments: int) -> bytes:
        answer = answers.pop(0)
        if answer:
            raise answer
        return pread(*arguments)

    pauses: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", pauses.append)
    data = IndexedDataset(by_hand, mmap=False)
    monkeypatch.setattr(storage.os, "pread", flaky)
    assert data[0].tolist() == [5, 6, 7]
    assert len(pauses) == 2 and pauses[1] > pauses[0] > 0


@pytest.mark.parametrize("cut", [0, 23])
def test_a_mapped_bin_file_that_shrinks_is_named_before_its_pages_are_touched(by_hand, cut):
    data = IndexedDataset(by_hand)
    assert data[0].tolist() == [5, 6, 7]
    os.truncate(f"{by_hand}.bin", cut)
    for read in (lambda: data[2], lambda: data.read_raw_bytes(0, 4)):
        with pytest.raises(
            DataError,
            match=rf"by_hand\.bin has {cut} bytes, and had 24 when it was opened: it was cut or is written anew",
        ):
            read()


def test_a_bin_file_that_shrinks_while_open_is_an_error(by_hand):
    data = IndexedDataset(by_hand, mmap=False)
    Path(f"{by_hand}.bin").write_bytes(b"")
    with pytest.raises(DataError, match="has become shorter"):
        data[0]


def pair_by_hand(documents: list[list[list[int]]], code: int, letter: str) -> tuple[bytes, bytes]:
    """(.bin, .idx) of documents of sequences, field by field."""
    sequences = [ids for document in documents for ids in document]
    size = struct.calcsize(f"<{letter}")
    places, ends = [0], [0]
    for ids in sequences:
        places.append(places[-1] + len(ids) * size)
    for document in documents:
        ends.append(ends[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    index += b"".join(struct.pack("<i", len(ids)) for ids in sequences)
    index += b"".join(struct.pack("<q", place) for place in places[:-1])
    index += b"".join(struct.pack("<q", end) for end in ends)
    return b"".join(struct.pack(f"<{len(ids)}{letter}", *ids) for ids in sequences), index


SOME_DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents=SOME_DOCUMENTS, form=st.sampled_from(FORMATS))
def test_any_documents_are_written_to_the_bytes_of_the_table_and_read_back(tmp_path_factory, documents, form):
    code, letter, dtype = form
    folder = tmp_path_factory.mktemp("any")
    ids, index = pair_by_hand(documents, code, letter)
    with IndexedDatasetBuilder(folder / "one", dtype) as builder:
        for document in documents:
            for sequence in document:
                builder.add_sequence(sequence)
            builder.end_document()
    with IndexedDatasetBuilder(folder / "flat", dtype) as flat:
        for some in (documents[: len(documents) // 2], documents[len(documents) // 2 :]):
            sequences = [sequence for document in some for sequence in document]
            flat.add_documents(
                np.array([token for sequence in sequences for token in sequence], np.int64),
                np.array([len(sequence) for sequence in sequences], np.int64),
                np.array([len(document) for document in some], np.int64),
            )
    for name in ("one", "flat"):
        assert ((folder / f"{name}.bin").read_bytes(), (folder / f"{name}.idx").read_bytes()) == (ids, index)
        assert bin_idx_pair_problems(str(folder / name)) == []
    data = IndexedDataset(folder / "one", mmap=bool(len(documents) % 2))
    bounds = data.document_indices.tolist()
    assert [[data[i].tolist() for i in range(*pair)] for pair in zip(bounds, bounds[1:])] == documents


def test_documents_added_at_once_have_one_sequence_each_and_empty_ones_none(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_documents(np.array([5, 6, 7, 8], np.uint16), np.array([3, 0, 1]))
    assert ((tmp_path / "data.bin").read_bytes(), (tmp_path / "data.idx").read_bytes()) == pair_by_hand(
        [[[5, 6, 7]], [], [[8]]], 8, "H"
    )


def test_modes_of_images_and_text_follow_the_document_array(tmp_path):
    ids, index = pair_by_hand([[[1, 2], [3]], [[4]]], 4, "i")
    with IndexedDatasetBuilder(tmp_path / "images", np.int32, multimodal=True) as builder:
        builder.add_sequence([1, 2])
        builder.add_sequence([3], mode=1)
        builder.end_document()
        builder.add_sequence([4])
        builder.end_document()
    assert (tmp_path / "images.idx").read_bytes() == index + struct.pack("<3b", 0, 1, 0)
    data = IndexedDataset(tmp_path / "images", multimodal=True)
    assert data.sequence_modes.tolist() == [0, 1, 0] and data[1].tolist() == [3]
    assert pickle.loads(pickle.dumps(data)).sequence_modes.tolist() == [0, 1, 0]
    assert IndexedDataset(tmp_path / "images").sequence_modes is None
    with IndexedDatasetBuilder(tmp_path / "twice", np.int32, multimodal=True) as builder:
        builder.add_index(tmp_path / "images")
        builder.add_index(tmp_path / "images")
    assert IndexedDataset(tmp_path / "twice", multimodal=True).sequence_modes.tolist() == [0, 1, 0, 0, 1, 0]
    Path(tmp_path / "images.idx").write_bytes(index)
    with pytest.raises(DataError, match="3 sequences and 3 document entries need 97"):
        IndexedDataset(tmp_path / "images", multimodal=True)


def test_joining_refuses_a_pair_that_is_not_laid_end_to_end(tmp_path, by_hand):
    path = Path(f"{by_hand}.idx")
    content = bytearray(path.read_bytes())
    content[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", 8)
    path.write_bytes(content)
    with pytest.raises(DataError, match="do not begin where the lengths before them end"):
        with IndexedDatasetBuilder(tmp_path / "joined", np.int32) as joined:
            joined.add_index(by_hand)


@pytest.mark.parametrize("sequence", [0, 1])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_sequence_that_does_not_end_where_the_next_begins_is_not_read(by_hand, sequence, mmap):
    path = Path(f"{by_hand}.idx")
    content = bytearray(path.read_bytes())
    content[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", 8)
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"1 sequences do not begin where the lengths before them end, first sequence 1; the index"
    ):
        IndexedDataset(by_hand, mmap)
    with pytest.raises(DataError, match=rf"gives sequence {sequence} .*the index is damaged"):
        IndexedDataset(by_hand, mmap, check=False)[sequence]


def test_a_flipped_bit_of_an_index_is_refused_with_the_name_of_the_file(tmp_path):
    write_sentences(tmp_path / "data", some_documents(40))
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 200).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"data\.idx"):
            IndexedDataset(tmp_path / "data")


def test_without_a_sidecar_a_flipped_bit_is_refused_or_moves_the_end_of_a_document(tmp_path):
    opened, path = write_sentences(tmp_path / "data", some_documents(40)), tmp_path / "data.idx"
    lengths, documents = opened.sequence_lengths.copy(), opened.document_indices.copy()
    (tmp_path / "data.json").unlink()
    content, passed = path.read_bytes(), 0
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 200).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            result = IndexedDataset(tmp_path / "data")
        except DataError as error:
            assert "data.idx" in str(error)
            continue
        passed += 1
        assert np.array_equal(result.sequence_lengths, lengths) and result.dtype == np.uint16
        assert (np.diff(result.document_indices) >= 0).all() and (result.document_indices != documents).sum() == 1
    assert passed < 20, passed


def test_without_a_sidecar_no_flipped_bit_passes_where_documents_are_sequences(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        for length in np.random.default_rng(1).integers(1, 9, 100).tolist():
            builder.add_sequence(np.arange(length))
            builder.end_document()
    (tmp_path / "data.json").unlink()
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 400).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"data\.idx"):
            IndexedDataset(tmp_path / "data")


def test_a_pair_of_another_program_gets_a_sidecar_that_tells_every_damage(by_hand):
    write_sidecar_of_pair(by_hand)
    assert bin_idx_pair_problems(by_hand) == []
    index = Path(f"{by_hand}.idx").read_bytes()
    for bit in range(0, 8 * len(index), 7):
        damaged = bytearray(index)
        damaged[bit // 8] ^= 1 << bit % 8
        Path(f"{by_hand}.idx").write_bytes(damaged)
        with pytest.raises(DataError):
            IndexedDataset(by_hand)
    Path(f"{by_hand}.idx").write_bytes(index)
    with pytest.raises(DataError, match="is there already"):
        write_sidecar_of_pair(by_hand)


def test_a_bin_file_with_more_than_its_index_describes_is_refused_without_a_sidecar(by_hand):
    with open(f"{by_hand}.bin", "ab") as file:
        file.write(bytes(4))
    with pytest.raises(DataError, match="4 more than .*by_hand.idx describes"):
        IndexedDataset(by_hand)


def test_a_type_that_the_sidecar_contradicts_is_refused(tmp_path):
    write_sentences(tmp_path / "data", some_documents(3))
    path = tmp_path / "data.idx"
    path.write_bytes(path.read_bytes()[:17] + b"\x03" + path.read_bytes()[18:])
    with pytest.raises(
        DataError, match=r"data\.json says dtype uint16, but the pair has int16.*or remove .*data\.json"
    ):
        IndexedDataset(tmp_path / "data")
    (tmp_path / "data.json").unlink()
    assert IndexedDataset(tmp_path / "data").dtype == np.int16, "nothing else tells them apart"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 40),
    extra=st.binary(max_size=3),
)
def test_a_fuzzed_index_gives_an_error_or_the_right_sequences_and_checks_find_it(tmp_path_factory, changes, cut, extra):
    documents = [[[5, 6, 7]], [], [[8], [9, 10, 11, 12]], [[13]]]
    ids, index = pair_by_hand(documents, 4, "i")
    sequences = [sequence for document in documents for sequence in document]
    folder = tmp_path_factory.mktemp("fuzz")
    sums = {name: f"xxh3_128:{xxhash.xxh3_128_hexdigest(part)}" for name, part in (("bin", ids), ("idx", index))}
    (folder / "told.json").write_bytes(sidecar.encode_sidecar(DatasetSidecar(4, 4, 9, "int32", checksums=sums)))
    content = bytearray(index)
    for at, value in changes:
        content[at % len(content)] = value
    content = bytes(content[: len(content) - cut] if cut < 20 else content) + extra
    for name in ("told", "bare"):
        (folder / f"{name}.bin").write_bytes(ids)
        (folder / f"{name}.idx").write_bytes(content)
    assert bool(bin_idx_pair_problems(str(folder / "told"))) == (content != index), "checksums tell every change"
    good = not bin_idx_pair_problems(str(folder / "bare"), vocab_size=100)
    try:
        data = IndexedDataset(folder / "bare")
        result = [data[number].tolist() for number in range(len(data))]
    except DataError:
        assert not good, "what the check passes can be read"
        return
    # Without a sidecar, only the type of the ids, the ends of documents and a shorter last sequence can still be wrong.
    if data.dtype.kind in "iu" and data.num_bytes == len(ids):
        assert result == sequences
    assert result == sequences or not good


@settings(max_examples=150, deadline=None, derandomize=True)
@given(at=st.integers(34, 34 + 12 * 40 - 1), value=st.integers(0, 255))
def test_samples_of_a_fuzzed_index_are_right_or_refused(tmp_path_factory, at, value):
    documents = [[[k % 50] * (k % 9 + 1)] for k in range(40)]
    ids, index = pair_by_hand(documents, 8, "H")
    folder = tmp_path_factory.mktemp("samples")
    (folder / "data.bin").write_bytes(ids)
    (folder / "data.idx").write_bytes(index)
    options = GPTSampleOptions(8, 50, 0)
    right = GPTDataset(IndexedDataset(folder / "data"), options, SplitRequest(range(40), 30, "train"), seed=1)
    expected = [right[number]["tokens"].tolist() for number in range(30)]
    (folder / "data.idx").unlink()
    (folder / "data.idx").write_bytes(index[:at] + bytes([value]) + index[at + 1 :])
    try:
        data = GPTDataset(IndexedDataset(folder / "data"), options, SplitRequest(range(40), 30, "train"), seed=1)
    except DataError:
        return
    for number in range(30):
        try:
            assert data[number]["tokens"].tolist() == expected[number]
        except DataError:
            pass


def documents_of(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Some batches of documents: ids end to end and lengths."""
    generator = np.random.default_rng(seed)
    batches = []
    for _ in range(20):
        lengths = generator.integers(0, 50, 30)
        batches.append((generator.integers(0, 60000, lengths.sum()).astype(np.uint16), lengths))
    return batches


def test_a_builder_goes_on_from_its_marks_to_the_same_bytes(tmp_path):
    batches = documents_of(3)
    with IndexedDatasetBuilder(tmp_path / "whole", np.uint16) as builder:
        for batch in batches:
            builder.add_documents(*batch)
    first = IndexedDatasetBuilder(tmp_path / "data", np.uint16, partial="partial")
    for batch in batches[:7]:
        first.add_documents(*batch)
    marks = first.sync_to_resume_point()
    first.add_documents(*batches[7])
    first.sync_to_resume_point()
    first.close_unfinished()
    assert not (tmp_path / "data.bin").exists() and not (tmp_path / "data.idx").exists()
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16, partial="partial", marks=marks) as second:
        for batch in batches[7:]:
            second.add_documents(*batch)
    for ending in ("bin", "idx", "json"):
        assert (tmp_path / f"data.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes(), ending
    assert len(list(tmp_path.iterdir())) == 6


def test_what_was_written_after_the_marks_is_dropped(tmp_path):
    batches = documents_of(3)
    first = IndexedDatasetBuilder(tmp_path / "data", np.uint16, partial="partial")
    first.add_documents(*batches[0])
    marks = first.sync_to_resume_point()
    first.add_documents(*batches[1])
    first.sync_to_resume_point()
    first.close_unfinished()
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16, partial="partial", marks=marks):
        pass
    with IndexedDatasetBuilder(tmp_path / "one", np.uint16) as one:
        one.add_documents(*batches[0])
    for ending in ("bin", "idx", "json"):
        assert (tmp_path / f"data.{ending}").read_bytes() == (tmp_path / f"one.{ending}").read_bytes(), ending


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_new_ids_never_stand_beside_an_old_or_missing_index_as_a_pair(by_hand, monkeypatch, renames):
    left = [None] * renames
    replace = os.replace

    def fail_later(*arguments: str) -> None:
        if not left:
            raise OSError(5, "Input/output error")
        left.pop()
        replace(*arguments)

    monkeypatch.setattr(indexed.os, "replace", fail_later)
    with pytest.raises(OSError, match="Input/output"):
        with IndexedDatasetBuilder(by_hand, np.int32) as builder:
            builder.add_documents(np.arange(9), np.array([9]))
    assert not Path(f"{by_hand}.idx").exists()


def test_marks_beyond_what_is_on_disk_are_refused(tmp_path):
    IndexedDatasetBuilder(tmp_path / "data", np.uint16, partial="partial").close_unfinished()
    with pytest.raises(DataError, match=r"data\.bin\.partial has fewer than the 6 bytes"):
        IndexedDatasetBuilder(tmp_path / "data", np.uint16, partial="partial", marks=BuilderResumePoint(1, 1, 3))


WRITER = """
import json, os, sys
import numpy as np
from megatron.core.datasets.indexed import IndexedDatasetBuilder, BuilderResumePoint
prefix, journal = sys.argv[1:]
done, marks = json.load(open(journal)) if os.path.exists(journal) else (0, None)
builder = IndexedDatasetBuilder(prefix, np.uint16, partial="partial", marks=marks and BuilderResumePoint(**marks))
with np.load(prefix + ".npz") as batches:
    batches = [(batches[f"ids{number}"], batches[f"lengths{number}"]) for number in range(20)]
for number, batch in enumerate(batches):
    if number >= done:
        builder.add_documents(*batch)
        now = builder.sync_to_resume_point()
        text = json.dumps([number + 1, {"documents": now.documents, "sequences": now.sequences, "tokens": now.tokens}])
        open(journal + ".new", "w").write(text)
        os.replace(journal + ".new", journal)
        print(number, flush=True)
builder.finish()
"""


def test_a_writer_killed_at_random_moments_ends_with_the_bytes_of_an_undisturbed_one(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "whole", np.uint16) as builder:
        for batch in documents_of(3):
            builder.add_documents(*batch)
    np.savez(
        tmp_path / "data.npz",
        **{
            f"{name}{number}": part
            for number, batch in enumerate(documents_of(3))
            for name, part in zip(("ids", "lengths"), batch)
        },
    )
    generator, kills = random.Random(5), 0
    command = [sys.executable, "-c", WRITER, str(tmp_path / "data"), str(tmp_path / "journal")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for attempt in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
            if attempt < 3:
                for _ in range(generator.randint(1, 5)):
                    writer.stdout.readline()
                time.sleep(generator.random() / 500)
                os.kill(writer.pid, signal.SIGKILL)
                kills += 1
                assert not (tmp_path / "data.idx").exists(), "no pair before the last document"
            writer.stdout.read()
        assert writer.returncode == (0 if attempt == 3 else -signal.SIGKILL)
    for ending in ("bin", "idx", "json"):
        assert (tmp_path / f"data.{ending}").read_bytes() == (tmp_path / f"whole.{ending}").read_bytes(), ending
    assert kills == 3 and not list(tmp_path.glob("*partial*"))


def test_the_builders_memory_does_not_grow_with_the_number_of_documents(tmp_path, monkeypatch):
    peaks = []
    monkeypatch.setattr(indexed, "COPY_ENTRIES", 2**14)
    for count in (20_000, 200_000):
        tracemalloc.start()
        with IndexedDatasetBuilder(tmp_path / f"{count}", np.uint16) as builder:
            for _ in range(count // 1000):
                builder.add_documents(np.zeros(1800, np.uint16), np.full(900, 2))
            for _ in range(count // 10):
                builder.add_sequence(np.zeros(2, np.uint16))
                builder.end_document()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, peaks
    assert IndexedDataset(tmp_path / "200000").num_documents == 200_000
