"""Show what a step of a run saw or will see: documents, boundaries, loss, text; or when a document is seen.

    megatron explain-data <the flags of the run> --world-size 8 --step 1200
    megatron explain-data <the flags of the run> --world-size 8 --document PREFIX:17

Nothing is trained and no model is built. The answer is what the run reads, microbatch by microbatch and data-parallel
rank by rank; a run with --log-samples writes the same hashes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper

from megatron.cli.arguments import parse_args_unchecked
from megatron.cli.preflight import resolve_and_examine
from megatron.cli.tool_parser import ToolArgumentParser, exit_on
from megatron.core.config.flags.declare import ConfigError, config_from_namespace, raise_config_error_if
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.datasets.data_splits import SPLITS
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.kinds import KINDS
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.parallel.grid import axis_rank_groups
from megatron.core.tokenizers.build import build_tokenizer
from megatron.plan.command import ENTRIES
from megatron.training.data.inspect_samples import (
    DocumentOccurrence,
    MicrobatchDescription,
    ResumeCounters,
    RunDataInspector,
    SampleDescription,
)
from megatron.training.data.sample_order import stages_read_data

SHOWN_TEXT = 72
_READS_AS = {"hybrid": "gpt", "mamba": "gpt"}  # scripts that read the samples of another


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line: (the tool's own options, flags of the run)."""
    parser = ToolArgumentParser(description=__doc__)
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument(
        "--step", type=int, metavar="N", help="the iteration to show; of validation: after which it is done"
    )
    question.add_argument("--document", metavar="PREFIX:NUMBER", help="show when this document is seen")
    parser.add_argument(
        "--set", choices=SPLITS, default="train", help="training, validation or test data (default: train)"
    )
    parser.add_argument("--world-size", type=int, default=1, metavar="RANKS", help="ranks of the run (default: 1)")
    parser.add_argument("--rank", type=int, metavar="R", help="only what this rank of the run reads (default: all)")
    parser.add_argument(
        "--resumed-at",
        type=int,
        nargs="+",
        metavar="COUNT",
        help="iteration, consumed samples and consumed validation samples of the checkpoint from which the run "
        "took up these flags; needed only where a batch size changed",
    )
    parser.add_argument(
        "--entry",
        choices=(*KINDS, *_READS_AS),
        default="gpt",
        help="script that trains: pretrain_ENTRY.py (default: gpt)",
    )
    parser.add_argument("--full-text", action="store_true", help="do not shorten texts")
    parser.add_argument("--json", action="store_true", help="a JSON object a line, with whole texts")
    return parser.parse_known_args(argv)


def data_explanation_lines(options: argparse.Namespace, flags: Sequence[str]) -> Iterator[str]:
    """Yield the lines to print: what a step reads, or when a document is read."""
    explanation, ranks = _make_data_inspector(options, flags)
    if options.document is not None:
        prefix, _, number = options.document.rpartition(":")
        if not prefix or not number.isdecimal():
            raise ConfigError(f"--document {options.document} is not PREFIX:NUMBER")
        uses = explanation.occurrences(options.set, prefix, int(number))
        uses = [use for use in uses if ranks is None or use.data_rank in ranks]
        yield from map(_entry_as_json_line, uses) if options.json else _document_occurrence_lines(uses, options)
    else:
        for microbatch in explanation.microbatches_of_step(options.set, options.step, ranks):
            yield from (
                (_entry_as_json_line(microbatch),) if options.json else _microbatch_content_lines(microbatch, options)
            )


def _make_data_inspector(
    options: argparse.Namespace, flags: Sequence[str]
) -> tuple[RunDataInspector, list[int] | None]:
    """Return (inspector of the run's data, data-parallel ranks to print or None for all)."""
    defaults = ENTRIES[f"pretrain_{options.entry}.py"].defaults(())
    args = parse_args_unchecked(flags, defaults=defaults)
    config, problems = resolve_and_examine(config_from_namespace(RequestedRun, args), options.world_size)
    raise_config_error_if([*args.problems, *(message for _, message in problems)])
    ranks = None if options.rank is None else [_dp_rank_of_rank_flag(options, config)]
    if options.resumed_at is not None and len(options.resumed_at) > 3:
        raise ConfigError(f"--resumed-at takes up to 3 numbers, not {len(options.resumed_at)}")
    start = ResumeCounters(*(options.resumed_at or ()))
    explanation = RunDataInspector(
        config,
        build_tokenizer(config.tokenizer),
        world_size=options.world_size,
        entry=_READS_AS.get(options.entry, options.entry),
        start=start,
    )
    return explanation, ranks


