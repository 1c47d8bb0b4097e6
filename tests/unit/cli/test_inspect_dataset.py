"""megatron inspect-dataset: its numbers against numpy and a count by hand, and every kind of damage named."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.commands import inspect_dataset
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets import bin_idx_check, storage
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import build_tokenizer

TEXTS = ["Hello", "", "a longer document, of 38 characters ..", "four"]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Four documents as bytes, one of them empty, one of two sequences."""
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))
    with IndexedDatasetBuilder(
        tmp_path / "data", np.uint16, tokenizer=tokenizer_fingerprint_fields(tokenizer)
    ) as builder:
        for text in TEXTS:
            half = len(text) // 2 if text == TEXTS[2] else 0
            for part in (text[:half], text[half:]):
                if part:
                    builder.add_sequence(tokenizer.tokenize(part))
            builder.end_document()
    return str(tmp_path / "data")


def output(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    inspect_dataset.main(arguments)
    return capsys.readouterr().out


def test_counts_and_lengths_are_those_of_the_documents(prefix, capsys):
    found = json.loads(output(capsys, prefix, "--json", "--seq-length", "4"))
    lengths = [len(text) for text in TEXTS]
    assert (found["documents"], found["empty_documents"], found["sequences"], found["tokens"]) == (
        4,
        1,
        4,
        sum(lengths),
    )
    assert (found["bin_bytes"], found["idx_bytes"], found["dtype"]) == (2 * sum(lengths), 34 + 12 * 4 + 8 * 5, "uint16")
    words = found["tokens_per_document"]
    assert words == {
        "min": 0,
        "median": np.median(lengths),
        "p95": np.percentile(lengths, 95),
        "max": max(lengths),
        "mean": round(float(np.mean(lengths)), 2),
        "share_above_seq_length": 0.5,
    }
    assert found["histogram"] == [[0, 0, 1], [1, 1, 0], [2, 3, 0], [4, 7, 2], [8, 15, 0], [16, 31, 0], [32, 63, 1]]
    assert found["tokenizer"]["kind"] == "ByteTokenizer"


def test_the_histogram_counts_powers_of_two_in_their_own_row():
    lengths = np.array([1, 2, 4, 8, 2**29, 2**29 - 1, 2**30 - 1])
    rows = {low: (high, count) for low, high, count in inspect_dataset.histogram(lengths)}
    assert rows[1] == (1, 1) and rows[2] == (3, 1) and rows[4] == (7, 1) and rows[8] == (15, 1)
    assert rows[2**28] == (2**29 - 1, 1) and rows[2**29] == (2**30 - 1, 2)
    assert sum(count for _, count in rows.values()) == len(lengths)


def test_the_report_can_be_read(prefix, capsys):
    text = output(capsys, prefix, "--seq-length", "10")
    assert "4 documents (1 empty), 4 sequences, 47 tokens of uint16" in text
    assert "25.00% above 10" in text and "tokens a sequence: min 4" in text
    assert [line.split()[-1] for line in text.splitlines() if " .. " in line][0].count("#") == 25


def test_the_first_documents_are_decoded(prefix, capsys):
    text = output(capsys, prefix, "--documents", "3", *BYTES)
    assert f"--- document 0\n{TEXTS[0]}\n--- document 1\n\n--- document 2\n{TEXTS[2]}\n" in text


def test_a_tokenizer_that_is_not_the_datas_is_an_error(prefix, capsys):
    with pytest.raises(SystemExit, match="was written with ByteTokenizer.*given is NullTokenizer"):
        inspect_dataset.main([prefix, "--documents", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "300"])
    Path(f"{prefix}.json").unlink()
    with pytest.raises(SystemExit, match="holds the id 72, but the vocabulary has 10 ids"):
        inspect_dataset.main([prefix, "--documents", "1", "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"])


def test_lengths_are_drawn_as_a_png(prefix, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    output(capsys, prefix, "--plot", str(tmp_path / "lengths.png"), "--seq-length", "16")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(inspect_dataset.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--plot needs matplotlib: pip install"):
        inspect_dataset.main([prefix, "--plot", "x.png"])


def verified(prefix: str, capsys: pytest.CaptureFixture, *arguments: str) -> list[str]:
    """The problems that --verify lists; its exit code says whether there are any."""
    try:
        inspect_dataset.main([prefix, "--verify", "--json", *arguments])
        code = 0
    except SystemExit as error:
        code = error.code
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert code == (1 if problems else 0)
    return problems


@pytest.mark.parametrize("piece", [storage.COPY_BYTES, 16])
def test_a_good_pair_is_verified(prefix, capsys, monkeypatch, piece):
    monkeypatch.setattr(bin_idx_check, "COPY_BYTES", piece)
    assert verified(prefix, capsys) == []
    assert "everything fits" in output(capsys, prefix, "--verify")


def change(path: str, at: int, content: bytes) -> None:
    """Overwrite some bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize("piece", [storage.COPY_BYTES, 16])
def test_an_id_outside_the_vocabulary_is_placed(prefix, capsys, monkeypatch, piece):
    monkeypatch.setattr(bin_idx_check, "COPY_BYTES", piece)
    change(f"{prefix}.bin", 2 * 25, struct.pack("<H", 300))
    place, checksum = verified(prefix, capsys)
    assert "1 numbers are outside the vocabulary of 257, first 300 at token 25 of the file, in sequence 2" in place
    assert "data.bin has the checksum xxh3_128:" in checksum
    Path(f"{prefix}.json").unlink()
    assert verified(prefix, capsys) == []
    assert len(verified(prefix, capsys, "--tokenizer-type", "NullTokenizer", "--vocab-size", "300")) == 1
    assert verified(prefix, capsys, "--tokenizer-type", "NullTokenizer", "--vocab-size", "301") == []


def test_all_problems_are_listed_at_once(prefix, capsys):
    change(f"{prefix}.idx", 34 + 16 + 8, struct.pack("<q", 11))  # the second offset
    change(f"{prefix}.idx", 34 + 48 + 8, struct.pack("<q", 3))  # the document array: 0 3 1 3 4
    change(f"{prefix}.bin", 0, struct.pack("<H", 9999))
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"more")
    facts = json.loads(Path(f"{prefix}.json").read_text())
    Path(f"{prefix}.json").write_text(json.dumps({**facts, "tokens": 46}))
    problems = verified(prefix, capsys)
    for words in (
        "1 sequences do not begin where the lengths before them end, first sequence 1",
        "1 documents end before they begin, first document 1",
        "first 9999 at token 0",
        "4 more than its index",
        "says tokens 46, but the pair has 47",
        "data.bin has the checksum",
        "data.idx has the checksum",
    ):
        assert sum(words in problem for problem in problems) == 1, (words, problems)
    assert len(problems) == 7


def test_an_index_with_something_behind_it_is_a_problem_unless_it_is_modes(prefix, capsys):
    Path(f"{prefix}.json").unlink()
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes([0, 0, 1, 0]))
    (problem,) = verified(prefix, capsys)
    assert "has 126 bytes; 4 sequences and 5 document entries take 122" in problem
    assert verified(prefix, capsys, "--multimodal") == []
    change(f"{prefix}.bin", 0, struct.pack("<H", 9999))
    assert "in sequence 0" in verified(prefix, capsys, "--multimodal", *BYTES)[0]
    change(f"{prefix}.bin", 0, struct.pack("<H", 9))
    change(f"{prefix}.bin", 2 * 25, struct.pack("<H", 9999))
    assert verified(prefix, capsys, "--multimodal", *BYTES) == [], "what an image holds is no token"


def test_a_pair_that_cannot_be_opened_is_a_problem(prefix, capsys):
    Path(f"{prefix}.idx").unlink()
    assert "data.idx cannot be opened" in verified(prefix, capsys)[0]
    with pytest.raises(SystemExit, match="inspect-dataset: .*data.idx cannot be opened"):
        inspect_dataset.main([prefix])


def test_floats_that_are_no_whole_numbers_are_no_ids(tmp_path, capsys):
    with IndexedDatasetBuilder(tmp_path / "data", np.float32) as builder:
        builder.add_sequence([1.0, 2.0])
        builder.end_document()
    assert verified(str(tmp_path / "data"), capsys) == []
    with IndexedDatasetBuilder(tmp_path / "data", np.float32) as builder:
        builder.add_sequence([1.0, np.nan, 2.5])
        builder.end_document()
    assert "2 numbers are no ids, first nan at token 1" in verified(str(tmp_path / "data"), capsys)[0]


def test_torch_is_not_imported(prefix):
    import subprocess

    code = (
        "import sys; from megatron.cli.commands import inspect_dataset; "
        f"inspect_dataset.main([{prefix!r}]); assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True, capture_output=True)
