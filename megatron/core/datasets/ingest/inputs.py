"""Names and patterns to sources, sources to spans, spans to chunks; and how a source is known again."""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import xxhash

from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.ingest.columns import count_table_rows, read_table_chunks
from megatron.core.datasets.ingest.input_spans import (
    STANDARD_INPUT,
    InputFile,
    InputFileSpan,
    InputPosition,
    RecordChunk,
)
from megatron.core.datasets.ingest.lines import (
    count_decompressed_bytes,
    count_lines_before,
    read_file_as_document,
    read_line_chunks,
)

HEAD_BYTES = 2**16

Format = Literal["auto", "jsonl", "txt", "parquet", "arrow"]
TextDocuments = Literal["file", "line"]
ENDINGS: Mapping[str, Format] = MappingProxyType(
    {".jsonl": "jsonl", ".json": "jsonl", ".txt": "txt", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
)


def find_input_files(words: Iterable[str], format: Format, text_documents: TextDocuments) -> list[InputFile]:
    """Return the input files that names, patterns and folders stand for, in order; those of a pattern or folder are
    sorted.

    format: of all inputs; "auto": by file ending, and JSON lines for other endings if the content begins so.
    text_documents: whether a plain text file is one document, or each of its lines is. `DataError` if a file is
    missing.
    """
    sources: list[InputFile] = []
    for word in words:
        if word == STANDARD_INPUT:
            sources.append(_classify_input_file(word, "jsonl" if format == "auto" else format, text_documents))
            continue
        if os.path.isdir(word):
            sources += _find_files_in_folder(word, format, text_documents)
            continue
        result = [word] if os.path.exists(word) else sorted(glob.glob(word, recursive=True))
        result = [path for path in result if not os.path.isdir(path)]
        if not result:
            raise DataError(f"--input {word}: there is no such file")
        sources += [_classify_input_file(path, format, text_documents) for path in result]
    if sum(source.path == STANDARD_INPUT for source in sources) > 1:
        raise DataError("--input - names standard input twice")
    return sources


def _find_files_in_folder(folder: str, format: Format, text_documents: TextDocuments) -> list[InputFile]:
    """Return all files of a folder and its subfolders. `DataError` if there is none, or with "auto" an unknown ending."""
    paths = sorted(
        path
        for place, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and os.path.isfile(path := os.path.join(place, name))
    )
    unknown = [path for path in paths if format == "auto" and _file_ending_and_compression(path)[0] not in ENDINGS]
    if not paths or unknown:
        raise DataError(
            f"--input {folder}: "
            + (
                f"{len(unknown)} of the {len(paths)} files of this folder do not say by their ending what they are, first {unknown[0]}; give "
                f"--input-format for all, or a pattern, as in '{os.path.join(folder, '**', '*.jsonl')}'"
                if paths
                else "this folder holds no file"
            )
        )
    return [_classify_input_file(path, format, text_documents) for path in paths]


def _file_ending_and_compression(path: str) -> tuple[str, Literal["", "gz", "zst"]]:
    """Return (file ending, compression) of a name, such as (".jsonl", "gz")."""
    stem, ending = os.path.splitext(path)
    if ending not in (".gz", ".zst"):
        return ending, ""
    return os.path.splitext(stem)[1], "gz" if ending == ".gz" else "zst"


def _require_json_start(path: str) -> None:
    """Raise `DataError` if a file taken for JSON lines does not begin with a JSON object."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    if head and head[:1] != b"{":
        raise DataError(
            f"--input {path} does not begin with a JSON object, and its ending says nothing else; name plain text "
            ".txt, or say --input-format txt (or jsonl, to read it as JSON lines nevertheless)"
        )


def _classify_input_file(path: str, format: Format, text_documents: TextDocuments) -> InputFile:
    """Return a path as `InputFile`, its kind resolved. `DataError` if it cannot be read in that format."""
    ending, compression = _file_ending_and_compression(path)
    if format == "auto":
        format = ENDINGS.get(ending, "jsonl")
        if ending not in ENDINGS and not compression and os.path.isfile(path):
            _require_json_start(path)
    if format in ("parquet", "arrow") and (compression or path == STANDARD_INPUT):
        raise DataError(f"--input {path}: {format} files are read in place; unpack it, and give its name")
    kind: Any = {"file": "document", "line": "lines"}[text_documents] if format == "txt" else format
    return InputFile(path, kind, compression, 0 if path == STANDARD_INPUT else os.path.getsize(path))


def input_file_fingerprint(source: InputFile) -> list[str | int]:
    """Return what identifies an unchanged input: path, size, modification time, and a hash of its first and last bytes."""
    if source.path == STANDARD_INPUT:
        return [STANDARD_INPUT]
    ends = xxhash.xxh3_64()
    with open(source.path, "rb") as file:
        ends.update(file.read(HEAD_BYTES))
        file.seek(max(0, source.size - HEAD_BYTES))
        ends.update(file.read(HEAD_BYTES))
    return [os.path.abspath(source.path), source.size, os.stat(source.path).st_mtime_ns, ends.hexdigest()]


def spans_of_corpus_shard(sources: Sequence[InputFile], shard: tuple[int, int] | None) -> list[InputFileSpan]:
    """Return which parts of the inputs a run reads: all, or shard (i, n), from 0, of n shards of about equal bytes.

    The shards in order hold what one run reads, in order. Where a border falls into a table or compressed file, its
    rows are counted or its length is found by decompressing it. `DataError` for a shard of standard input.
    """
    if shard is None:
        return [InputFileSpan(source, (0, source.size)) for source in sources]
    if any(source.path == STANDARD_INPUT for source in sources):
        raise DataError("--shard: standard input cannot be cut into shards; give files")
    index, count = shard
    # One more than its size, that an empty text file, a document of its own, lies somewhere.
    total = sum(source.size + 1 for source in sources)
    low, high = total * index // count, total * (index + 1) // count
    spans, before = [], 0
    for source in sources:
        weight = source.size + 1
        start, stop = (min(max(border - before, 0), weight) for border in (low, high))
        before += weight
        if start == stop:
            continue
        if (start, stop) == (0, weight):
            spans.append(InputFileSpan(source, (0, source.size)))
            continue
        units = _count_bytes_or_rows(source)
        span = InputFileSpan(source, (start, stop), units * start // weight, units * stop // weight)
        if span.start != span.stop:
            spans.append(span)
    return spans


def _count_bytes_or_rows(source: InputFile) -> int:
    """Return the number of units of a source: bytes after decompression, rows, or 1 for a document."""
    if source.has_lines:
        return count_decompressed_bytes(source)
    return 1 if source.kind == "document" else count_table_rows(source)


def read_input_chunks(
    spans: Sequence[InputFileSpan], keys: Sequence[str], place: InputPosition
) -> Iterator[RecordChunk]:
    """Yield all chunks of all spans in order, from `place` on."""
    for number in range(place.span, len(spans)):
        span = spans[number]
        start = place if number == place.span else InputPosition(number, span.start)
        if span.source.has_lines:
            yield from read_line_chunks(number, span, start)
        elif span.source.kind == "document":
            yield from read_file_as_document(number, span, start)
        else:
            yield from read_table_chunks(number, span, start, keys)


def record_location(span: InputFileSpan, record: int) -> str:
    """Return FILE:NUMBER of record `record` (from 1) of a span, numbered from 1 in the whole file."""
    source = span.source
    before = count_lines_before(source, span.start) if source.has_lines else span.start
    path = "standard input" if source.path == STANDARD_INPUT else source.path
    return path if source.kind == "document" else f"{path}:{before + record}"
