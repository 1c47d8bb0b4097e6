"""Every kind of input gives the same pair, whatever the chunks, the shards and the place where a run is stopped."""

import gzip
import io
import json
import os

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron.core.datasets import indexed
from megatron.core.datasets.ingest import columns, lines, pipeline
from tests.unit.datasets.ingest.writing import KINDS, TEXTS, bytes_of, files, pair_at, pair_of, write_inputs

BYTES = ["--tokenizer-type", "ByteTokenizer", "--append-eod"]


@pytest.fixture
def folder(tmp_path):
    """Where the inputs are."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def set_chunks(monkeypatch, size):
    """Read in chunks of so many bytes."""
    for module in (lines, columns):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 100, 2**20])
def test_every_kind_of_file_becomes_the_same_pair_in_chunks_of_any_size(
    tool, folder, tmp_path, monkeypatch, kind, size
):
    set_chunks(monkeypatch, size)
    tool.main([*write_inputs(kind, folder), "--output-prefix", str(tmp_path / "o"), *BYTES])
    assert pair_at(tmp_path / "o_text_document") == bytes_of(kind)


def test_several_kinds_and_workers_give_the_same_pair(tool, folder, tmp_path, monkeypatch):
    set_chunks(monkeypatch, 150)
    inputs = [write_inputs(kind, folder)[1:] for kind in ("gz", "parquet", "arrow file")]
    for workers in ("2", "3"):
        tool.main(
            ["--input", *sum(inputs, []), "--workers", workers, "--output-prefix", str(tmp_path / workers), *BYTES]
        )
        documents = [[[*text.encode(), 256]] if text else [] for text in TEXTS] * 3
        assert pair_at(tmp_path / f"{workers}_text_document") == pair_of(documents)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 5])
def test_shards_that_are_joined_have_the_bytes_of_one_run(tool, merger, folder, tmp_path, kind, count):
    words = write_inputs(kind, folder)
    for index in range(count):
        tool.main([*words, "--shard", f"{index}/{count}", "--output-prefix", str(tmp_path / "parts" / "o"), *BYTES])
    merger.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "whole")])
    assert pair_at(tmp_path / "whole") == bytes_of(kind)
    message = [
        json.loads((tmp_path / f"parts/o-{index:05d}-of-{count:05d}_text_document.json").read_text())
        for index in range(count)
    ]
    assert [facts["shard"] for facts in message] == [[index, count] for index in range(count)]
    assert count > 2 or min(facts["documents"] for facts in message) > 2, "each shard has its share"


def test_more_shards_than_lines_are_joined_too(tool, merger, folder, tmp_path):
    source = files(folder, {"a.jsonl": b'{"text": "a"}\n{"text": "bb"}\n\n{"text": ""}'})
    for index in range(30):
        tool.main(
            ["--input", *source, "--shard", f"{index}/30", "--output-prefix", str(tmp_path / "parts" / "o"), *BYTES]
        )
    merger.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "whole")])
    assert pair_at(tmp_path / "whole") == pair_of([[[97, 256]], [[98, 98, 256]], []])


@pytest.mark.parametrize("kind, name", [("jsonl", "a.jsonl"), ("gz", "a.jsonl.gz"), ("parquet", "a.parquet")])
def test_a_bad_record_of_a_shard_is_named_by_its_number_in_the_file(tool, folder, tmp_path, capsys, kind, name):
    rows = [json.dumps({"text": "fine" * (number % 9)}).encode() for number in range(60)]
    bad = [5, 31, 58]
    for number in bad:
        rows[number] = b"{}"
    content = b"\n".join(rows)
    if kind == "parquet":
        texts = [None if number in bad else "fine" * (number % 9) for number in range(60)]
        parquet.write_table(pyarrow.table({"text": texts}), folder / name, row_group_size=8)
    else:
        files(folder, {name: gzip.compress(content) if kind == "gz" else content})
    for index in range(3):
        tool.main(
            [
                "--input",
                str(folder / name),
                "--shard",
                f"{index}/3",
                "--on-bad-line",
                "skip",
                "--output-prefix",
                str(tmp_path / "o"),
                *BYTES,
            ]
        )
    message = capsys.readouterr().out
    assert [f"{name}:{number + 1})" in message for number in bad] == [True] * 3, message


class Stop(BaseException):
    """Stands for the end of a process."""


def stop_after(monkeypatch, count):
    """End the run when so many chunks were written."""
    whole = pipeline.encode_chunks

    def some(*arguments):
        for number, result in enumerate(whole(*arguments)):
            if number == count:
                raise Stop
            yield result

    monkeypatch.setattr(pipeline, "encode_chunks", some)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [[], ["--shard", "1/2"]])
def test_a_run_that_stopped_anywhere_goes_on_to_the_same_bytes(tool, folder, tmp_path, monkeypatch, kind, shard):
    set_chunks(monkeypatch, 150)
    words = [*write_inputs(kind, folder), *BYTES, *shard]
    tool.main([*words, "--output-prefix", str(tmp_path / "whole")])
    (expected,) = (pair_at(str(path)[:-4]) for path in tmp_path.glob("whole*.idx"))
    for attempt in range(100):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, (1, 2, 5)[attempt % 3])
            try:
                tool.main([*words, "--output-prefix", str(tmp_path / "o"), "--journal-interval", "0"])
                break
            except Stop:
                assert not list(tmp_path.glob("o*.idx"))
    (result,) = (pair_at(str(path)[:-4]) for path in tmp_path.glob("o*.idx"))
    assert result == expected
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("call", range(7))
def test_a_run_that_dies_while_files_get_their_names_is_finished_by_the_next(tool, folder, tmp_path, monkeypatch, call):
    source = files(folder, {"a.jsonl": b'{"a": "x", "b": "yz"}\n'})
    words = ["--input", *source, "--json-keys", "a", "b", "--output-prefix", str(tmp_path / "o"), *BYTES]
    for key in "ab":
        (tmp_path / f"o_{key}_document.idx").write_text("of an older run")
    left, replace = [call], os.replace

    def dies(old, new):
        if str(new).endswith((".bin", ".idx", "document.json")):
            left[0] -= 1
            if left[0] < 0:
                raise Stop
        replace(old, new)

    monkeypatch.setattr(indexed.os, "replace", dies)
    if call < 6:  # three names for each of two pairs
        with pytest.raises(Stop):
            tool.main(words)
    left[0] = 100
    tool.main(words)
    assert pair_at(tmp_path / "o_a_document") == pair_of([[[120, 256]]])
    assert pair_at(tmp_path / "o_b_document") == pair_of([[[121, 122, 256]]])
    names = {f"o_{key}_document.{ending}" for key in "ab" for ending in ("bin", "idx", "json")}
    assert {path.name for path in tmp_path.iterdir()} == {"in", *names}


def unfinished(tool, tmp_path, words):
    """Leave a run behind that stopped after its first chunk."""
    with pytest.MonkeyPatch.context() as patch:
        set_chunks(patch, 100)
        stop_after(patch, 1)
        with pytest.raises(Stop):
            tool.main([*words, "--output-prefix", str(tmp_path / "o"), "--journal-interval", "0"])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
            "tokenizer: .*ByteTokenizer.* then, .*NullTokenizer",
        ),
        (["--tokenizer-type", "ByteTokenizer"], "append-eod: true then, false now"),
        ([*BYTES, "--json-keys", "id"], r'json-keys: \["text"\] then, \["id"\] now'),
        ([*BYTES, "--split-sentences"], "there|split-sentences: null then"),
    ],
)
def test_another_command_does_not_go_on_with_what_is_unfinished(tool, folder, tmp_path, change, message):
    words = write_inputs("jsonl", folder)
    unfinished(tool, tmp_path, [*words, *BYTES])
    with pytest.raises(SystemExit, match=rf"(?s)of a run that was stopped.*({message}).*--restart"):
        tool.main([*words, *change, "--output-prefix", str(tmp_path / "o")])
    tool.main([*words, *BYTES, "--output-prefix", str(tmp_path / "o")])
    assert pair_at(tmp_path / "o_text_document") == bytes_of("jsonl"), "what was done is not lost"


@pytest.mark.parametrize(
    "touch",
    [lambda path: path.write_bytes(path.read_bytes() + b'{"text": "more"}\n'), lambda path: os.utime(path, (1, 1))],
)
def test_input_that_has_changed_is_named_and_read_anew_on_request(tool, folder, tmp_path, touch):
    source = folder / "a.jsonl"
    source.write_bytes(b"".join(b'{"text": "%d"}\n' % number for number in range(40)))
    words = ["--input", str(source), *BYTES]
    unfinished(tool, tmp_path, words)
    touch(source)
    with pytest.raises(SystemExit, match=r"(?s)input: .*a\.jsonl has changed since then.*--restart"):
        tool.main([*words, "--output-prefix", str(tmp_path / "o")])
    tool.main([*words, "--output-prefix", str(tmp_path / "o"), "--restart"])
    documents = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    assert pair_at(tmp_path / "o_text_document") == pair_of([[[*text.encode(), 256]] for text in documents])


def test_how_bad_lines_are_met_may_change_when_a_run_goes_on(tool, folder, tmp_path):
    rows = [b'{"text": "%d"}' % number for number in range(40)]
    rows[20] = b"bad"
    words = ["--input", *files(folder, {"a.jsonl": b"\n".join(rows)}), "--output-prefix", str(tmp_path / "o"), *BYTES]
    with pytest.MonkeyPatch.context() as patch:
        set_chunks(patch, 100)
        with pytest.raises(SystemExit, match=r"a\.jsonl:21: not JSON"):
            tool.main([*words, "--journal-interval", "0"])
        save = pipeline.journal.save_preprocess_progress

        def dies_at_the_end(prefix, command, state):
            if state.done:
                raise Stop
            save(prefix, command, state)

        patch.setattr(pipeline.journal, "save_preprocess_progress", dies_at_the_end)
        with pytest.raises(Stop):
            tool.main([*words, "--journal-interval", "0", "--on-bad-line", "skip"])
    with pytest.raises(SystemExit, match=r"a\.jsonl:21: not JSON"):
        tool.main(words)
    tool.main([*words, "--on-bad-line", "skip"])
    assert pair_at(tmp_path / "o_text_document") == pair_of([[[*str(n).encode(), 256]] for n in range(40) if n != 20])


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1, "command": {}}', b"[" * 100000]
)
def test_a_damaged_journal_is_named(tool, folder, tmp_path, content):
    words = [*write_inputs("jsonl", folder), "--output-prefix", str(tmp_path / "o"), *BYTES]
    (tmp_path / "o.journal.partial").write_bytes(content)
    with pytest.raises(SystemExit, match=r"o\.journal\.partial (is damaged|has version 2).*--restart"):
        tool.main(words)
    tool.main([*words, "--restart"])
    assert pair_at(tmp_path / "o_text_document") == bytes_of("jsonl")


def test_unfinished_files_that_are_gone_are_named(tool, folder, tmp_path):
    words = [*write_inputs("jsonl", folder), *BYTES]
    unfinished(tool, tmp_path, words)
    (tmp_path / "o_text_document.lengths.partial").unlink()
    with pytest.raises(SystemExit, match=r"lengths\.partial .*--restart"):
        tool.main([*words, "--output-prefix", str(tmp_path / "o")])


def test_standard_input_must_be_the_same_when_a_run_goes_on(tool, tmp_path, monkeypatch):
    content = b"".join(b'{"text": "%d"}\n' % number for number in range(40))
    give(monkeypatch, content)
    unfinished(tool, tmp_path, ["--input", "-", *BYTES])
    for other in (content.replace(b'"3"', b'"4"'), content[:50]):
        give(monkeypatch, other)
        with pytest.raises(SystemExit, match="standard input does not begin with the 112 bytes"):
            tool.main(["--input", "-", *BYTES, "--output-prefix", str(tmp_path / "o")])
    give(monkeypatch, content)
    tool.main(["--input", "-", *BYTES, "--output-prefix", str(tmp_path / "o")])
    assert pair_at(tmp_path / "o_text_document") == pair_of([[[*str(number).encode(), 256]] for number in range(40)])


def give(monkeypatch, content):
    """Put bytes on standard input."""

    class Standard:
        buffer = io.BytesIO(content)

    monkeypatch.setattr(lines.sys, "stdin", Standard)


@pytest.mark.parametrize(
    "kind, damage",
    [
        ("zst", lambda content: content[:-3]),
        ("zst", lambda content: content[:5]),
        ("zst", lambda content: b"no" + content),
        ("parquet", lambda content: content[:-9]),
        ("parquet", lambda content: content[:40] + b"\xff" * 300 + content[340:]),
        ("arrow stream", lambda content: content[: len(content) // 2]),
        ("arrow file", lambda content: content[: len(content) // 2]),
        ("arrow stream", lambda content: b"\xff" * 8 + content[8:]),
        ("parquet", lambda content: b""),
    ],
)
def test_damaged_files_are_named(tool, folder, tmp_path, kind, damage):
    words = write_inputs(kind, folder)
    path = sorted(folder.iterdir())[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit, match=rf"{path.name} is damaged"):
        tool.main([*words, "--output-prefix", str(tmp_path / "o"), *BYTES])
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
@pytest.mark.parametrize(
    "key, message", [("body", "has no columns 'body'; it has id, text"), ("id", "column 'id' holds int64, not text")]
)
def test_a_column_that_is_missing_or_not_text_is_named(tool, folder, tmp_path, kind, key, message):
    with pytest.raises(SystemExit, match=message):
        tool.main([*write_inputs(kind, folder), "--json-keys", key, "--output-prefix", str(tmp_path / "o"), *BYTES])


def test_rows_without_text_and_of_broken_utf8_are_bad_records(tool, folder, tmp_path, capsys):
    broken = pyarrow.array([b"fine", b"\xff", None], pyarrow.binary()).view(pyarrow.string())
    with pyarrow.ipc.new_stream(folder / "a.arrow", pyarrow.schema([("text", pyarrow.string())])) as writer:
        writer.write_batch(pyarrow.record_batch([broken], ["text"]))
    tool.main(
        ["--input", str(folder / "a.arrow"), "--on-bad-line", "skip", "--output-prefix", str(tmp_path / "o"), *BYTES]
    )
    message = capsys.readouterr().out
    assert (
        "1 not UTF-8 (" in message and "a.arrow:2)" in message and "1 the value of 'text' is not text (" in message
    ), message


def test_a_frame_that_blows_up_is_unpacked_in_pieces(folder):
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(bytes(100 * 2**20)))
    with open(folder / "a.jsonl.zst", "rb") as raw:
        content = lines._ZstdReader(raw)
        buffer, total = bytearray(2**20), 0
        while count := content.readinto(buffer):
            total += count
            assert len(content._ready) <= 66 * 2**20
    assert total == 100 * 2**20
