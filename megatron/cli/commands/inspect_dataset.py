"""Show what is in .bin/.idx pairs: counts, lengths, the first documents as text, and whether the files are whole.

    megatron inspect-dataset corpus_text_document --seq-length 1024 --plot lengths.png
    megatron inspect-dataset corpus_text_document --verify
    megatron inspect-dataset corpus_text_document --documents 2 --tokenizer-type GPT2BPETokenizer \\
        --vocab-file vocab.json --merge-file merges.txt

--verify reads every byte, lists all that is wrong, and leaves with exit code 1 when there is something. A prefix may
name objects, such as s3://bucket/corpus_text_document.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.config.flags.declare import ConfigError, add_config_arguments, config_from_namespace
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets import sidecar
from megatron.core.datasets.bin_idx_check import bin_idx_pair_problems, document_lengths, write_sidecar_of_pair
from megatron.core.datasets.indexed import IndexedDataset, bin_path, idx_path
from megatron.core.datasets.sidecar import describe_tokenizer
from megatron.core.datasets.storage import DataError, atomic_file, file_or_object_size
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import build_tokenizer
from megatron.training.launch.launch_info import install_interrupt_excepthook

BAR = 50
SHOWN = 2000


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="the files are PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="also say how many documents have more than N tokens"
    )
    parser.add_argument(
        "--documents",
        type=int,
        default=0,
        metavar="N",
        help="show the text of the first N documents; needs the tokenizer",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the lengths of the documents")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read everything and list what is wrong; ids are compared with the vocabulary of the tokenizer "
        "given, else of the sidecar",
    )
    parser.add_argument(
        "--write-sidecar",
        action="store_true",
        help="write PREFIX.json, with counts and checksums, for a pair of another program that has none",
    )
    parser.add_argument(
        "--multimodal", action="store_true", help="the index has a mode for each sequence: text or image"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line and a prefix instead of text")
    add_config_arguments(parser, TokenizerConfig)
    args = parser.parse_args(arguments)
    if args.documents and args.tokenizer_type is None:
        parser.error("--documents shows text: give --tokenizer-type and the tokenizer's files")
    if args.documents < 0 or (args.seq_length is not None and args.seq_length < 1):
        parser.error("--documents is 0 or more, --seq-length 1 or more")
    return args


def length_statistics(lengths: np.ndarray, limit: int | None) -> dict[str, float]:
    """Return minimum, median, 95th percentile, maximum and mean of lengths [documents], and the share above `limit`."""
    if len(lengths) == 0:
        return {}
    middle, high = np.percentile(lengths, (50, 95)).tolist()
    words = {
        "min": int(lengths.min()),
        "median": middle,
        "p95": high,
        "max": int(lengths.max()),
        "mean": round(float(lengths.mean()), 2),
    }
    if limit is not None:
        words["share_above_seq_length"] = float((lengths > limit).mean())
    return words


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (least, most, documents) of each doubling of lengths [documents]: 0, 1, 2-3, 4-7 ..., up to the longest."""
    if len(lengths) == 0:
        return []
    # frexp is exact where log2 may round up to the next power.
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    return [(1 << row - 1 if row else 0, (1 << row) - 1, count) for row, count in enumerate(counts.tolist())]


def inspect_indexed_dataset(prefix: str, args: argparse.Namespace) -> tuple[dict[str, Any], np.ndarray]:
    """Return (all facts about a .bin/.idx pair but its text, tokens of each document [documents])."""
    data = IndexedDataset(prefix, multimodal=args.multimodal)
    lengths = document_lengths(data)
    if len(lengths) and lengths.min() < 0:
        raise DataError(f"{idx_path(prefix)} is damaged; see --verify")
    facts = sidecar.read_sidecar(prefix)
    summary: dict[str, Any] = {
        "prefix": prefix,
        "documents": data.num_documents,
        "empty_documents": int((np.diff(data.document_indices) == 0).sum()),
        "sequences": len(data),
        "tokens": int(lengths.sum()),
        "dtype": str(data.dtype),
        "bin_bytes": file_or_object_size(bin_path(prefix)),
        "idx_bytes": file_or_object_size(idx_path(prefix)),
        "tokens_per_document": length_statistics(lengths, args.seq_length),
        "histogram": histogram(lengths),
        "sidecar": facts is not None,
        "tokenizer": dict(facts.tokenizer) if facts and facts.tokenizer else None,
    }
    if len(data) != data.num_documents - summary["empty_documents"]:
        summary["tokens_per_sequence"] = length_statistics(data.sequence_lengths, args.seq_length)
    return summary, lengths


def first_documents(prefix: str, count: int, tokenizer: Tokenizer) -> list[str]:
    """Return the text of the first `count` documents, each truncated. `DataError` for ids that the tokenizer lacks."""
    data = IndexedDataset(prefix)
    texts = []
    for first, last in zip(data.document_indices[:count].tolist(), data.document_indices[1 : count + 1].tolist()):
        ids = [
            token
            for sequence in range(first, last)
            for token in data.get(sequence, 0, min(SHOWN, data.sequence_lengths.item(sequence))).tolist()
        ]
        outside = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
        if outside:
            raise DataError(
                f"{prefix} holds the id {outside[0]}, but the vocabulary has {tokenizer.vocab_size} ids; give the "
                "tokenizer that the data was written with"
            )
        text = tokenizer.detokenize(ids)
        texts.append(text if len(text) <= SHOWN else text[:SHOWN] + " ...")
    return texts


