"""What text is read from: a file or standard input, a stretch of it, and the chunks in which it is handed on.

Every kind of file is a row of units: bytes of a file of lines (after decompression), rows of a table, or one document. A
span is a stretch of units; a line belongs to the span in which its first byte lies. So spans that lie end to end hold
every record once, whatever their borders, and any position after a record is one from which reading goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STANDARD_INPUT = "-"
CHUNK_BYTES = 2**20

Kind = Literal["jsonl", "lines", "document", "parquet", "arrow"]
Texts = list[list[bytes | None]]  # for each key the text of every row


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input. kind: how its records are found; "lines" and "document" are plain text. size: bytes on disk."""

    path: str
    kind: Kind
    compression: Literal["", "gz", "zst"]
    size: int

    @property
    def has_lines(self) -> bool:
        """Whether its units are bytes and its records lines."""
        return self.kind in ("jsonl", "lines")


@dataclass(frozen=True, slots=True)
class InputFileSpan:
    """Units [start, stop) of a source; to its end when `stop` is None. disk: about where they lie in the file."""

    source: InputFile
    disk: tuple[int, int]
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class InputPosition:
    """Where a run stands: before this unit of this span, with so many records of the span behind it.

    digest: of all bytes that standard input gave so far; empty for files, which are known by size and time.
    """

    span: int = 0
    unit: int = 0
    records: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """Some records that follow each other, as they stand in the source.

    content: whole lines, or the texts of rows. start, end: the places before and after it. num_bytes: size of the
    content. consumed: about how many of the source's bytes on disk are behind its end.
    """

    kind: Kind
    content: bytes | Texts
    start: InputPosition
    end: InputPosition
    num_bytes: int
    consumed: int
