"""The preprocessing tool: its bytes against a plain writing-out, its workers, and bad input."""

import base64
import gzip
import importlib
import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.datasets.ingest import lines
from megatron.core.tokenizers.bpe import GPT2BPETokenizer

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"
DATA = ROOT / "examples" / "data"
BPE = [
    "--tokenizer-type",
    "GPT2BPETokenizer",
    "--vocab-file",
    str(DATA / "demo-vocab.json"),
    "--merge-file",
    str(DATA / "demo-merges.txt"),
]
BYTES = ["--tokenizer-type", "ByteTokenizer"]


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.preprocess_data")


def run(*arguments, folder=None):
    """The tool as a process."""
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
    )


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
    return (
        b"".join(struct.pack(f"<{len(ids)}{letter}", *ids) for ids in full),
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(full), len(bounds))
        + struct.pack(f"<{len(full)}i", *lengths)
        + struct.pack(f"<{len(full)}q", *[size * sum(lengths[:i]) for i in range(len(full))])
        + struct.pack(f"<{len(bounds)}q", *bounds),
    )


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
    told = capsys.readouterr().out
    assert told.startswith("2 documents (1 without text under 'title'), 4 tokens, 0 lines left out; "), told


def test_large_vocabularies_are_written_as_32_bit_ids(tool, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "5 65499"}])
    tool.main(
        [
            "--input",
            str(source),
            "--output-prefix",
            str(tmp_path / "o"),
            "--append-eod",
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            "65500",
        ]
    )
    assert pair_at(tmp_path / "o_text_document") == expected_pair([[5, 65499, 65499]], "i", 4)


@pytest.mark.parametrize("chunk_bytes", [1, 50, 2**20])
def test_the_bytes_do_not_depend_on_the_chunks(tool, tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk_bytes)
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])
    tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES])
    documents = [list(text.encode()) for text in TEXTS]
    assert pair_at(tmp_path / "out_text_document") == expected_pair(documents, "H", 8)


def test_one_and_two_workers_write_the_same_bytes_from_any_folder(tmp_path):
    copies = [DATA / "demo_valid.jsonl"] * 3
    for workers in (1, 2):
        done = run(
            "--input",
            *copies,
            "--output-prefix",
            f"w{workers}",
            "--append-eod",
            "--workers",
            workers,
            "--log-interval",
            10,
            *BPE,
            folder=tmp_path,
        )
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
    tool.main(
        [
            "--input",
            str(tmp_path / "z.jsonl.gz"),
            str(tmp_path / "[ab].jsonl"),
            str(tmp_path / "c[1].jsonl"),
            "--output-prefix",
            str(tmp_path / "out"),
            *BYTES,
        ]
    )
    assert (tmp_path / "out_text_document.bin").read_bytes() == struct.pack("<5H", *b"ZYABC")


BAD_LINES = [
    (b'{"text": "a"', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'"text"', "not a JSON object"),
    (b'{"txt": "a"}', "no key 'text'"),
    (b'{"text": 5}', "the value of 'text' is not text"),
    (b'{"text": null}', "the value of 'text' is not text"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair in 'text'"),
    (b'{"text": "a\0b"}', "not JSON"),
    (b'{"text": "a"}{"text": "b"}', "not JSON"),
    (b"[" + b"1" * 5000 + b"]", "not JSON"),
]


@pytest.mark.parametrize("chunk_bytes", [1, 40, 2**20])
def test_lines_are_counted_across_chunks_and_from_1_in_every_file(tool, tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(lines, "CHUNK_BYTES", chunk_bytes)
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


@pytest.mark.parametrize("workers", [1, 2])
def test_text_on_which_the_tokenizers_library_panics_is_a_bad_line(tmp_path, workers):
    ranks = tmp_path / "bytes.tiktoken"
    ranks.write_text("".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)))
    write_lines(tmp_path / "in.jsonl", [{"text": "a"}, {"text": " " * 1_000_000 + "b"}, {"text": "c"}])
    flags = [
        "--input",
        tmp_path / "in.jsonl",
        "--output-prefix",
        tmp_path / "o",
        "--workers",
        workers,
        "--tokenizer-type",
        "TikTokenizer",
        "--tokenizer-model",
        ranks,
        "--tiktoken-pattern",
        "v1",
    ]
    done = run(*flags)
    assert done.returncode == 1 and "in.jsonl:2: text that the tokenizer cannot read; mend the line" in done.stderr, (
        done.stderr
    )
    done = run(*flags, "--on-bad-line", "skip")
    assert "1 text that the tokenizer cannot read" in done.stdout and "in.jsonl:2)" in done.stdout, done.stderr
    assert pair_at(tmp_path / "o_text_document") == expected_pair([[97], [99]], "H", 8)


