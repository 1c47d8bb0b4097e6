"""The merging tool against a pair written in one go."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed import IndexedDatasetBuilder

TOOL = Path(__file__).resolve().parents[3] / "tools" / "merge_datasets.py"
PARTS = {"b_text_document": [[4, 5], [], [6]], "a_text_document": [[1, 2, 3]], "c": [[], [7]]}
BYTES = {"kind": "ByteTokenizer", "hash": "11aa22bb33cc44", "vocab_size": 257, "eod": 256}
OTHER = {"kind": "GPT2BPETokenizer", "hash": "55dd66ee77ff88", "vocab_size": 50257, "eod": 50256}


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.merge_datasets")


def write(prefix, documents, dtype=np.uint16, **facts):
    """A pair of documents with one sequence each, or none when empty."""
    with IndexedDatasetBuilder(prefix, dtype, **facts) as builder:
        for ids in documents:
            if ids:
                builder.add_sequence(ids)
            builder.end_document()


@pytest.fixture
def parts(tmp_path):
    """A folder with three pairs and other files."""
    folder = tmp_path / "parts"
    for name, documents in PARTS.items():
        write(folder / name, documents)
    (folder / "notes.txt").write_text("not a pair")
    (folder / "d.bin.0123.tmp").write_text("unfinished")
    return folder


def same_pair(first, second):
    """Whether two pairs have the same bytes."""
    return all(
        Path(f"{first}.{ending}").read_bytes() == Path(f"{second}.{ending}").read_bytes() for ending in ("bin", "idx")
    )


def test_pairs_are_joined_in_the_order_of_their_names(parts, tmp_path):
    done = subprocess.run(
        [sys.executable, str(TOOL), "--input", "parts", "--output-prefix", "new/whole"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 pairs, 6 documents, 7 tokens -> new/whole.bin, new/whole.idx\n"
    write(tmp_path / "expected", [document for name in sorted(PARTS) for document in PARTS[name]])
    assert same_pair(tmp_path / "new/whole", tmp_path / "expected")


def test_pairs_that_are_named_are_joined_in_the_order_given(tool, parts, tmp_path):
    order = ["c", "a_text_document", "c"]
    tool.main(["--prefixes", *(str(parts / name) for name in order), "--output-prefix", str(tmp_path / "whole")])
    write(tmp_path / "expected", [document for name in order for document in PARTS[name]])
    assert same_pair(tmp_path / "whole", tmp_path / "expected")


def test_what_all_parts_agree_on_is_said_of_the_whole(tool, tmp_path):
    for name, facts in (("a", {"tokenizer": BYTES}), ("b", {"tokenizer": BYTES}), ("c", {})):
        write(tmp_path / name, [[1]], level="sentence", **facts)
    for names, expected in (("ab", BYTES), ("abc", None)):
        tool.main(["--prefixes", *(str(tmp_path / name) for name in names), "--output-prefix", str(tmp_path / "whole")])
        told = json.loads((tmp_path / "whole.json").read_text())
        assert (told["tokenizer"], told["level"], told["shard"]) == (expected, "sentence", None)
        assert told["documents"] == len(names)


def test_pairs_with_modes_keep_them(tool, tmp_path):
    for name, mode in (("a", 0), ("b", 1)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16, multimodal=True) as builder:
            builder.add_sequence([5], mode)
            builder.end_document()
    tool.main(
        [
            "--prefixes",
            *(str(tmp_path / name) for name in "ab"),
            "--output-prefix",
            str(tmp_path / "whole"),
            "--multimodal",
        ]
    )
    assert (tmp_path / "whole.idx").read_bytes()[-2:] == b"\0\1"


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda folder: (folder / "c.bin").unlink(), r"c\.idx has no \.bin beside it"),
        (lambda folder: (folder / "c.idx").unlink(), r"c\.bin has no \.idx beside it"),
        (lambda folder: write(folder / "c", [[1]], np.int32), r"holds ids of type uint16, .*c int32"),
        (lambda folder: (folder / "c.bin").write_bytes(b""), r"c\.bin has 0 bytes"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], r"holds no \.bin/\.idx pair"),
        (
            lambda folder: [write(folder / name, [[1]], tokenizer=mark) for name, mark in (("a", BYTES), ("c", OTHER))],
            r"a was written with ByteTokenizer .*11aa22bb33cc.*, .*c GPT2BPETokenizer .*55dd66ee77ff",
        ),
        (lambda folder: write(folder / "c", [[1]], level="sentence"), "document, .*c sentence"),
        (lambda folder: write(folder / "c", [[1]], shard=(0, 2)), "c is a shard, .*a_text_document is none"),
    ],
)
def test_pairs_that_cannot_be_joined_are_named_and_nothing_is_written(tool, parts, tmp_path, break_it, message):
    break_it(parts)
    with pytest.raises(SystemExit, match=message):
        tool.main(["--input", str(parts), "--output-prefix", str(tmp_path / "whole")])
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


@pytest.mark.parametrize(
    "shards, message",
    [
        ([(0, 3), (2, 3)], r"of 3 shards, 1 are missing \(counted from 0\)"),
        ([(3, 30)], "of 30 shards, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10 and 19 more are missing"),
        ([(0, 2), (1, 2), (1, 2)], r"p1 and .*p2 are both shard 1"),
        ([(0, 2), (1, 3)], "shards of 2 and 3"),
    ],
)
def test_shards_that_are_not_those_of_one_run_are_refused(tool, tmp_path, shards, message):
    for number, shard in enumerate(shards):
        write(tmp_path / f"p{number}", [[number]], shard=shard)
    with pytest.raises(SystemExit, match=message):
        tool.main(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "whole")])


def test_shards_are_joined_by_their_numbers(tool, tmp_path):
    for name, shard in (("a", (2, 3)), ("b", (0, 3)), ("c", (1, 3))):
        write(tmp_path / name, [[shard[0]]], shard=shard)
    tool.main(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "new" / "whole")])
    assert np.fromfile(tmp_path / "new" / "whole.bin", np.uint16).tolist() == [0, 1, 2]


def test_the_result_may_not_be_one_of_the_parts(tool, parts):
    before = (parts / "c.bin").read_bytes()
    with pytest.raises(SystemExit, match="is one of the pairs to join"):
        tool.main(["--input", str(parts), "--output-prefix", str(parts / ".." / "parts" / "c")])
    assert (parts / "c.bin").read_bytes() == before


def test_a_missing_folder_is_named(tool, tmp_path):
    with pytest.raises(SystemExit, match="not/there is not a folder"):
        tool.main(["--input", "not/there", "--output-prefix", str(tmp_path / "whole")])
