"""From sources to finished pairs: one for each key, that go on where a killed run stopped.

spans -> chunks -> [ workers ] -> ids in the order of the input -> IndexedDatasetBuilder, one for each key
                                                               \\-> journal, every few seconds
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron.core.datasets.indexed import (
    BuilderResumePoint,
    DataError,
    IndexedDatasetBuilder,
    bin_path,
    idx_path,
    token_id_dtype,
)
from megatron.core.datasets.ingest import journal
from megatron.core.datasets.ingest.encode import EncodedChunk, EncodeOptions, RecordEncoder
from megatron.core.datasets.ingest.input_spans import InputFile, InputPosition, RecordChunk
from megatron.core.datasets.ingest.inputs import (
    input_file_fingerprint,
    read_input_chunks,
    record_location,
    spans_of_corpus_shard,
)
from megatron.core.datasets.ingest.journal import PARTIAL, DroppedRecords, PreprocessResumePoint, PreprocessTotals
from megatron.core.datasets.ingest.records import BLANK, PLACES
from megatron.core.datasets.ingest.sentences import nltk_version
from megatron.core.datasets.ingest.workers import encode_chunks
from megatron.core.datasets.sidecar import Fingerprint, sidecar_path
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields

Start = Callable[[PreprocessTotals, str], None]
Report = Callable[[PreprocessTotals], None]


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """What to preprocess, and where to write it. shard: (i, n), from 0. journal_seconds: between saves of the progress."""

    sources: Sequence[InputFile]
    job: EncodeOptions
    output_prefix: str
    shard: tuple[int, int] | None = None
    on_bad_line: Literal["fail", "skip"] = "fail"
    workers: int = 1
    journal_seconds: float = 10.0
    restart: bool = False

    @property
    def prefix(self) -> str:
        """The output's own prefix: that of a shard carries its number, so that names sort as the shards do."""
        if self.shard is None:
            return self.output_prefix
        width = max(5, len(str(self.shard[1])))
        return f"{self.output_prefix}-{self.shard[0]:0{width}d}-of-{self.shard[1]:0{width}d}"

    @property
    def sequence_unit(self) -> Literal["document", "sentence"]:
        """What a sequence of the output is: "document" or "sentence"."""
        return "document" if self.job.language is None else "sentence"

    @property
    def pair_prefixes(self) -> list[str]:
        """The prefix of each pair that is written."""
        return [f"{self.prefix}_{key}_{self.sequence_unit}" for key in self.job.keys]


def preprocess(order: PreprocessOptions, start: Start, report: Report) -> PreprocessTotals:
    """Write the pairs. Returns the totals.

    start: called once with what a run that was stopped had done already, and a sentence on the tokenizer's engine;
    report: called as more is done. Raises `DataError` for input that cannot be read and for bad lines that are not to be
    skipped; no file under a final name has changed then, and what the journal names stays for the next run.
    """
    prefix = order.prefix
    with journal.lock_output_prefix(prefix):
        encoder = RecordEncoder(order.job)
        mark, dtype = tokenizer_fingerprint_fields(encoder.tokenizer), token_id_dtype(encoder.tokenizer.vocab_size)
        engine = encoder.tokenizer.engine
        command = _command_fingerprint_fields(order, mark)
        if order.restart:
            journal.journal_path(prefix).unlink(missing_ok=True)
        state = journal.load_preprocess_progress(prefix, command)
        if state is not None and state.done:
            start(state.totals, engine)
            _finish_interrupted_pairs(order, mark, dtype, state.marks)
            totals = state.totals
        else:
            with _open_builders(order, mark, dtype, state.marks if state else None) as builders:
                writer = _PreprocessWriter(order, command, builders, state)
                start(writer.totals, engine)
                # Worker processes have encoders of their own; another here would only take memory.
                work = encoder if order.workers == 1 else order.job
                del encoder
                writer.write_all(report, work)
                for builder in builders:
                    builder.finish()
            totals = writer.totals
        journal.journal_path(prefix).unlink()
        return totals


