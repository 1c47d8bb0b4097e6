"""The .bin/.idx pair against bytes written by hand from the table of the format."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import indexed
from megatron.core.datasets.indexed import DataError, IndexedDataset, IndexedDatasetBuilder, best_dtype

# Three documents: [5, 6, 7], nothing, and two sequences [8] and [9, 10].
SEQUENCES = ([5, 6, 7], [8], [9, 10])
DOCUMENTS = (0, 1, 1, 3)


def idx_bytes(code: int, itemsize: int) -> bytes:
    """The index of the three documents, field by field."""
    lengths = [len(ids) for ids in SEQUENCES]
    offsets = [0, 3 * itemsize, 4 * itemsize]
    return (b"\x4d\x4d\x49\x44\x49\x44\x58\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
            + struct.pack("<Q", 3) + struct.pack("<Q", 4) + struct.pack("<3i", *lengths)
            + struct.pack("<3q", *offsets) + struct.pack("<4q", *DOCUMENTS))


FORMATS = [(1, "B", np.uint8), (2, "b", np.int8), (3, "h", np.int16), (4, "i", np.int32), (5, "q", np.int64),
           (6, "d", np.float64), (7, "f", np.float32), (8, "H", np.uint16)]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


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
    assert [best_dtype(size) for size in (65499, 65500, None)] == [np.uint16, np.int32, np.int32]


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

    monkeypatch.setattr(indexed, "_sync", full_disk)
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


@pytest.mark.parametrize("at, value, message", [
    (0, b"TNTIDX", "begins with b'TNTIDX"),
    (9, struct.pack("<Q", 2), "has format version 2"),
    (17, b"\x09", "has dtype code 9"),
    (17, b"\x00", "has dtype code 0"),
    (18, struct.pack("<Q", 2**40), "need"),
    (34 + 12 * 3, struct.pack("<q", 1), r"document array from \(1, 3\), expected \(0, 3\)"),
    (34 + 12 * 3 + 8 * 3, struct.pack("<q", 4), r"document array from \(0, 4\), expected \(0, 3\)"),
])
def test_a_damaged_field_of_the_index_is_named(by_hand, at, value, message):
    path = Path(f"{by_hand}.idx")
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"by_hand\.idx .*{message}"):
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
    pread = indexed.os.pread

    def flaky(*arguments: int) -> bytes:
        answer = answers.pop(0)
        if answer:
            raise answer
        return pread(*arguments)

    pauses: list[float] = []
    monkeypatch.setattr(indexed.time, "sleep", pauses.append)
    data = IndexedDataset(by_hand, mmap=False)
    monkeypatch.setattr(indexed.os, "pread", flaky)
    assert data[0].tolist() == [5, 6, 7]
    assert len(pauses) == 2 and pauses[1] > pauses[0] > 0


def test_a_bin_file_that_shrinks_while_open_is_an_error(by_hand):
    data = IndexedDataset(by_hand, mmap=False)
    Path(f"{by_hand}.bin").write_bytes(b"")
    with pytest.raises(DataError, match="has become shorter"):
        data[0]
