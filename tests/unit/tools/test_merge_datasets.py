"""The merging tool against a pair written in one go."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed import IndexedDatasetBuilder

TOOL = Path(__file__).resolve().parents[3] / "tools" / "merge_datasets.py"
PARTS = {"b_text_document": [[4, 5], [], [6]], "a_text_document": [[1, 2, 3]], "c": [[], [7]]}


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("merge_datasets", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(prefix, documents, dtype=np.uint16):
    """A pair of documents with one sequence each, or none when empty."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
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


def test_pairs_are_joined_in_the_order_of_their_names(parts, tmp_path):
    done = subprocess.run([sys.executable, str(TOOL), "--input", "parts", "--output-prefix", "new/whole"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 pairs, 6 documents, 7 tokens -> new/whole.bin, new/whole.idx\n"
    write(tmp_path / "expected", [document for name in sorted(PARTS) for document in PARTS[name]])
    for ending in ("bin", "idx"):
        assert (tmp_path / f"new/whole.{ending}").read_bytes() == (tmp_path / f"expected.{ending}").read_bytes()


@pytest.mark.parametrize("break_it, message", [
    (lambda folder: (folder / "c.bin").unlink(), r"c\.idx has no \.bin beside it"),
    (lambda folder: (folder / "c.idx").unlink(), r"c\.bin has no \.idx beside it"),
    (lambda folder: write(folder / "c", [[1]], np.int32), r"c\.idx holds ids of type int32, not uint16"),
    (lambda folder: (folder / "c.bin").write_bytes(b""), r"c\.bin has 0 bytes"),
    (lambda folder: [path.unlink() for path in folder.iterdir()], r"holds no \.bin/\.idx pair"),
])
def test_pairs_that_cannot_be_joined_are_named_and_nothing_is_written(tool, parts, tmp_path, break_it, message):
    break_it(parts)
    with pytest.raises(SystemExit, match=message):
        tool.main(["--input", str(parts), "--output-prefix", str(tmp_path / "whole")])
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_the_result_may_not_be_one_of_the_parts(tool, parts):
    before = (parts / "c.bin").read_bytes()
    with pytest.raises(SystemExit, match="is one of the pairs to join"):
        tool.main(["--input", str(parts), "--output-prefix", str(parts / ".." / "parts" / "c")])
    assert (parts / "c.bin").read_bytes() == before


def test_a_missing_folder_is_named(tool, tmp_path):
    with pytest.raises(SystemExit, match="not/there is not a folder"):
        tool.main(["--input", "not/there", "--output-prefix", str(tmp_path / "whole")])