def indexed_dataset_facts_text(summary: dict[str, Any], seq_length: int | None) -> str:
    """Return the facts about a pair as text, with a bar for each doubling of the length."""
    lines = [
        summary["prefix"],
        f"  {summary['documents']:,} documents ({summary['empty_documents']:,} empty), {summary['sequences']:,} sequences, "
        f"{summary['tokens']:,} tokens of {summary['dtype']}",
        f"  .bin {summary['bin_bytes']:,} bytes, .idx {summary['idx_bytes']:,} bytes",
        f"  tokenizer: {describe_tokenizer(summary['tokenizer']) if summary['tokenizer'] else 'not recorded'}",
    ]
    for thing in ("document", "sequence"):
        words = summary.get(f"tokens_per_{thing}")
        if words:
            above = words.get("share_above_seq_length")
            lines.append(
                f"  tokens a {thing}: min {words['min']:,}, median {words['median']:,.0f}, 95 % up to {words['p95']:,.0f}, "
                f"max {words['max']:,}, mean {words['mean']:,.1f}"
                + (f"; {above:.2%} above {seq_length}" if above is not None else "")
            )
    most = max((count for *_, count in summary["histogram"]), default=0)
    for low, high, count in summary["histogram"]:
        bar = "#" * -(-count * BAR // most) if most else ""
        lines.append(f"  {low:>12,} .. {high:<12,} {count:>12,} {bar}".rstrip())
    return "\n".join(lines)


def draw_length_histograms(lengths_of: dict[str, np.ndarray], seq_length: int | None, path: str) -> None:
    """Draw a histogram of documents' lengths into a PNG, a curve for each pair. lengths_of: prefix -> [documents]."""
    if importlib.util.find_spec("matplotlib") is None:
        raise DataError("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.figure import Figure  # optional, and half a second that other uses need not wait for

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    longest = max((int(lengths.max()) for lengths in lengths_of.values() if len(lengths)), default=1)
    edges = np.unique(np.logspace(0, np.log10(longest + 1), 60).astype(np.int64))
    for prefix, lengths in lengths_of.items():
        axes.hist(lengths[lengths > 0], bins=[*edges.tolist(), longest + 1], histtype="step", label=Path(prefix).name)
    if seq_length is not None:
        axes.axvline(seq_length, color="gray", linestyle="--", label=f"{seq_length} tokens")
    axes.set(xscale="log", xlabel="tokens a document", ylabel="documents")
    axes.legend()
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def verify_pair(prefix: str, args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[str]:
    """Return all that is wrong with a pair, showing a progress bar on a terminal."""
    with _bytes_read_bar(prefix) as bar:
        return bin_idx_pair_problems(
            prefix,
            vocab_size=tokenizer.vocab_size if tokenizer else None,
            multimodal=args.multimodal,
            advance=bar.update,
        )


def _bytes_read_bar(prefix: str) -> tqdm:
    """Return a progress bar, shown on a terminal, of the bytes of a pair's .bin file."""
    try:
        size = file_or_object_size(bin_path(prefix))
    except DataError:
        size = 0
    return tqdm(total=size, unit="B", unit_scale=True, desc=prefix, disable=not sys.stderr.isatty())


def inspect_all_pairs(args: argparse.Namespace) -> bool:
    """Print the facts about every pair, and draw the plot. Return whether all pairs that were verified are good."""
    tokenizer = build_tokenizer(config_from_namespace(TokenizerConfig, args)) if args.tokenizer_type else None
    lengths_of: dict[str, np.ndarray] = {}
    good = True
    for prefix in args.prefixes:
        problems = verify_pair(prefix, args, tokenizer) if args.verify else []
        facts: dict[str, Any] = {"prefix": prefix}
        if args.write_sidecar and not problems:
            with _bytes_read_bar(prefix) as bar:
                write_sidecar_of_pair(prefix, multimodal=args.multimodal, advance=bar.update)
        if not problems:
            if tokenizer:
                sidecar.check_dataset_tokenizer(prefix, tokenizer_fingerprint_fields(tokenizer))
            facts, lengths_of[prefix] = inspect_indexed_dataset(prefix, args)
            if args.documents and tokenizer:
                facts["first_documents"] = first_documents(prefix, args.documents, tokenizer)
        if args.verify:
            facts["problems"] = problems
        good = good and not problems
        print(json.dumps(facts) if args.json else _pair_report_text(facts, args.seq_length))
    if args.plot and lengths_of:
        draw_length_histograms(lengths_of, args.seq_length, args.plot)
    return good


def _pair_report_text(facts: dict[str, Any], seq_length: int | None) -> str:
    """Return the facts of one pair, its first documents and its problems, as text."""
    problems = facts.get("problems")
    lines = [facts["prefix"] if problems else indexed_dataset_facts_text(facts, seq_length)]
    lines += [f"--- document {number}\n{text}" for number, text in enumerate(facts.get("first_documents", ()))]
    if problems is not None:
        lines.append(f"  verified: {len(problems)} problems" if problems else "  verified: everything fits")
        lines += [f"  - {problem}" for problem in problems]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Inspect the pairs; exit with 1 if a verified one is damaged."""
    install_interrupt_excepthook()
    try:
        good = inspect_all_pairs(parse_arguments(arguments))
    except (ConfigError, DataError, OSError) as error:
        sys.exit(f"inspect-dataset: {error}")
    if not good:
        sys.exit(1)
