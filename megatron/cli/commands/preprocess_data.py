"""Tokenize files of text: one document per line in, a .bin/.idx pair per key out.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

writes corpus_text_document.bin and corpus_text_document.idx, ready for --data-path corpus_text_document, and a .json
that says what they are. Memory does not grow with the input, and any number of workers gives the same bytes. The pair
appears when it is complete; a run that was killed goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from tqdm import tqdm

from megatron.cli.tool_parser import ToolArgumentParser, add_input_format_options
from megatron.core.config.flags.declare import (
    ConfigError,
    add_config_arguments,
    config_from_namespace,
    raise_config_error_if,
)
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.ingest.encode import EncodeOptions
from megatron.core.datasets.ingest.input_spans import STANDARD_INPUT
from megatron.core.datasets.ingest.inputs import find_input_files
from megatron.core.datasets.ingest.journal import PreprocessTotals
from megatron.core.datasets.ingest.pipeline import (
    PreprocessOptions,
    describe_dropped_lines,
    measure_preprocess_throughput,
    preprocess,
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__)
    _add_input_arguments(parser)
    _add_sentence_arguments(parser)
    add_config_arguments(parser, TokenizerConfig)
    _add_output_arguments(parser)
    _add_run_arguments(parser)
    args = parser.parse_args(arguments)
    numbers = [args.workers, args.partitions, args.log_interval, args.max_documents, *args.workers_to_check]
    if min(numbers) < 1:
        parser.error("--workers, --partitions, --log-interval, --max-documents and --workers-to-check are 1 or more")
    if args.journal_interval < 0:
        parser.error("--journal-interval is 0 or more")
    if len(set(args.json_keys)) != len(args.json_keys):
        parser.error("--json-keys names a key twice")
    return args


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files, folders or patterns with *, read one after the other; - is standard input. By their endings: "
        ".jsonl and .json JSON lines, .txt plain text, both also with .gz or .zst; .parquet; .arrow",
    )
    add_input_format_options(group)
    group.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys, or columns, whose text is tokenized, each into its own pair (default: text)",
    )
    group.add_argument(
        "--on-bad-line",
        choices=["fail", "skip"],
        default="fail",
        help="a line that is not a JSON object with text under each key stops the run, or is left out "
        "and counted (default: fail)",
    )
    group.add_argument(
        "--shard",
        type=_parse_shard,
        default=None,
        metavar="I/N",
        help="tokenize part I of N of the input only, counted from 0, into PREFIX-0000I-of-0000N; "
        "tools/merge_datasets.py joins the parts to the bytes of one run",
    )


def _add_sentence_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sentences")
    group.add_argument(
        "--split-sentences", action="store_true", help="make each sentence a sequence of its document, for BERT and T5"
    )
    group.add_argument(
        "--lang",
        default="english",
        metavar="LANGUAGE",
        help="language of the sentences; others than english need NLTK's tables (default: english)",
    )
    group.add_argument("--keep-newlines", action="store_true", help="keep the white space after a sentence with it")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Output")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="the files are PREFIX_KEY_document.bin, .idx and .json; with --split-sentences PREFIX_KEY_sentence",
    )
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document that is not empty with the tokenizer's end of document",
    )
    group.add_argument(
        "--restart", action="store_true", help="begin anew, where a run with this prefix was stopped before its end"
    )


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Run")
    group.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that tokenize; 1: this process, whose tokenizer may use several threads (default: 1)",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        metavar="N",
        help="documents between progress lines, where standard error is not a terminal (default: 1000)",
    )
    group.add_argument(
        "--journal-interval",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time between points from which a killed run can go on (default: 10)",
    )
    group.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="accepted, and not needed: the input is one stream, whose order is kept, for any number",
    )
    group.add_argument(
        "--dataset-impl",
        choices=["mmap"],
        help="accepted, and not needed, as in older releases of Megatron-LM: there is one form of files",
    )
    group.add_argument(
        "--chunk-size", type=int, metavar="N", help="accepted, and not needed: workers take documents as they come"
    )
    group.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="accepted, and not needed: the order of the input is always kept",
    )
    group.add_argument(
        "--find-optimal-num-workers",
        action="store_true",
        help="measure --workers-to-check on the first --max-documents, and write nothing",
    )
    group.add_argument(
        "--workers-to-check",
        type=int,
        nargs="+",
        metavar="N",
        default=_powers_of_two_up_to(os.cpu_count() or 1),
        help="numbers of workers to measure (default: powers of 2 up to the processors)",
    )
    group.add_argument(
        "--max-documents",
        type=int,
        default=100_000,
        metavar="N",
        help="about how many documents to measure with (default: 100000)",
    )


def _powers_of_two_up_to(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length())]


def _parse_shard(word: str) -> tuple[int, int]:
    """Parse "I/N" as (index, number of shards)."""
    index, slash, count = word.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{word!r} is not I/N with I from 0 to N - 1, as in 0/8 to 7/8")
    return int(index), int(count)


def preprocess_options_of(args: argparse.Namespace) -> PreprocessOptions:
    """Return the preprocessing options that the flags ask for; `ConfigError` if they do not fit together."""
    sources = find_input_files(args.input, args.input_format, args.text_documents)
    plain = [source.path for source in sources if source.kind in ("lines", "document")]
    raise_config_error_if(
        [
            *[
                f"--json-keys {' '.join(args.json_keys)}: {plain[0]} is plain text, with one text for one key"
                for _ in plain[:1]
                if len(args.json_keys) > 1
            ],
            *[
                "--keep-newlines says how sentences are split: give --split-sentences with it"
                for _ in range(args.keep_newlines and not args.split_sentences)
            ],
            *[
                f"--lang {args.lang} says how sentences are split: give --split-sentences with it"
                for _ in range(args.lang != "english" and not args.split_sentences)
            ],
            *[
                "--find-optimal-num-workers reads the input again and again: give a file instead of -"
                for _ in range(args.find_optimal_num_workers and STANDARD_INPUT in args.input)
            ],
        ]
    )
    job = EncodeOptions(
        config_from_namespace(TokenizerConfig, args),
        tuple(args.json_keys),
        args.append_eod,
        args.lang if args.split_sentences else None,
        args.keep_newlines,
    )
    return PreprocessOptions(
        sources,
        job,
        args.output_prefix,
        args.shard,
        args.on_bad_line,
        args.workers,
        args.journal_interval,
        args.restart,
    )


class PreprocessProgress:
    """Progress of preprocessing: a bar on a terminal, else a line every `interval` documents."""

    def __init__(self, size: int | None, interval: int) -> None:
        self._size, self._interval = size, interval
        self._bar = tqdm(total=size, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        self._began, self._shown = time.perf_counter(), 0
        self._before = PreprocessTotals()

    def start(self, totals: PreprocessTotals, engine: str) -> None:
        """Start counting. totals: what a run before has done. engine: a sentence on the tokenizer implementation."""
        print(f"tokenizer: {engine}", file=sys.stderr, flush=True)
        self._began, self._before = time.perf_counter(), replace(totals)
        self._shown = totals.documents // self._interval
        self._bar.update(totals.consumed)
        if totals.documents:
            print(
                f"going on after {totals.documents} documents of the run that was stopped", file=sys.stderr, flush=True
            )

    def update_display(self, totals: PreprocessTotals) -> None:
        """Update the bar, or print a line if one is due."""
        if not self._bar.disable:
            self._bar.set_postfix_str(self._rates_text(totals), refresh=False)
            self._bar.update(totals.consumed - self._bar.n)
        elif totals.documents // self._interval > self._shown:
            self._shown = totals.documents // self._interval
            print(
                f"Processed {totals.documents} documents ({self._rates_text(totals)}{self._time_left_text(totals)}).",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def megabytes_per_second(self, totals: PreprocessTotals) -> float:
        """Return the MB of text per second, in this run."""
        return (totals.num_bytes - self._before.num_bytes) / 1e6 / self.seconds

    def _rates_text(self, totals: PreprocessTotals) -> str:
        documents, tokens = totals.documents - self._before.documents, totals.tokens - self._before.tokens
        return (
            f"{documents / self.seconds:.1f} docs/s, {tokens / self.seconds:.0f} tokens/s, "
            f"{self.megabytes_per_second(totals):.2f} MB/s"
        )

    def _time_left_text(self, totals: PreprocessTotals) -> str:
        done = totals.consumed - self._before.consumed
        if self._size is None or done <= 0:
            return ""
        return f", {tqdm.format_interval(self.seconds * (self._size - totals.consumed) / done)} left"


def preprocess_and_summarize(args: argparse.Namespace) -> str:
    """Tokenize the input into .bin/.idx pairs. Return a summary."""
    order = preprocess_options_of(args)
    if args.partitions > 1 or args.keep_sequential_samples:
        print(
            "--partitions and --keep-sequential-samples: the input is one stream, and its order is kept without them",
            file=sys.stderr,
        )
    if args.dataset_impl or args.chunk_size:
        print(
            "--dataset-impl mmap and --chunk-size: there is one form of files, and workers take documents as they come",
            file=sys.stderr,
        )
    known = all(source.path != STANDARD_INPUT for source in order.sources)
    size = sum(source.size for source in order.sources) // (order.shard[1] if order.shard else 1) if known else None
    progress = PreprocessProgress(size, args.log_interval)
    try:
        totals = preprocess(order, progress.start, progress.update_display)
    finally:
        progress.close()
    empty = ", ".join(
        f"{count} without text" + f" under {key!r}" * (len(order.job.keys) > 1)
        for count, key in zip(totals.empty, order.job.keys)
        if count
    )
    return (
        f"{totals.documents} documents{f' ({empty})' * bool(empty)}, {totals.tokens} tokens, "
        f"{describe_dropped_lines(totals)}; {progress.seconds:.1f} s, {progress.megabytes_per_second(totals):.2f} MB/s -> "
        + ", ".join(f"{pair}.bin and .idx" for pair in order.pair_prefixes)
    )


def benchmark_worker_counts(args: argparse.Namespace) -> str:
    """Measure the throughput with each number of workers, printing each. Return a line with the best."""
    order = preprocess_options_of(args)
    rates = {}
    for workers in args.workers_to_check:
        documents, seconds = measure_preprocess_throughput(replace(order, workers=workers), args.max_documents)
        rates[workers] = documents / seconds
        print(f"{workers} workers: {documents} documents in {seconds:.1f} s, {rates[workers]:.1f} docs/s", flush=True)
    return f"the best of these: --workers {max(rates, key=lambda workers: rates[workers])}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Preprocess, or benchmark workers, and print the summary."""
    args = parse_arguments(arguments)
    try:
        print(benchmark_worker_counts(args) if args.find_optimal_num_workers else preprocess_and_summarize(args))
    except (ConfigError, DataError, OSError) as error:
        sys.exit(f"preprocess_data.py: {error}")
    except KeyboardInterrupt:
        sys.exit("preprocess_data.py: interrupted; the same command goes on from the last point in its journal")
