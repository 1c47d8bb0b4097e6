"""The preprocessing tool: its bytes against a plain writing-out, its workers, and bad input."""

import gzip
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.tokenizers.bpe import GPT2BPETokenizer

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"
DATA = ROOT / "examples" / "data"
BPE = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(DATA / "demo-vocab.json"),
       "--merge-file", str(DATA / "demo-merges.txt")]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("preprocess_data", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["preprocess_data"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["preprocess_data"]


def run(*arguments, folder=None):
    """The tool as a process."""
    return subprocess.run([sys.executable, str(TOOL), *map(str, arguments)], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=60)


def write_lines(path, documents):
    """A file of JSON lines."""
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def expected_pair(documents, letter, code):
    """(bin, idx) of documents with one sequence each, or none when empty; put together from the table of the format."""
    full = [ids for ids in documents if ids]
    lengths = [len(ids) for ids in full]
    size = struct.calcsize(letter)
    bounds = [0]
    for ids in documents:
        bounds.append(bounds[-1] + bool(ids))
    return (b"".join(struct.pack(f"<{len(ids)}{letter}", *ids) for ids in full),
            b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(full), len(bounds))
            + struct.pack(f"<{len(full)}i", *lengths)
            + struct.pack(f"<{len(full)}q", *[size * sum(lengths[:i]) for i in range(len(full))])
            + struct.pack(f"<{len(bounds)}q", *bounds))


def pair_at(prefix):
    """The bytes of a pair."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


TEXTS = ["Call me Ishmael.", "", "na\u00efve caf\u00e9 \u6771\u4eac \U0001f30d\n\n\ttabs", " ", "a <|endoftext|> b"]


@pytest.mark.parametrize("append_eod", [True, False])
def test_every_document_is_written_as_its_ids_and_an_end(tool, tmp_path, append_eod):
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BPE] + ["--append-eod"] * append_eod)
    tokenizer = GPT2BPETokenizer(DATA / "demo-vocab.json", DATA / "demo-merges.txt")
    end = [tokenizer.eod] if append_eod else []
    documents = [tokenizer.tokenize(text) + end if text else [] for text in TEXTS]
    assert pair_at(tmp_path / "out_text_document") == expected_pair(documents, "H", 8)


def test_each_key_has_its_own_pair(tool, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [{"title": "a", "body": "bc"}, {"title": "", "body": "d", "text": 5}])
    tool.main(["--input", str(source), "--json-keys", "title", "body", "--output-prefix", str(tmp_path / "o"), *BYTES])
    assert pair_at(tmp_path / "o_title_document") == expected_pair([[97], []], "H", 8)
    assert pair_at(tmp_path / "o_body_document") == expected_pair([[98, 99], [100]], "H", 8)
    assert capsys.readouterr().out.startswith("2 documents, 4 tokens, 0 lines left out; ")


def test_large_vocabularies_are_written_as_32_bit_ids(tool, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "5 65499"}])
    tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--append-eod",
               "--tokenizer-type", "NullTokenizer", "--vocab-size", "65499"])
    assert pair_at(tmp_path / "o_text_document") == expected_pair([[5, 65499, 65499]], "i", 4)


@pytest.mark.parametrize("chunk_bytes", [1, 50, 2**20])
def test_the_bytes_do_not_depend_on_the_chunks(tool, tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tool, "CHUNK_BYTES", chunk_bytes)
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES])
    documents = [list(text.encode()) for text in TEXTS]
    assert pair_at(tmp_path / "out_text_document") == expected_pair(documents, "H", 8)


def test_one_and_two_workers_write_the_same_bytes_from_any_folder(tmp_path):
    copies = [DATA / "demo_valid.jsonl"] * 3
    for workers in (1, 2):
        done = run("--input", *copies, "--output-prefix", f"w{workers}", "--append-eod", "--workers", workers,
                   "--log-interval", 10, *BPE, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("57 documents, ") and done.stdout.count("\n") == 1
        assert "Processed 57 documents (" in done.stderr and "%" not in done.stderr, "no progress bar in a log file"
    assert pair_at(tmp_path / "w1_text_document") == pair_at(tmp_path / "w2_text_document")
    tokenizer = GPT2BPETokenizer(DATA / "demo-vocab.json", DATA / "demo-merges.txt")
    with open(DATA / "demo_valid.jsonl", encoding="utf-8") as lines:
        documents = [tokenizer.tokenize(json.loads(line)["text"]) + [tokenizer.eod] for line in lines] * 3
    assert pair_at(tmp_path / "w1_text_document") == expected_pair(documents, "H", 8)


def test_patterns_and_compressed_files_are_read_in_order(tool, tmp_path):
    for name, text in (("b.jsonl", "B"), ("a.jsonl", "A"), ("c[1].jsonl", "C")):
        write_lines(tmp_path / name, [{"text": text}])
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write('{"text": "Z"}\n{"text": "Y"}')
    tool.main(["--input", str(tmp_path / "z.jsonl.gz"), str(tmp_path / "[ab].jsonl"), str(tmp_path / "c[1].jsonl"),
               "--output-prefix", str(tmp_path / "out"), *BYTES])
    assert (tmp_path / "out_text_document.bin").read_bytes() == struct.pack("<5H", *b"ZYABC")


BAD_LINES = [
    (b'{"text": "a"', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'"text"', "not a JSON object"),
    (b'{"txt": "a"}', "no key 'text'"),
    (b'{"text": 5}', "the value of 'text' is not text"),
    (b'{"text": null}', "the value of 'text' is not text"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "text that the tokenizer cannot read"),
]


@pytest.mark.parametrize("chunk_bytes", [1, 40, 2**20])
def test_lines_are_counted_across_chunks_and_from_1_in_every_file(tool, tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tool, "CHUNK_BYTES", chunk_bytes)
    write_lines(tmp_path / "a.jsonl", [{"text": "fine"}] * 9)
    write_lines(tmp_path / "b.jsonl", [{"text": "fine"}] * 5 + [{}])
    with pytest.raises(SystemExit, match=r"b\.jsonl:6: no key 'text'"):
        tool.main(["--input", str(tmp_path / "[ab].jsonl"), "--output-prefix", str(tmp_path / "out"), *BYTES])


@pytest.mark.parametrize("bad, reason", BAD_LINES)
@pytest.mark.parametrize("tokenizer", [BPE, BYTES])
def test_a_bad_line_stops_the_run_and_is_named(tool, tmp_path, bad, reason, tokenizer):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "fine"}\n\n' + bad + b'\n{"text": "fine"}\n')
    (tmp_path / "out_text_document.bin").write_text("old")
    (tmp_path / "out_text_document.idx").write_text("old")
    with pytest.raises(SystemExit, match=rf"in\.jsonl:3: {reason}; .*--on-bad-line skip"):
        tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), *tokenizer])
    assert pair_at(tmp_path / "out_text_document") == (b"old", b"old")
    assert len(list(tmp_path.iterdir())) == 3, "nothing temporary stays"


def test_bad_lines_are__and_counted_on_request(tool, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    lines = [b'{"text": "a"}', b"", *(bad for bad, _ in BAD_LINES), b'{"text": "b"}']
    source.write_bytes(b"\n".join(lines))
    tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--on-bad-line", "skip", *BYTES])
    assert pair_at(tmp_path / "out_text_document") == expected_pair([[97], [98]], "H", 8)
    told = capsys.readouterr().out
    assert told.startswith("2 documents, 2 tokens, 9 lines left out (")
    assert f"2 not JSON, first {source}:3" in told and f"1 blank, first {source}:2" in told


def test_a_line_that_is_bad_under_one_key_is__of_every_pair(tool, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"a": "x", "b": "y"}, {"a": "x", "b": 1}, {"a": "z", "b": ""}])
    with open(source, "a") as file:
        file.write('{"a": "x", "b": "\\ud800"}\n')
    tool.main(["--input", str(source), "--json-keys", "a", "b", "--output-prefix", str(tmp_path / "o"),
               "--on-bad-line", "skip", *BYTES])
    assert pair_at(tmp_path / "o_a_document") == expected_pair([[120], [122]], "H", 8)
    assert pair_at(tmp_path / "o_b_document") == expected_pair([[121], []], "H", 8)


def test_input_without_documents_leaves_no_pair(tool, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"body": "a"}])
    with pytest.raises(SystemExit, match="no document was found: .*1 no key 'text', first .*in.jsonl:1"):
        tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--on-bad-line", "skip", *BYTES])
    assert list(tmp_path.iterdir()) == [source]


def test_a_damaged_compressed_file_is_named(tool, tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, content in (("cut.gz", whole[:-20]), ("not.gz", b'{"text": "a"}\n'), ("odd.gz", whole[:12] + b"x" * 50)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit, match=rf"{name} is damaged"):
            tool.main(["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "o"), *BYTES])
    assert not list(tmp_path.glob("o_*"))


@pytest.mark.parametrize("arguments, message", [
    (["--input", "not/there", *BYTES], "--input not/there: there is no such file"),
    (["--input", "not/*.jsonl", *BYTES], r"--input not/\*\.jsonl: there is no such file"),
    (["--input", "x", "--tokenizer-type", "Unknown"], "choose one of GPT2BPETokenizer"),
    (["--input", "x"], "no --tokenizer-type is given; choose one of"),
])
def test_settings_that_cannot_work_are_named(tool, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        tool.main([*arguments, "--output-prefix", str(tmp_path / "o")])


@pytest.mark.parametrize("extra", [["--workers", "0"], ["--json-keys", "a", "a"], ["--partition", "2"]])
def test_arguments_that_cannot_work_are_refused(tool, extra):
    with pytest.raises(SystemExit):
        tool.parse_arguments(["--input", "x", "--output-prefix", "y", *extra])


def test_a_killed_worker_stops_the_run(tool, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])

    def killed(chunk, job):
        os.kill(os.getpid(), 9)

    monkeypatch.setattr(tool, "encode", killed)
    killed.__module__, killed.__qualname__ = "preprocess_data", "encode"
    with pytest.raises(SystemExit, match="a worker process was killed"):
        tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--workers", "2", *BYTES])
    assert list(tmp_path.iterdir()) == [source]


def test_help_shows_groups_and_comes_quickly():
    started = time.perf_counter()
    done = run("--help")
    seconds = time.perf_counter() - started
    for group in ("Input:", "Tokenizer:", "Output:", "Run:"):
        assert f"\n{group}\n" in done.stdout
    assert seconds < 2, f"{seconds:.2f} s; 0.15 s on a quiet machine"


def test_the_tools_start_without_torch():
    code = ("import runpy, sys; sys.argv = ['tool', '--help']\n"
            "try: runpy.run_path({!r}, run_name='__main__')\n"
            "except SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)")
    for name in ("preprocess_data", "merge_datasets"):
        done = subprocess.run([sys.executable, "-c", code.format(str(ROOT / "tools" / f"{name}.py"))],
                              capture_output=True, text=True, timeout=60)
        assert done.stdout.endswith("False False\n"), done.stdout + done.stderr