def test_a_folder_is_all_its_files_by_name(tool, tmp_path):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    write_lines(folder / "b.jsonl", [{"text": "b"}])
    write_lines(folder / "sub" / "c.json", [{"text": "c"}])
    (folder / "a.txt").write_text("a")
    (folder / ".hidden").write_text("no")
    (folder / "sub" / "loop").symlink_to(folder)
    tool.main(["--input", str(folder), "--output-prefix", str(tmp_path / "o"), *BYTES])
    assert pair_at(tmp_path / "o_text_document") == expected_pair([[97], [98], [99]], "H", 8)
    (folder / "d.py").write_text("d")
    with pytest.raises(
        SystemExit, match=r"1 of the 4 files of this folder do not say by their ending what they are, first .*d\.py"
    ):
        tool.main(["--input", str(folder), "--output-prefix", str(tmp_path / "o"), *BYTES])
    tool.main(
        ["--input", str(folder / "d.py"), "--input-format", "txt", "--output-prefix", str(tmp_path / "p"), *BYTES]
    )
    assert pair_at(tmp_path / "p_text_document") == expected_pair([[100]], "H", 8)


def test_bad_lines_are_left_out_and_counted_on_request(tool, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    lines = [b'{"text": "a"}', b"", *(bad for bad, _ in BAD_LINES), b'{"text": "b"}']
    source.write_bytes(b"\n".join(lines))
    tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--on-bad-line", "skip", *BYTES])
    assert pair_at(tmp_path / "out_text_document") == expected_pair([[97], [98]], "H", 8)
    told = capsys.readouterr().out
    assert told.startswith("2 documents, 2 tokens, 12 lines left out: 5 not JSON ("), told
    assert f"5 not JSON ({source}:3, {source}:4, {source}:11, {source}:12, {source}:13)" in told, told
    assert f"1 blank ({source}:2)" in told and f"2 the value of 'text' is not text ({source}:7, {source}:8)" in told


def test_a_line_that_is_bad_under_one_key_is_left_out_of_every_pair(tool, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"a": "x", "b": "y"}, {"a": "x", "b": 1}, {"a": "z", "b": ""}])
    with open(source, "a") as file:
        file.write('{"a": "x", "b": "\\ud800"}\n')
    tool.main(
        [
            "--input",
            str(source),
            "--json-keys",
            "a",
            "b",
            "--output-prefix",
            str(tmp_path / "o"),
            "--on-bad-line",
            "skip",
            *BYTES,
        ]
    )
    assert pair_at(tmp_path / "o_a_document") == expected_pair([[120], [122]], "H", 8)
    assert pair_at(tmp_path / "o_b_document") == expected_pair([[121], []], "H", 8)


def test_input_without_documents_leaves_no_pair(tool, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"body": "a"}])
    with pytest.raises(SystemExit, match=r"no document was found: .*1 no key 'text' \(.*in.jsonl:1\)"):
        tool.main(["--input", str(source), "--output-prefix", str(tmp_path / "o"), "--on-bad-line", "skip", *BYTES])
    assert list(tmp_path.iterdir()) == [source]


