"""PREFIX.json beside a pair: what it says, against an independent reading, and what damage does to it."""

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import sidecar
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.datasets.sidecar import DatasetSidecar
from megatron.core.datasets.storage import DataError

GPT2 = {"kind": "GPT2BPETokenizer", "hash": "a" * 64, "vocab_size": 50257, "eod": 50256}
BERT = {"kind": "BertWordPiece", "hash": "b" * 64, "vocab_size": 30522, "eod": 102}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A pair of two documents, written as part 1 of 3."""
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16, tokenizer=GPT2, shard=(1, 3), level="sentence") as builder:
        for ids in ([1, 2], [3]):
            builder.add_sequence(ids)
        builder.end_document()
        builder.end_document()
    return str(tmp_path / "data")


def test_a_written_pair_says_what_it_holds_and_the_checksums_of_its_bytes(prefix):
    content = json.loads(Path(f"{prefix}.json").read_text())
    ids = struct.pack("<3H", 1, 2, 3)
    index = (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 2, 3)
        + struct.pack("<2i", 2, 1)
        + struct.pack("<2q", 0, 4)
        + struct.pack("<3q", 0, 2, 2)
    )
    assert content == {
        "format": "indexed dataset sidecar",
        "version": 1,
        "documents": 2,
        "sequences": 2,
        "tokens": 3,
        "dtype": "uint16",
        "level": "sentence",
        "shard": [1, 3],
        "tokenizer": GPT2,
        "checksums": {
            "bin": f"xxh3_128:{xxhash.xxh3_128_hexdigest(ids)}",
            "idx": f"xxh3_128:{xxhash.xxh3_128_hexdigest(index)}",
        },
    }


def test_what_was_written_is_read(tmp_path, prefix):
    result = sidecar.read_sidecar(prefix)
    assert (result.documents, result.sequences, result.tokens, result.shard, result.tokenizer) == (
        2,
        2,
        3,
        (1, 3),
        GPT2,
    )
    other = DatasetSidecar(5, 6, 7, "int32", BERT)
    (tmp_path / "other.json").write_bytes(sidecar.encode_sidecar(other))
    assert sidecar.read_sidecar(tmp_path / "other") == other


def test_a_pair_without_a_sidecar_passes_every_check(tmp_path):
    assert sidecar.read_sidecar(tmp_path / "data") is None
    sidecar.check_dataset_tokenizer(tmp_path / "data", BERT)


def test_another_tokenizer_is_refused_and_both_are_named(prefix):
    sidecar.check_dataset_tokenizer(prefix, GPT2)
    with pytest.raises(
        DataError,
        match=r"data was written with GPT2BPETokenizer \(vocabulary 50257.*hash aaaaaaaaaaaa\), but "
        r"the tokenizer given is BertWordPiece \(vocabulary 30522.*hash bbbbbbbbbbbb\)",
    ):
        sidecar.check_dataset_tokenizer(prefix, BERT)
    with pytest.raises(DataError, match="hash aaaaaaaaaaaa.*hash cccccccccccc"):
        sidecar.check_dataset_tokenizer(prefix, {**GPT2, "hash": "c" * 64})


def test_unknown_keys_are_ignored(prefix):
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
    assert sidecar.read_sidecar(prefix).documents == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 2}, "has version 2"),
        ({"tokens": -1}, "tokens -1, not a count"),
        ({"documents": True}, "documents True, not a count"),
        ({"sequences": "2"}, "sequences '2', not a count"),
        ({"dtype": 8}, "dtype 8"),
        ({"level": "page"}, "level 'page'"),
        ({"shard": [3, 3]}, "shard"),
        ({"shard": [0, 1, 2]}, "shard"),
        ({"tokenizer": {"kind": "x"}}, "without a hash"),
        ({"checksums": {"bin": 5}}, "checksums"),
    ],
)
def test_a_damaged_field_is_named(prefix, change, message):
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=rf"data\.json .*{message}"):
        sidecar.read_sidecar(prefix)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cut=st.integers(0, 400), noise=st.binary(max_size=8), at=st.integers(0, 400))
def test_damage_is_an_error_or_changes_nothing_that_is_read(tmp_path_factory, cut, noise, at):
    prefix = tmp_path_factory.mktemp("damage") / "data"
    path = Path(f"{prefix}.json")
    content = bytearray(
        sidecar.encode_sidecar(DatasetSidecar(1, 2, 3, "int32", GPT2, checksums={"bin": "xxh3_128:00"}))
    )
    content[at : at + len(noise)] = noise
    path.write_bytes(content[: max(0, len(content) - cut)] if cut < 20 else content)
    try:
        result = sidecar.read_sidecar(prefix)
    except DataError as error:
        assert "data.json" in str(error)
    else:
        assert result is None or isinstance(result, DatasetSidecar)


def test_another_json_file_is_left_alone_and_not_overwritten(tmp_path):
    path = tmp_path / "corpus.json"
    for text in ('{"text": "one"}\n', '{"text": "one"}\n{"text": "two"}\n', "[1]"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"corpus\.json is in the way"):
            IndexedDatasetBuilder(tmp_path / "corpus", np.uint16)
        assert path.read_text() == text and [file.name for file in tmp_path.iterdir()] == ["corpus.json"]
    path.write_text('{"text": "one"}')
    assert sidecar.read_sidecar(tmp_path / "corpus") is None


def test_a_damaged_sidecar_may_be_written_again(tmp_path, prefix):
    path = Path(f"{prefix}.json")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="data.json stands where"):
        sidecar.read_sidecar(prefix)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.end_document()
    assert sidecar.read_sidecar(prefix).documents == 1


def test_a_giant_json_file_is_not_read(tmp_path):
    with open(tmp_path / "data.json", "wb") as file:
        file.truncate(2**26)
    tracemalloc.start()
    with pytest.raises(DataError, match="is not one JSON object"):
        sidecar.read_sidecar(tmp_path / "data")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
