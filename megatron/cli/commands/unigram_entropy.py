"""Compute the entropy of a token file's unigrams, in nats per token.

    megatron unigram-entropy corpus_text_document

It is the loss of a model that knows only how common each token is: one that has learned anything from context has a lower loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from megatron.cli.tool_parser import ToolArgumentParser
from megatron.core.datasets.indexed import DataError, IndexedDataset
from megatron.training.launch.launch_info import install_interrupt_excepthook


def count_tokens_by_id(prefix: str) -> np.ndarray:
    """Return how often each id occurs in PREFIX.bin, [largest id + 1], reading one sequence at a time."""
    dataset = IndexedDataset(prefix)
    counts = np.zeros(0, dtype=np.int64)
    for sequence in range(len(dataset)):
        here = np.bincount(dataset[sequence])
        longer, shorter = (here, counts) if len(here) > len(counts) else (counts, here)
        longer[: len(shorter)] += shorter
        counts = longer
    return counts


def entropy_of_counts(counts: np.ndarray) -> float:
    """Return -sum p ln p of the frequencies p that counts [v] give, in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the unigram entropy."""
    install_interrupt_excepthook()
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    parser.add_argument("prefix", metavar="PREFIX", help="the token file is PREFIX.bin with PREFIX.idx")
    parser.add_argument("--quiet", action="store_true", help="print the number only")
    args = parser.parse_args(arguments)
    try:
        counts = count_tokens_by_id(args.prefix)
    except (DataError, OSError) as error:
        sys.exit(f"unigram_entropy.py: {error}")
    if counts.sum() == 0:
        sys.exit(f"unigram_entropy.py: {args.prefix}.bin holds no tokens")
    if args.quiet:
        print(f"{entropy_of_counts(counts):.4f}")
    else:
        print(
            f"{counts.sum()} tokens, {np.count_nonzero(counts)} different: unigram entropy {entropy_of_counts(counts):.4f} nats per token"
        )
