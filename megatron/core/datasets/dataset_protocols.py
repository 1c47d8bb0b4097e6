"""What every data set offers, whatever its kind: numbered samples, and of each where it came from.

A `DatasetKind` says how a prefix becomes samples; `blend.py` cuts and mixes any kind alike. `kinds.py` has a row a kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron.core.datasets.index_map import IndexCacheFolder

Sample = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens of one sequence, and where it stands in a sample.

    Tokens [offset, offset + length) of sequence `sequence`, which belongs to document `document` of `prefix`, stand
    from position `start` of the sample on. The last token of a window may be a label only. images: those that they show.
    text: what they say, where it was asked for.
    """

    prefix: str
    document: int
    sequence: int
    offset: int
    length: int
    start: int
    text: str = ""
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """What a split takes from a source: samples of the units `part`, at least `num_samples`, or one epoch if None.

    name: train, valid or test. cache: where the index of the samples is kept.
    """

    part: range
    num_samples: int | None
    name: str
    cache: IndexCacheFolder = IndexCacheFolder(None)


class SplitDataset(Protocol):
    """The samples of one split of one prefix, in shuffled order.

    description: what the samples depend on, for caches. tokens_per_epoch: tokens that the split holds.
    samples_per_epoch: in how many samples they are gone through once.
    """

    @property
    def prefix(self) -> str:
        """The common path of the files."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What the samples depend on, by name, as the cache key."""

    @property
    def tokens_per_epoch(self) -> int:
        """How many tokens the split holds."""

    @property
    def samples_per_epoch(self) -> float:
        """How many samples one pass over the split gives; may be fractional."""

    def __len__(self) -> int:
        """The number of samples; at least as many as were asked for."""

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample."""

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Where the tokens of the index-th sample came from, in the order of the sample."""

    def samples_with_document(self, document: int) -> np.ndarray:
        """The samples that hold a token of this document of the prefix, in rising order. int64 [samples]"""


class DatasetKind(Protocol):
    """How a prefix becomes samples.

    name: what the samples' class is called, also in the names of caches.
    """

    @property
    def name(self) -> str:
        """The class name of the samples' dataset."""

    def open(self, prefix: str) -> Any:
        """Open the source behind a prefix, which the other methods take."""

    def num_split_units(self, source: Any) -> int:
        """Return the number of units that --split divides: documents, unless a kind says otherwise."""
        return len(source.document_indices) - 1

    def split_has_any_sample(self, source: Any, part: range) -> bool:
        """Return whether units `part` of the source are enough for one sample: unless a kind asks for more, a sequence."""
        return bool(source.document_indices[part.stop] > source.document_indices[part.start])

    def build_one_split(self, source: Any, request: SplitRequest) -> SplitDataset:
        """Return the dataset of a split of the source."""
