"""Chunks to texts. What cannot be read is left out, and said: how often, why, and where it stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.datasets.ingest.input_spans import RecordChunk
from megatron.core.datasets.ingest.sentences import Split

BLANK = "blank"
UNREADABLE = "text that the tokenizer cannot read"
PLACES = 5  # bad records of a kind that are named; all are counted
BYTE_ORDER_MARK = "\ufeff"


@dataclass(slots=True)
class DroppedRecordCount:
    """Records left out for one reason: how many, and the numbers of the first, counted from 1 in their span."""

    count: int = 0
    records: list[int] = field(default_factory=list)

    def add_record(self, record: int) -> None:
        """Count one more."""
        self.count += 1
        if len(self.records) < PLACES:
            self.records.append(record)


Drops = dict[str, DroppedRecordCount]


@dataclass(slots=True)
class ParsedDocuments:
    """The documents of a chunk.

    texts: for each key the sentences of every document, or its one text. numbers: which record of its span each
    document is, from 1.
    """

    texts: list[list[list[str]]]
    numbers: list[int]
    drops: Drops

    def drop_documents(self, bad: Sequence[int], reason: str) -> ParsedDocuments:
        """Return the batch without the documents at positions `bad`, which are counted as dropped for `reason`."""
        drops, gone = dict(self.drops), set(bad)
        drops[reason] = DroppedRecordCount()
        for place in sorted(gone):
            drops[reason].add_record(self.numbers[place])
        retained = [place for place in range(len(self.numbers)) if place not in gone]
        texts = [[column[place] for place in retained] for column in self.texts]
        return ParsedDocuments(texts, [self.numbers[place] for place in retained], drops)


def parse_records(chunk: RecordChunk, keys: Sequence[str], split: Split | None = None) -> ParsedDocuments:
    """Parse a chunk to documents; invalid records are counted in `drops`. split: finds the sentences of a text."""
    records = ParsedDocuments([[] for _ in keys], [], {})
    if isinstance(chunk.content, bytes):
        rows: list[Any] = chunk.content.split(b"\n")
        if not rows[-1]:
            rows.pop()
        read: Callable[[Any, Sequence[str]], list[str]] = (
            _extract_json_line_texts if chunk.kind == "jsonl" else _parse_plain_text_line
        )
    else:
        rows = list(zip(*chunk.content))
        read = _decode_row_texts
    for number, row in enumerate(rows, chunk.start.records + 1):
        try:
            texts = read(row, keys)
        except ValueError as error:
            records.drops.setdefault(str(error), DroppedRecordCount()).add_record(number)
            continue
        records.numbers.append(number)
        for column, text in zip(records.texts, texts):
            column.append(split(text) if split else [text])
    return records


def _extract_json_line_texts(line: bytes, keys: Sequence[str]) -> list[str]:
    """The text under each key of a JSON object. Raises `ValueError` whose message is what is wrong with the line."""
    try:
        content = json.loads(line.decode().removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON" if line.strip() else BLANK) from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    texts = []
    for key in keys:
        if key not in content:
            raise ValueError(f"no key {key!r}")
        text = content[key]
        if not isinstance(text, str):
            raise ValueError(f"the value of {key!r} is not text")
        if b"\\u" in line and not _is_encodable(text):
            raise ValueError(f"half of a surrogate pair in {key!r}")
        texts.append(text)
    return texts


def _is_encodable(text: str) -> bool:
    """Return whether a text can be encoded; an escaped half of a surrogate pair in JSON makes one that cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_plain_text_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return a line of plain text without its line end. `ValueError` if it is blank or not UTF-8."""
    if not line.strip():
        raise ValueError(BLANK)
    return _decode_row_texts([line.removesuffix(b"\r")], keys)


def _decode_row_texts(row: Sequence[bytes | None], keys: Sequence[str]) -> list[str]:
    """Decode the texts of a row. `ValueError` if one is null or not UTF-8."""
    for key, text in zip(keys, row):
        if text is None:
            raise ValueError(f"the value of {key!r} is not text")
    try:
        return [text.decode().removeprefix(BYTE_ORDER_MARK) for text in row if text is not None]
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