def measure_preprocess_throughput(order: PreprocessOptions, max_documents: int) -> tuple[int, float]:
    """Return (documents, seconds) of reading and encoding about the first `max_documents`; nothing is written."""
    documents, began = 0, time.perf_counter()
    chunks = _limit_records(
        read_input_chunks(spans_of_corpus_shard(order.sources, order.shard), order.job.keys, InputPosition()),
        max_documents,
    )
    for _, encoded in encode_chunks(chunks, order.job, order.workers):
        documents += len(encoded.columns[0].sequences)
    return documents, time.perf_counter() - began


def _limit_records(chunks: Iterator[RecordChunk], max_records: int) -> Iterator[RecordChunk]:
    """Yield chunks until they hold `max_records` records."""
    records = 0
    for chunk in chunks:
        yield chunk
        records += chunk.end.records - chunk.start.records
        if records >= max_records:
            return


def _command_fingerprint_fields(order: PreprocessOptions, mark: Fingerprint) -> dict[str, Any]:
    """Return everything the output depends on, by option name, to recognise the same command."""
    job = order.job
    return {
        "tokenizer": mark,
        "json-keys": job.keys,
        "append-eod": job.append_eod,
        "split-sentences": job.language and [job.language, job.keep_newlines, f"NLTK {nltk_version()}"],
        "shard": order.shard,
        "kinds of input": [source.kind for source in order.sources],
        "input": [input_file_fingerprint(source) for source in order.sources],
    }


@contextmanager
def _open_builders(
    order: PreprocessOptions, mark: Fingerprint, dtype: np.dtype, marks: Sequence[BuilderResumePoint] | None
) -> Iterator[list[IndexedDatasetBuilder]]:
    """Open a builder for each key. If the block raises, keep what was written if there is a journal, else remove it."""
    builders: list[IndexedDatasetBuilder] = []
    try:
        for number, pair in enumerate(order.pair_prefixes):
            builders.append(_open_builder(order, pair, mark, dtype, marks[number] if marks else None))
        yield builders
    except BaseException:
        retained = journal.journal_path(order.prefix).exists()
        for builder in builders:
            builder.close_unfinished() if retained else builder.discard()
        raise


def _open_builder(
    order: PreprocessOptions, pair: str, mark: Fingerprint, dtype: np.dtype, marks: BuilderResumePoint | None
) -> IndexedDatasetBuilder:
    """Open the builder of one pair, going on from `marks` if given. `DataError` if its unfinished files are missing."""
    try:
        return IndexedDatasetBuilder(
            pair, dtype, tokenizer=mark, shard=order.shard, level=order.sequence_unit, partial=PARTIAL, marks=marks
        )
    except DataError as error:
        raise DataError(f"{error}; {journal.RESTART}" if marks else str(error)) from error


def _finish_interrupted_pairs(
    order: PreprocessOptions, mark: Fingerprint, dtype: np.dtype, marks: Sequence[BuilderResumePoint]
) -> None:
    """Finish the pairs of a run that died after its last document.

    A builder renames the ids first and the index last, and only when all files of the pair are complete. So a pair
    whose unfinished ids are gone wants nothing but names.
    """
    for pair, mark_of_pair in zip(order.pair_prefixes, marks):
        if os.path.exists(f"{pair}.bin.{PARTIAL}"):
            _open_builder(order, pair, mark, dtype, mark_of_pair).finish()
            continue
        for ending, path in (("json", sidecar_path(pair)), ("idx", idx_path(pair))):
            if os.path.exists(f"{pair}.{ending}.{PARTIAL}"):
                os.replace(f"{pair}.{ending}.{PARTIAL}", path)
        for ending in ("lengths", "modes", "documents"):
            Path(f"{pair}.{ending}.{PARTIAL}").unlink(missing_ok=True)
        if not (os.path.exists(bin_path(pair)) and os.path.exists(idx_path(pair))):
            raise DataError(f"{pair}: its unfinished files are gone; {journal.RESTART}")


