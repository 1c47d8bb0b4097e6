"""Pairs as samples: both answers of a pair stand in one sample as two documents, and several short pairs share it.

    ids           <prompt> chosen . | <prompt> rejected . | <prompt> ...     of the first pair and the second
    document_ids  0 0 0 0 0         | 1 1 1 1 1           | 2 ...            no attention from one to another
    preference    0 0 0 0 0         | 1 1 1 1 1           | 2 ...            2 x pair in the sample, + 1 for the rejected answer

A pair that does not fit into a sample is left out and counted.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.datasets.index_map import IndexCache
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.packing import plan_packs
from megatron.core.datasets.samples import Sample, Span
from megatron.core.tokenizers.base import Tokenizer
from megatron.preference.rows import Pair, PairReader, read_pairs

MOST_NAMED = 5  # lines that are left out, by number and reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PairSource:
    """The pairs of a JSONL file. prefix: its path."""

    prefix: str
    pairs: tuple[Pair, ...]


class PreferenceDataset:
    """The pairs [start, stop) of a source, as shuffled samples of `length` tokens.

    num_samples: at least so many, in whole epochs; None: one epoch. A sample holds tokens, labels, position_ids, document_ids,
    preference (int64 [length]) and loss_mask (float32 [length]).
    """

    def __init__(
        self, source: PairSource, part: range, *, length: int, num_samples: int | None, seed: int, split: str
    ) -> None:
        self.prefix, self._length = source.prefix, length
        pairs = source.pairs[part.start : part.stop]
        sizes = np.array([len(one.chosen) + len(one.rejected) - 2 for one in pairs], np.int64)
        fitting = np.flatnonzero(sizes <= length)
        if len(fitting) < len(pairs):
            logger.warning(
                "%s (%s): %d of %d pairs are left out: both answers with their prompts do not fit into --seq-length %d",
                self.prefix, split, len(pairs) - len(fitting), len(pairs), length,
            )  # fmt: skip
        if len(fitting) == 0:
            raise DataError(
                f"the {split} split of {self.prefix} holds {len(pairs)} pairs, none of which fits into --seq-length {length}; give a larger one"
            )
        self._pairs, self._numbers = [pairs[place] for place in fitting], part.start + fitting
        order, last = plan_packs(sizes[fitting], length, seed)
        self._planned = order
        self._packs = np.concatenate([[0], np.flatnonzero(last) + 1])
        count = len(self._packs) - 1
        epochs = max(1, -(-(num_samples or 0) // count))
        self._order = np.concatenate(
            [np.random.default_rng((seed, epoch, count)).permutation(count) for epoch in range(epochs)]
        )
        self.tokens_per_epoch, self.samples_per_epoch = int(sizes[fitting].sum()), float(count)
        self.description = {
            "class": type(self).__name__,
            "prefix": self.prefix,
            "pairs": [part.start, part.stop],
            "sizes": hashlib.sha256(sizes.tobytes()).hexdigest(),
            "seed": seed,
            "split": split,
            "sequence_length": length,
        }

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample in shuffled order, [length] each."""
        size = self._length
        rows = {
            name: np.zeros(size, np.int64)
            for name in ("tokens", "labels", "position_ids", "document_ids", "preference")
        }
        mask, at = np.zeros(size, np.float32), 0
        for document, ids in enumerate(self._pair_documents(index)):
            end = at + len(ids) - 1
            rows["tokens"][at:end], rows["labels"][at:end] = ids[:-1], ids[1:]
            rows["position_ids"][at:end] = np.arange(len(ids) - 1)
            rows["document_ids"][at:end] = rows["preference"][at:end] = document
            mask[at:end] = ids[1:] >= 0
            at = end
        rows["position_ids"][at:] = np.arange(size - at)
        rows["document_ids"][at:] = rows["document_ids"][at - 1] + 1
        for name in ("tokens", "labels"):  # an id of a prompt is kept as ~id
            rows[name] = rows[name] ^ (rows[name] >> 63)
        return {**rows, "loss_mask": mask}

    def _pair_documents(self, index: int) -> list[np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        pack = self._order[index]
        chosen = self._planned[self._packs[pack] : self._packs[pack + 1]]
        return [ids for place in chosen for ids in (self._pairs[place].chosen, self._pairs[place].rejected)]

    def sources(self, index: int) -> list[Span]:
        """Which pairs stand in the index-th sample: a span for each answer."""
        spans, at = [], 0
        pack = self._order[index]
        for place in self._planned[self._packs[pack] : self._packs[pack + 1]].tolist():
            for ids in (self._pairs[place].chosen, self._pairs[place].rejected):
                number = int(self._numbers[place])
                spans.append(Span(self.prefix, number, number, 0, len(ids) - 1, at))
                at += len(ids) - 1
        return spans

    def holding(self, document: int) -> np.ndarray:
        """The samples with this pair, in rising order, int64 [samples]."""
        places = np.flatnonzero(self._numbers[self._planned] == document)
        return np.flatnonzero(np.isin(self._order, np.searchsorted(self._packs, places, side="right") - 1))


@dataclass(frozen=True, slots=True)
class PreferenceKind:
    """Pairs of answers; --split counts pairs."""

    tokenizer: Tokenizer
    template: str
    sequence_length: int
    seed: int
    name: str = PreferenceDataset.__name__

    def open(self, prefix: str) -> PairSource:
        """The pairs of a JSONL file. Lines that cannot be compared are named and left out; `DataError` if none is left."""
        try:
            with Path(prefix).open("rb") as lines:
                pairs, dropped = read_pairs(lines, PairReader(self.tokenizer, self.template))
        except OSError as error:
            raise DataError(
                f"{prefix} cannot be read: {error.strerror}; give JSONL files by their whole names"
            ) from error
        if dropped:
            named = "; ".join(f"line {number}: {reason}" for number, reason in dropped[:MOST_NAMED])
            more = f"; and {len(dropped) - MOST_NAMED} more" if len(dropped) > MOST_NAMED else ""
            logger.warning("%s: %d lines are left out: %s%s", prefix, len(dropped), named, more)
        if not pairs:
            raise DataError(f"{prefix} holds no pair of answers")
        return PairSource(prefix, tuple(pairs))

    def count(self, source: PairSource) -> int:
        """The number of pairs."""
        return len(source.pairs)

    def fits(self, source: PairSource, part: range) -> bool:
        """Whether there is a pair."""
        return len(part) > 0

    def build(
        self, source: PairSource, part: range, *, num_samples: int | None, split: str, cache: IndexCache
    ) -> PreferenceDataset:
        """Samples of these pairs."""
        return PreferenceDataset(
            source, part, length=self.sequence_length, num_samples=num_samples, seed=self.seed, split=split
        )
