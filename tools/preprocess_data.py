"""JSON lines to token files: one document per line in, a .bin/.idx pair per key out.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

writes corpus_text_document.bin and corpus_text_document.idx, ready for --data-path corpus_text_document. The input is
read in chunks of about a megabyte, so memory does not grow with it; chunks are tokenized by the workers and written in
the order of the input, so any number of workers gives the same bytes. The pair appears when it is complete.
"""

from __future__ import annotations

import argparse
import functools
import glob
import gzip
import importlib.util
import json
import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

if importlib.util.find_spec("megatron") is None:  # run from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.flags import ConfigError, add_arguments, from_namespace
from megatron.core.datasets.indexed import DataError, IndexedDatasetBuilder, best_dtype
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer

CHUNK_BYTES = 2**20
BLANK = "blank"


@dataclass(frozen=True, slots=True)
class Job:
    """What is done with every line."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    in_batches: bool  # let the tokenizer use all processors; off in worker processes, which share them


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines of one file; the first has this number, from 1."""

    path: str
    first_line: int
    lines: list[bytes]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """A chunk's documents: for each key all ids end to end and the length of each document; and the lines left out."""

    ids: list[np.ndarray]
    lengths: list[list[int]]
    dropped: list[tuple[int, str]]  # line number, reason


@dataclass(slots=True)
class Totals:
    """What was read and left out so far."""

    documents: int = 0
    num_bytes: int = 0
    dropped: Counter = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    group = parser.add_argument_group("Input")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE",
                       help="JSON lines, plain or .gz; several files or patterns with * are read one after the other")
    group.add_argument("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY",
                       help="keys whose text is tokenized, each into its own pair (default: text)")
    group.add_argument("--on-bad-line", choices=["fail", "skip"], default="fail",
                       help="a line that is not a JSON object with text under each key stops the run, or is left out "
                            "and counted (default: fail)")
    add_arguments(parser, TokenizerConfig)
    group = parser.add_argument_group("Output")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX",
                       help="the files are PREFIX_KEY_document.bin and .idx")
    group.add_argument("--append-eod", action="store_true", help="end every document that is not empty with the "
                                                                 "tokenizer's end of document")
    group = parser.add_argument_group("Run")
    group.add_argument("--workers", type=int, default=1, metavar="N",
                       help="processes that tokenize; 1: this process, whose tokenizer may use several threads "
                            "(default: 1)")
    group.add_argument("--log-interval", type=int, default=1000, metavar="N",
                       help="documents between progress lines, where standard error is not a terminal (default: 1000)")
    args = parser.parse_args(arguments)
    if args.workers < 1 or args.log_interval < 1:
        parser.error("--workers and --log-interval are 1 or more")
    if len(set(args.json_keys)) != len(args.json_keys):
        parser.error("--json-keys names a key twice")
    return args


def input_files(words: Iterable[str]) -> list[str]:
    """The files that names and patterns stand for, in order."""
    files: list[str] = []
    for word in words:
        found = [word] if os.path.exists(word) else sorted(glob.glob(word, recursive=True))
        if not found:
            raise DataError(f"--input {word}: there is no such file")
        files += found
    return files


def read_chunks(paths: Iterable[str]) -> Iterator[Chunk]:
    """All lines of all files, in order."""
    for path in paths:
        try:
            with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
                line = 1
                while lines := file.readlines(CHUNK_BYTES):
                    yield Chunk(path, line, lines, sum(map(len, lines)))
                    line += len(lines)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is damaged: {error}") from error