class _PreprocessWriter:
    """Puts encoded chunks into the pairs, in order, and keeps the account and the journal."""

    def __init__(
        self,
        order: PreprocessOptions,
        command: Mapping[str, Any],
        builders: Sequence[IndexedDatasetBuilder],
        state: PreprocessResumePoint | None,
    ) -> None:
        self.totals = state.totals if state else PreprocessTotals(empty=[0] * len(order.job.keys))
        self._order, self._command, self._builders = order, command, builders
        self._place = state.place if state else InputPosition()
        self._spans = spans_of_corpus_shard(order.sources, order.shard)
        self._marked = time.monotonic()

    def write_all(self, report: Report, work: RecordEncoder | EncodeOptions) -> None:
        """Read, encode and write everything from the place on."""
        self._refuse_bad_lines()
        chunks = read_input_chunks(self._spans, self._order.job.keys, self._place)
        with closing(encode_chunks(chunks, work, self._order.workers)) as results:
            for chunk, encoded in results:
                self._write_chunk(chunk, encoded)
                if time.monotonic() - self._marked >= self._order.journal_seconds:
                    self._save_progress(done=False)
                report(self.totals)
        # A shard may be empty, when there are more shards than lines; it takes its place among the others.
        if self.totals.documents == 0 and self._order.shard is None:
            raise DataError(f"no document was found: {describe_dropped_lines(self.totals)}")
        self._save_progress(done=True)

    def _write_chunk(self, chunk: RecordChunk, encoded: EncodedChunk) -> None:
        """Add an encoded chunk to the pairs and update the totals. `DataError` for bad lines that may not be skipped."""
        totals, span = self.totals, self._spans[chunk.end.span]
        for reason, drop in encoded.drops.items():
            total = totals.dropped.setdefault(reason, DroppedRecords())
            total.count += drop.count
            for record in drop.records[: PLACES - len(total.places)]:
                total.places.append(record_location(span, record))
        self._refuse_bad_lines()
        for number, (builder, column) in enumerate(zip(self._builders, encoded.columns)):
            builder.add_documents(column.ids, column.lengths, column.sequences)
            totals.empty[number] += int((column.sequences == 0).sum())
        totals.documents = self._builders[0].num_documents
        totals.tokens = sum(builder.num_tokens for builder in self._builders)
        totals.num_bytes += chunk.num_bytes
        behind = sum(high - low for low, high in (other.disk for other in self._spans[: chunk.end.span]))
        totals.consumed = behind + min(max(chunk.consumed - span.disk[0], 0), span.disk[1] - span.disk[0])
        self._place = chunk.end

    def _refuse_bad_lines(self) -> None:
        """Raise `DataError` that names the dropped lines, unless bad lines may be skipped; blank ones may always."""
        bad = {reason: drop for reason, drop in self.totals.dropped.items() if reason != BLANK}
        if bad and self._order.on_bad_line == "fail":
            named = [f"{place}: {reason}" for reason, drop in bad.items() for place in drop.places]
            raise DataError(
                ("; " if len(named) == 1 else "\n").join(
                    [*named, "mend the line, or leave such lines out with --on-bad-line skip"]
                )
            )

    def _save_progress(self, done: bool) -> None:
        """Flush the pairs and save the journal. done: all input is written."""
        marks = [builder.sync_to_resume_point() for builder in self._builders]
        journal.save_preprocess_progress(
            self._order.prefix, self._command, PreprocessResumePoint(self._place, marks, self.totals, done)
        )
        self._marked = time.monotonic()


def describe_dropped_lines(totals: PreprocessTotals) -> str:
    """Return a text on how many lines were left out: for each reason the number and the first locations."""
    reasons = sorted(totals.dropped.items(), key=lambda item: -item[1].count)
    message = "; ".join(
        f"{drop.count} {reason} ({', '.join(drop.places)}{', ...' * (drop.count > len(drop.places))})"
        for reason, drop in reasons
    )
    return f"{sum(drop.count for drop in totals.dropped.values())} lines left out" + f": {message}" * bool(message)
