"""Chunks to ids: what is done with every record, in this process or in a worker."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.ingest.input_spans import RecordChunk
from megatron.core.datasets.ingest.records import UNREADABLE, Drops, ParsedDocuments, parse_records
from megatron.core.datasets.ingest.sentences import Split, sentence_splitter
from megatron.core.datasets.special_tokens import refuse_added_special_tokens
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer

MOST_GROWTH = 64 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """What is done with every record. language: sentences are split by its rules, and become sequences; None: not."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    language: str | None = None
    keep_newlines: bool = False


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """The documents of one key.

    ids: [t], all end to end. lengths: int64 [s], tokens of each sequence. sequences: int64 [d], how many of them each
    document has.
    """

    ids: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's documents, for each key, and what was left out."""

    columns: list[EncodedColumn]
    drops: Drops


class RecordEncoder:
    """Tokenizer and sentence splitter of one process.

    `ConfigError` if the tokenizer cannot be built, or adds ids to every text when sentences are split.
    """

    def __init__(self, job: EncodeOptions) -> None:
        self.job = job
        self._tokenizer = build_tokenizer(job.tokenizer)
        if job.language:
            refuse_added_special_tokens(self._tokenizer)
        self._memory: int | None = None
        self._split: Split | None = sentence_splitter(job.language, job.keep_newlines) if job.language else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Keep no reference to it: it is rebuilt to release memory."""
        return self._tokenizer

    def parse_chunk(self, chunk: RecordChunk) -> ParsedDocuments:
        """Parse a chunk's records; with --split-sentences, split their texts."""
        return parse_records(chunk, self.job.keys, self._split)

    def encode_documents(self, records: ParsedDocuments) -> EncodedChunk:
        """Encode the documents of a chunk. One that the tokenizer cannot encode is dropped under all keys."""
        try:
            columns = [self._encode_column(column) for column in records.texts]
        except ValueError:
            bad = [
                place
                for place in range(len(records.numbers))
                if not all(self._can_tokenize_texts(column[place]) for column in records.texts)
            ]
            if not bad:
                raise
            records = records.drop_documents(bad, UNREADABLE)
            columns = [self._encode_column(column) for column in records.texts]
        self._rebuild_tokenizer_if_grown()
        return EncodedChunk(columns, records.drops)

    def _rebuild_tokenizer_if_grown(self) -> None:
        """Rebuild the tokenizer if the process has grown by MOST_GROWTH bytes: tokenizer libraries cache every word."""
        memory = _resident_bytes()
        if self._memory is None:
            self._memory = memory
        elif memory > self._memory + MOST_GROWTH:
            del self._tokenizer
            self._tokenizer, self._memory = build_tokenizer(self.job.tokenizer), None

    def _can_tokenize_texts(self, texts: Sequence[str]) -> bool:
        try:
            self._tokenizer.encode_texts_flat(texts)
        except ValueError:
            return False
        return True

    def _encode_column(self, documents: Sequence[Sequence[str]]) -> EncodedColumn:
        """The ids of one key's documents, given as their sentences, or as one text each."""
        ids, lengths = self._tokenizer.encode_texts_flat([text for document in documents for text in document])
        counts = np.fromiter(map(len, documents), np.int64, len(documents))
        owners = np.repeat(np.arange(len(documents)), counts)
        full = lengths > 0
        lengths = lengths[full].astype(np.int64)
        sequences = np.bincount(owners[full], minlength=len(documents)).astype(np.int64)
        if self.job.append_eod:
            ids = _append_eod(ids, lengths, sequences, self._tokenizer.eod)
        return EncodedColumn(ids, lengths, sequences)


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _append_eod(ids: np.ndarray, lengths: np.ndarray, sequences: np.ndarray, eod: int) -> np.ndarray:
    """Return the ids with `eod` after each document that has a sequence; `lengths` is updated in place."""
    last = np.cumsum(sequences)[sequences > 0] - 1
    lengths[last] += 1
    ends = np.cumsum(lengths)[last] - 1
    with_ends = np.empty(len(ids) + len(ends), ids.dtype)
    is_text = np.ones(len(with_ends), bool)
    is_text[ends] = False
    with_ends[ends] = eod
    with_ends[is_text] = ids
    return with_ends