@functools.cache
def tokenizer_of(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, built once in each process."""
    return build_tokenizer(config)


def read_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The text under each key. Raises `ValueError` whose message is the reason for which a line is bad."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    for key in keys:
        if key not in content:
            raise ValueError(f"no key {key!r}")
        if not isinstance(content[key], str):
            raise ValueError(f"the value of {key!r} is not text")
    return [content[key] for key in keys]


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], in_batches: bool) -> list[list[int] | None]:
    """The ids of each text; None for text that the tokenizer cannot read."""
    if in_batches:
        try:
            return list(tokenizer.encode_batch(texts))
        except ValueError:
            pass  # one of them cannot be read: find out which
    ids: list[list[int] | None] = []
    for text in texts:
        try:
            ids.append(tokenizer.tokenize(text))
        except ValueError:
            ids.append(None)
    return ids


def encode(chunk: Chunk, job: Job) -> Tokens:
    """Tokenize a chunk. Runs in a worker."""
    tokenizer = tokenizer_of(job.tokenizer)
    numbers: list[int] = []
    texts: list[list[str]] = []
    dropped: list[tuple[int, str]] = []
    for number, line in enumerate(chunk.lines, chunk.first_line):
        try:
            if line.strip():
                texts.append(read_line(line, job.keys))
                numbers.append(number)
            else:
                dropped.append((number, BLANK))
        except ValueError as error:
            dropped.append((number, str(error)))
    rows = list(zip(*(tokenize(tokenizer, column, job.in_batches) for column in zip(*texts))))
    kept = [row for row in rows if None not in row]
    dropped += [(number, "text that the tokenizer cannot read") for number, row in zip(numbers, rows) if None in row]
    ids, lengths = [], []
    for column in zip(*kept) if kept else [()] * len(job.keys):
        flat: list[int] = []
        counts = []
        for document in column:
            flat += document
            if document and job.append_eod:
                flat.append(tokenizer.eod)
            counts.append(len(document) + bool(document and job.append_eod))
        ids.append(np.array(flat, best_dtype(tokenizer.vocab_size)))
        lengths.append(counts)
    return Tokens(ids, lengths, sorted(dropped))


def encode_all(chunks: Iterable[Chunk], job: Job, workers: int) -> Iterator[tuple[Chunk, Tokens]]:
    """Tokenize chunks with so many processes, in the order given, with only a few of them in memory."""
    if workers == 1:
        yield from ((chunk, encode(chunk, job)) for chunk in chunks)
        return
    waiting: deque = deque()
    with ProcessPoolExecutor(workers) as pool:
        try:
            for chunk in chunks:
                waiting.append((chunk, pool.submit(encode, chunk, job)))
                if len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise DataError("a worker process was killed, perhaps for want of memory; try fewer --workers") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def write(builder: IndexedDatasetBuilder, ids: np.ndarray, lengths: Sequence[int]) -> None:
    """Append documents; an empty one has no sequence."""
    start = 0
    for length in lengths:
        if length:
            builder.add_sequence(ids[start : start + length])
        builder.end_document()
        start += length


def account(totals: Totals, chunk: Chunk, tokens: Tokens, on_bad_line: str) -> None:
    """Add a chunk to the totals; a bad line stops the run if that was asked for."""
    for number, reason in tokens.dropped:
        place = f"{chunk.path}:{number}"
        if reason != BLANK and on_bad_line == "fail":
            raise DataError(f"{place}: {reason}; mend the line, or leave such lines out with --on-bad-line skip")
        totals.dropped[reason] += 1
        totals.first_dropped.setdefault(reason, place)
    totals.documents += len(tokens.lengths[0])
    totals.num_bytes += chunk.num_bytes


def summary(totals: Totals, num_tokens: int, seconds: float) -> str:
    """One line that says what became of the input."""
    reasons = "; ".join(f"{count} {reason}, first {totals.first_dropped[reason]}"
                        for reason, count in totals.dropped.most_common())
    dropped = f"{totals.dropped.total()} lines left out" + (f" ({reasons})" if reasons else "")
    return (f"{totals.documents} documents, {num_tokens} tokens, {dropped}; {seconds:.1f} s, "
            f"{totals.num_bytes / 1e6 / seconds:.2f} MB/s")


def preprocess(args: argparse.Namespace) -> str:
    """Tokenize the input into pairs of files. Returns the summary."""
    job = Job(from_namespace(TokenizerConfig, args), tuple(args.json_keys), args.append_eod, args.workers == 1)
    tokenizer = tokenizer_of(job.tokenizer)
    paths = input_files(args.input)
    plain = not any(path.endswith(".gz") for path in paths)
    size = sum(os.path.getsize(path) for path in paths) if plain else None
    totals, shown, started = Totals(), 0, time.perf_counter()
    with ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(f"{args.output_prefix}_{key}_document",
                                                              best_dtype(tokenizer.vocab_size))) for key in job.keys]
        terminal = sys.stderr.isatty()
        bar = stack.enter_context(tqdm(total=size, unit="B", unit_scale=True, disable=not terminal))
        for chunk, tokens in encode_all(read_chunks(paths), job, args.workers):
            account(totals, chunk, tokens, args.on_bad_line)
            for builder, ids, lengths in zip(builders, tokens.ids, tokens.lengths):
                write(builder, ids, lengths)
            bar.update(chunk.num_bytes)
            if not terminal and totals.documents // args.log_interval > shown:
                shown = totals.documents // args.log_interval
                seconds = time.perf_counter() - started
                print(f"Processed {totals.documents} documents ({totals.documents / seconds:.1f} docs/s, "
                      f"{totals.num_bytes / 1e6 / seconds:.2f} MB/s).", file=sys.stderr, flush=True)
        num_tokens = sum(builder.num_tokens for builder in builders)
        line = summary(totals, num_tokens, time.perf_counter() - started)
        if totals.documents == 0:
            raise DataError(f"no document was found: {line}")
    return f"{line} -> " + ", ".join(f"{builder.prefix}.bin and .idx" for builder in builders)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the tool."""
    try:
        print(preprocess(parse_arguments(arguments)))
    except (ConfigError, DataError, OSError) as error:
        sys.exit(f"preprocess_data.py: {error}")


if __name__ == "__main__":
    main()