def _dp_rank_of_rank_flag(options: argparse.Namespace, config: RunConfig) -> int:
    """Return the index of --rank on the data axis; `ConfigError` if there is no such rank, or it reads nothing."""
    groups = axis_rank_groups(config.parallel, options.world_size)
    if not 0 <= options.rank < options.world_size:
        raise ConfigError(f"--rank {options.rank}: the run has ranks 0 to {options.world_size - 1} (see --world-size)")
    place = next(line.index(options.rank) for line in groups["pp"] if options.rank in line)
    if not stages_read_data(config, [stage for stage in stage_specs_of_run(config) if stage.rank == place]):
        raise ConfigError(
            f"--rank {options.rank} is pipeline rank {place} and reads no text: only the first and the last do"
        )
    return next(line.index(options.rank) for line in groups["dp"] if options.rank in line)


def _entry_as_json_line(entry: MicrobatchDescription | DocumentOccurrence) -> str:
    return json.dumps(dataclasses.asdict(entry))


def _document_occurrence_lines(uses: Sequence[DocumentOccurrence], options: argparse.Namespace) -> Iterator[str]:
    yield f"{options.document} is seen {len(uses)} times in the {options.set} data of this run"
    for one in uses:
        yield f"  step {one.step}, microbatch {one.microbatch}, data-parallel rank {one.data_rank}: sample {one.sample}"


def _microbatch_content_lines(microbatch: MicrobatchDescription, options: argparse.Namespace) -> Iterator[str]:
    yield (
        f"{microbatch.split} step {microbatch.step}, microbatch {microbatch.microbatch}, data-parallel rank {microbatch.data_rank}: "
        f"samples {' '.join('-' if s.sample is None else str(s.sample) for s in microbatch.samples)}, hash {microbatch.hash}"
    )
    for sample in microbatch.samples:
        yield from _sample_lines(sample, options)


def _sample_lines(sample: SampleDescription, options: argparse.Namespace) -> Iterator[str]:
    if sample.sample is None:
        yield "  (the data is over; a sample without loss fills the batch)"
        return
    yield f"  sample {sample.sample} = sample {sample.dataset_sample} of source {sample.dataset}"
    for piece in sample.pieces:
        images = f", {' '.join(piece.images)}" if piece.images else ""
        text = f": {_quote_text(piece.text, options)}" if piece.text else ""
        yield (
            f"    [{piece.start}, {piece.start + piece.length}) {piece.prefix} document {piece.document}, sequence "
            f"{piece.sequence}, tokens [{piece.offset}, {piece.offset + piece.length}){images}{text}"
        )
    for key, text in sample.texts.items():
        yield f"    {key} {_quote_text(text, options)}"
    total = sum(last - first for first, last in sample.loss)
    spans = " ".join(f"[{first}, {last})" for first, last in sample.loss)
    yield f"    loss on {total} positions: {spans}"
    for what, places in (("positions", sample.position_restarts), ("attention", sample.attention_restarts)):
        if places:
            yield f"    {what} restart at {' '.join(map(str, places))}"


def _quote_text(text: str, options: argparse.Namespace) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    whole = options.full_text or len(quoted) <= SHOWN_TEXT
    return quoted if whole else f"{quoted[:SHOWN_TEXT]}... ({len(text)} characters)"


def main(argv: Sequence[str] | None = None) -> None:
    """Print what a step reads, or when a document is read."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other tools do when `head` has seen enough
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # texts may hold what the terminal cannot show
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    options, flags = parse_arguments(sys.argv[1:] if argv is None else argv)
    with exit_on(ConfigError, DataError, CheckpointError, code=2):
        for line in data_explanation_lines(options, flags):
            sys.stdout.write(line + "\n")
