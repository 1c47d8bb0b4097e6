"""Files of lines, and plain text, as chunks: as they are, compressed with gzip or zstd, or from standard input."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import xxhash

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.ingest.input_spans import (
    CHUNK_BYTES,
    STANDARD_INPUT,
    InputFile,
    InputFileSpan,
    InputPosition,
    RecordChunk,
)

COMPRESSED_PIECE = 2**11  # zstd can blow this up to 64 MB, if it wants to do harm


class _ZstdReader(io.RawIOBase):
    """The content of a .zst file of any number of frames. Raises `EOFError` when the last one is cut short."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(".zst files need the package zstandard: pip install zstandard") from error
        self._raw = raw
        self._frames = zstandard.ZstdDecompressor()
        self._frame = self._frames.decompressobj()
        self._inside = False
        self._input = self._ready = b""

    def readable(self) -> bool:
        """Return true, as io.RawIOBase asks."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the start of the buffer; 0 at the end."""
        while not self._ready:
            self._input = self._input or self._raw.read(COMPRESSED_PIECE)
            if not self._input:
                if self._inside:
                    raise EOFError("it ends inside a frame")
                return 0
            self._ready = self._frame.decompress(self._input)
            self._inside, self._input = True, b""
            if self._frame.eof:
                self._inside, self._input = False, self._frame.unused_data
                self._frame = self._frames.decompressobj()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


@contextmanager
def open_line_file(source: InputFile) -> Iterator[tuple[Any, BinaryIO]]:
    """Open a text source; give (decompressed content, the file on disk under it). Damage raises `DataError`."""
    if source.path == STANDARD_INPUT:
        yield sys.stdin.buffer, sys.stdin.buffer
        return
    with open(source.path, "rb") as raw:
        try:
            if source.compression == "gz":
                yield gzip.GzipFile(fileobj=raw), raw
            elif source.compression == "zst":
                yield io.BufferedReader(_ZstdReader(raw), CHUNK_BYTES), raw
            else:
                yield raw, raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{source.path} is damaged: {error}") from error
        except Exception as error:
            # Without zstandard installed its error cannot be named in an except clause.
            if type(error).__module__.startswith("zstandard"):
                raise DataError(f"{source.path} is damaged: {error}") from error
            raise


def read_line_chunks(number: int, span: InputFileSpan, place: InputPosition) -> Iterator[RecordChunk]:
    """Yield chunks of whole lines of a span, from `place` on. number: the span's index in the run."""
    source = span.source
    with open_line_file(source) as (file, raw):
        digest = xxhash.xxh3_128() if source.path == STANDARD_INPUT else None
        if digest:
            _skip_consumed_input(file, place, digest)
            position = place.unit
        else:
            position = _skip_to_line_after_byte(file, source, max(place.unit, span.start))
        records = place.records
        while span.stop is None or position < span.stop:
            content = file.read(CHUNK_BYTES if span.stop is None else min(CHUNK_BYTES, span.stop - position))
            if not content:
                break
            if not content.endswith(b"\n"):
                content += file.readline()
            start = InputPosition(number, position, records)
            position += len(content)
            records += content.count(b"\n") + (not content.endswith(b"\n"))
            if digest:
                digest.update(content)
            end = InputPosition(number, position, records, digest.hexdigest() if digest else "")
            consumed = raw.tell() if source.compression else position
            yield RecordChunk(source.kind, content, start, end, len(content), consumed)


def read_file_as_document(number: int, span: InputFileSpan, place: InputPosition) -> Iterator[RecordChunk]:
    """Yield a plain text file as one document; nothing if `place` is behind it."""
    if place.unit:
        return
    with open_line_file(span.source) as (file, _):
        content = file.read()
    yield RecordChunk(
        "document", [[content]], InputPosition(number), InputPosition(number, 1, 1), len(content), span.source.size
    )


def count_decompressed_bytes(source: InputFile) -> int:
    """The size of a file after decompression."""
    if not source.compression:
        return source.size
    with open_line_file(source) as (file, _):
        return sum(map(len, _read_bytes_in_chunks(file, sys.maxsize)))


def count_lines_before(source: InputFile, position: int) -> int:
    """Return how many lines of a file begin before byte `position`."""
    if position == 0:
        return 0
    with open_line_file(source) as (file, _):
        return 1 + sum(content.count(b"\n") for content in _read_bytes_in_chunks(file, position - 1))


def _read_bytes_in_chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file, or all that are left, a piece at a time."""
    while size and (content := file.read(min(size, CHUNK_BYTES))):
        size -= len(content)
        yield content


def _skip_to_line_after_byte(file: BinaryIO, source: InputFile, start: int) -> int:
    """Advance to the first line that begins at byte `start` or later, and return where it begins."""
    if start == 0:
        return 0
    if source.compression:
        for _ in _read_bytes_in_chunks(file, start - 1):
            pass
    else:
        file.seek(start - 1)
    return start - 1 + len(file.readline())


def _skip_consumed_input(file: BinaryIO, place: InputPosition, digest: xxhash.xxh3_128) -> None:
    """Skip what the interrupted run read from standard input, updating `digest`. `DataError` if the input differs."""
    for content in _read_bytes_in_chunks(file, place.unit):
        digest.update(content)
    if place.unit and digest.hexdigest() != place.digest:
        raise DataError(
            f"standard input does not begin with the {place.unit} bytes that the run to be continued read; "
            "give it the same text, or begin anew with --restart"
        )
