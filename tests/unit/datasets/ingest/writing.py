"""For the tests: the same documents in every kind of file, and the pair that they must become."""

import gzip
import json
import struct
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet

TEXTS = [
    *("", " ", "na\u00efve \u6771\u4eac \U0001f30d", "two\nlines\r\n", "\0 \u2028 \x85", '\\u00e9 "quoted" \\'),
    *("x" * number for number in range(1, 40)),
    "a document of many letters " * 30,
    "",
    "the last",
]
# Texts that plain text files can hold, one a line: none is blank, none has an end of line.
LINES = [text for text in TEXTS if text.strip() and "\n" not in text]
KINDS = ["jsonl", "gz", "zst", "lines", "lines.gz", "documents", "parquet", "arrow stream", "arrow file"]


def texts_of(kind):
    """The documents that files of a kind hold."""
    return LINES if kind.startswith("lines") else TEXTS


def write_inputs(kind, folder):
    """Files of a kind that hold the documents, and the flags with which they are read."""
    texts, half = texts_of(kind), len(texts_of(kind)) // 2
    rows = [
        json.dumps({"id": number, "text": text}, ensure_ascii=number % 2 == 0).encode() + b"\n"
        for number, text in enumerate(texts)
    ]
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    if kind == "jsonl":  # the last line of the last file has no end
        return [
            "--input",
            *files(folder, {"a.jsonl": b"".join(rows[:half]), "b.json": b"".join(rows[half:]).rstrip(b"\n")}),
        ]
    if kind == "gz":  # of two members
        return [
            "--input",
            *files(folder, {"a.jsonl.gz": gzip.compress(b"".join(rows[:half])) + gzip.compress(b"".join(rows[half:]))}),
        ]
    if kind == "zst":  # of two frames, the second in a file of its own too
        frames = [zstandard.compress(b"".join(part)) for part in (rows[:7], rows[7:half], rows[half:])]
        return ["--input", *files(folder, {"a.jsonl.zst": frames[0] + frames[1], "b.jsonl.zst": frames[2]})]
    if kind.startswith("lines"):
        content = b"\r\n".join(text.encode() for text in texts)
        name, content = ("a.txt.gz", gzip.compress(content)) if kind.endswith("gz") else ("a.txt", content)
        return ["--text-documents", "line", "--input", *files(folder, {name: content})]
    if kind == "documents":
        return ["--input", *files(folder, {f"{number:02d}.txt": text.encode() for number, text in enumerate(texts)})]
    if kind == "parquet":  # several row groups, and a second file with a dictionary instead of plain texts
        parquet.write_table(table[:half], folder / "a.parquet", row_group_size=7)
        parquet.write_table(pyarrow.table({"text": table["text"][half:].dictionary_encode()}), folder / "b.parquet")
        return ["--input", str(folder / "a.parquet"), str(folder / "b.parquet")]
    opened = pyarrow.ipc.new_stream if kind == "arrow stream" else pyarrow.ipc.new_file
    with opened(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return ["--input", str(folder / "a.arrow")]


def files(folder, contents):
    """Write files; their names."""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in contents]


def pair_of(documents, letter="H", code=8):
    """(bin, idx) of documents given as lists of sequences of ids, put together from the table of the format."""
    sequences = [ids for document in documents for ids in document]
    starts, bounds = [0], [0]
    for ids in sequences:
        starts.append(starts[-1] + len(ids) * struct.calcsize(letter))
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    return (
        b"".join(struct.pack(f"<{len(ids)}{letter}", *ids) for ids in sequences),
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
        + struct.pack(f"<{len(sequences)}i", *map(len, sequences))
        + struct.pack(f"<{len(sequences)}q", *starts[:-1])
        + struct.pack(f"<{len(bounds)}q", *bounds),
    )


def bytes_of(kind):
    """The pair that a kind's documents become under the byte tokenizer, with ends of documents."""
    return pair_of([[[*text.encode(), 256]] if text else [] for text in texts_of(kind)])


def pair_at(prefix):
    """The bytes of a pair."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()