def test_a_damaged_compressed_file_is_named(tool, tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    for name, content in (("cut.gz", whole[:-20]), ("not.gz", b'{"text": "a"}\n'), ("odd.gz", whole[:12] + b"x" * 50)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SystemExit, match=rf"{name} is damaged"):
            tool.main(["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "o"), *BYTES])
    assert not list(tmp_path.glob("o_*"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--input", "not/there", *BYTES], "--input not/there: there is no such file"),
        (["--input", "not/*.jsonl", *BYTES], r"--input not/\*\.jsonl: there is no such file"),
        (["--input", str(DATA / "demo_valid.jsonl"), "--tokenizer-type", "Unknown"], "choose one of GPT2BPETokenizer"),
        (["--input", str(DATA / "demo_valid.jsonl")], "no --tokenizer-type is given; choose one of"),
        (
            ["--input", str(DATA), *BYTES],
            r"data: \d of the \d+ files of this folder do not say by their ending what they are, first .*LICENSE; "
            r"give --input-format for all, or a pattern, as in '.*data/\*\*/\*.jsonl'",
        ),
        (
            ["--input", str(ROOT / "README.md"), *BYTES],
            r"README.md does not begin with a JSON object, .*say --input-format txt",
        ),
        (["--input", str(TOOL), *BYTES], r"preprocess_data.py does not begin with a JSON object"),
        (["--input", "-", "-", *BYTES], "names standard input twice"),
        (["--input", "-", "--input-format", "parquet", *BYTES], "parquet files are read in place"),
        (["--input", "-", "--shard", "0/2", *BYTES], "standard input cannot be cut"),
        (
            ["--input", str(DATA / "demo_valid.jsonl"), "--keep-newlines", "--lang", "dutch", *BYTES],
            r"2 settings(.|\n)*--lang dutch .* --split-sentences",
        ),
        (
            ["--input", str(DATA / "demo_valid.jsonl"), "--split-sentences", "--lang", "klingon", *BYTES],
            "no Punkt tables of that language.*NLTK_DATA",
        ),
        (
            ["--input", str(ROOT / "requirements.txt"), "--json-keys", "a", "b", *BYTES],
            "requirements.txt is plain text, with one text",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(tool, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        tool.main([*arguments, "--output-prefix", str(tmp_path / "o")])


@pytest.mark.parametrize(
    "extra",
    [
        ["--workers", "0"],
        ["--json-keys", "a", "a"],
        ["--partition", "2"],
        ["--dataset-impl", "lazy"],
        ["--shard", "2/2"],
        ["--shard", "1"],
        ["--journal-interval", "-1"],
        ["--workers-to-check", "1", "0"],
    ],
)
def test_arguments_that_cannot_work_are_refused(tool, extra):
    with pytest.raises(SystemExit):
        tool.parse_arguments(["--input", "x", "--output-prefix", "y", *extra])


def children(pid):
    """The worker processes of a process."""
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for(condition, what):
    """Until it is so, for a while."""
    end = time.monotonic() + 300
    while not (result := condition()):
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.01)
    return result


def start(*arguments, folder):
    """The tool as a process that goes on, with a pipe for its input."""
    return subprocess.Popen(
        [sys.executable, str(TOOL), *map(str, arguments)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_worker_stops_the_run(tmp_path, which):
    process = start("--input", "-", "--output-prefix", "o", "--workers", 2, *BYTES, folder=tmp_path)
    workers = wait_for(lambda: children(process.pid) if len(children(process.pid)) == 2 else None, "two workers")
    os.kill(workers[which], 9)
    _, told = process.communicate(b'{"text": "%s"}\n' % (b"a" * 2**20) * 3, timeout=300)
    assert process.returncode == 1 and b"a worker process was killed" in told, told
    assert not list(tmp_path.iterdir())


def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = start("--input", "-", "--output-prefix", "o", "--workers", 2, *BYTES, folder=tmp_path)
    workers = wait_for(lambda: children(process.pid) if len(children(process.pid)) == 2 else None, "two workers")
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers), "the end of the workers")


def test_a_second_run_with_the_same_prefix_is_refused_while_the_first_lives(tmp_path):
    process = start("--input", "-", "--output-prefix", "o", *BYTES, folder=tmp_path)
    wait_for((tmp_path / "o_text_document.bin.partial").exists, "the first run")
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    refused = run("--input", source, "--output-prefix", "o", *BYTES, folder=tmp_path)
    assert refused.returncode == 1 and "another process is writing to --output-prefix o" in refused.stderr
    assert process.poll() is None, "the first run goes on"
    process.kill()
    process.communicate()
    done = run("--input", source, "--output-prefix", "o", *BYTES, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        *(f"o_text_document.{e}" for e in ("bin", "idx", "json")),
    ]


@pytest.mark.parametrize("workers, packed", [(1, False), (2, True)])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(tmp_path, workers, packed):
    documents = [{"text": f"{number} " * 400, "b": str(number)} for number in range(2500)]
    source = write_lines(tmp_path / "in.jsonl", documents)
    if packed:
        (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(source.read_bytes(), 1))
        source = tmp_path / "in.jsonl.gz"
    command = [
        "--input",
        source,
        "--output-prefix",
        "o",
        "--json-keys",
        "text",
        "b",
        "--append-eod",
        "--workers",
        workers,
        "--journal-interval",
        0,
        *BYTES,
    ]
    moments, resumed = random.Random(workers), 0
    for _ in range(3):
        process = start(*command, folder=tmp_path)
        # A third of the moments are early, before there is a journal.
        if moments.random() > 1 / 3:
            wait_for(lambda: process.poll() is not None or (tmp_path / "o.journal.partial").exists(), "the journal")
        time.sleep(moments.uniform(0, 0.08))
        process.kill()
        _, told = process.communicate()
        resumed += b"going on after" in told
        if process.returncode == -9:
            assert not list(tmp_path.glob("*.idx")), "a pair appears when it is complete"
    done = run(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert resumed or "going on after" in done.stderr, "the last run began anew"
    for key in ("text", "b"):
        ids = [[*document[key].encode(), 256] for document in documents]
        assert pair_at(tmp_path / f"o_{key}_document") == expected_pair(ids, "H", 8)
    assert not list(tmp_path.glob("*.partial"))


def test_memory_does_not_grow_with_the_input(tmp_path):
    peaks = []
    for copies in (4, 40):
        source = tmp_path / f"{copies}.jsonl"
        source.write_bytes(
            b"".join(json.dumps({"text": f"{number} " * 1000}).encode() + b"\n" for number in range(150)) * copies
        )
        code = (
            "import resource, sys; from megatron.cli.commands.preprocess_data import main; main(sys.argv[1:]); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "--input", str(source), "--output-prefix", str(tmp_path / "o"), *BYTES],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 15, f"{peaks[0]:.0f} MB for 2 MB of text, {peaks[1]:.0f} MB for 20"


def test_standard_input_is_read_as_lines_of_json_or_text(tool, tmp_path, monkeypatch):
    for format, content in (("auto", b'{"text": "ab"}\n{"text": "c"}'), ("txt", b"ab\nc\n")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        tool.main(
            [
                "--input",
                "-",
                "--input-format",
                format,
                "--text-documents",
                "line",
                "--output-prefix",
                str(tmp_path / format),
                *BYTES,
            ]
        )
        assert pair_at(tmp_path / f"{format}_text_document") == expected_pair([[97, 98], [99]], "H", 8)


def test_the_best_number_of_workers_is_measured_and_nothing_is_written(tool, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}] * 50)
    tool.main(
        [
            "--input",
            str(source),
            "--output-prefix",
            str(tmp_path / "o"),
            "--find-optimal-num-workers",
            "--workers-to-check",
            "1",
            "2",
            "--max-documents",
            "20",
            *BYTES,
        ]
    )
    told = capsys.readouterr().out
    assert re.match(
        r"1 workers: 50 documents in .* docs/s\n2 workers: 50 documents in .* docs/s\n"
        r"the best of these: --workers [12]\n$",
        told,
    ), told
    assert list(tmp_path.iterdir()) == [source]


def test_flags_of_other_programmes_for_what_is_always_so_are_answered(tool, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    tool.main(
        [
            "--input",
            str(source),
            "--output-prefix",
            str(tmp_path / "o"),
            "--partitions",
            "4",
            "--keep-sequential-samples",
            "--dataset-impl",
            "mmap",
            "--chunk-size",
            "25",
            *BYTES,
        ]
    )
    told = capsys.readouterr().err
    assert "--partitions and --keep-sequential-samples: the input is one stream" in told
    assert "--dataset-impl mmap and --chunk-size: there is one form of files" in told
    assert pair_at(tmp_path / "o_text_document") == expected_pair([[97]], "H", 8)


def test_help_shows_groups():
    done = run("--help")
    for group in ("Input:", "Tokenizer:", "Output:", "Run:"):
        assert f"\n{group}\n" in done.stdout


def test_the_tools_start_without_torch():
    code = (
        "import runpy, sys; sys.argv = ['tool', '--help']\n"
        "try: runpy.run_path({!r}, run_name='__main__')\n"
        "except SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    for name in ("preprocess_data", "merge_datasets"):
        done = subprocess.run(
            [sys.executable, "-c", code.format(str(ROOT / "tools" / f"{name}.py"))],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.endswith("False False\n"), done.stdout + done.stderr
