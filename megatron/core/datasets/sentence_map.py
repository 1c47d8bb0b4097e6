"""From sentences to samples: which run of sentences each sample is made of. The same map as Megatron's, row by row.

A document is a run of sentences. Samples take sentences from its begin on until they are as long as their target, and
never leave a single sentence behind; what is left at the end is a sample too:

    sentences of 7 8 6 9 5 tokens, target 12        rows (0, 2, 12) (2, 5, 12)

The target is the longest length, or now and then a random shorter one (Devlin et al., 2018). Documents with a very
long sentence, or with too few sentences, are left out. Documents are gone through again until there are samples
enough, each time with new targets; at last the rows are shuffled. All draws are those of the C++ generators mt19937
(targets) and mt19937_64 (shuffle), so that a seed gives the map that it gives there.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.dataset_protocols import SplitRequest, TokenSpan
from megatron.core.datasets.gpt import TokenSource
from megatron.core.datasets.index_map import Arrays, hash_arrays, load_or_build_arrays
from megatron.core.datasets.indexed import DataError

LONGEST_SENTENCE = 512  # tokens; a document of several sentences with a longer one is left out
_DRAWS_AT_ONCE = 2**16
_DOCUMENTS_AT_ONCE = 2**16


@dataclass(frozen=True, slots=True)
class SentenceMapOptions:
    """How sentences are grouped to samples. max_length: tokens of a sample. short_seq_prob: share of samples with a
    random shorter target. least_sentences: of a sample, and so of a document. seed: of targets and shuffle.
    """

    max_length: int
    short_seq_prob: float
    least_sentences: int
    seed: int


class SentenceMap:
    """The samples of some documents of a source, as rows (first sentence, one past the last, target length).

    request: its part is a range of documents. A dataset of sentences derives from this class, and makes samples of rows.
    """

    def __init__(self, source: TokenSource, options: SentenceMapOptions, request: SplitRequest) -> None:
        documents = request.part
        bounds = source.document_indices[documents.start : documents.stop + 1]
        usable = usable_document_mask(source.sequence_lengths, bounds, options.least_sentences)
        if not usable.any():
            raise DataError(
                f"the {request.name} split of {source.prefix} holds {len(documents)} of its "
                f"{len(source.document_indices) - 1} documents, and none of them has "
                f"{options.least_sentences} sentences or more, all of at most {LONGEST_SENTENCE} tokens; give that "
                "split a larger share in --split, or write the data with --split-sentences"
            )
        name, tokens = type(self).__name__, _document_lengths(source.sequence_lengths, bounds)[usable].sum()
        self.description: dict[str, Any] = {
            "class": name,
            "prefix": source.prefix,
            "documents": [documents.start, documents.stop, len(source.document_indices) - 1],
            "sentences": len(source.sequence_lengths),
            "tokens": int(tokens),
            "lengths": hash_arrays(source.sequence_lengths[bounds[0] : bounds[-1]], bounds),
            "num_samples": request.num_samples,
            "split": request.name,
            "seed": options.seed,
            "max_length": options.max_length,
            "short_seq_prob": options.short_seq_prob,
            "least_sentences": options.least_sentences,
        }
        shapes = {
            "sample_index": ((None, 3), sentence_map_dtype(len(source.sequence_lengths))),
            "epochs": ((1,), np.int64),
        }
        arrays = load_or_build_arrays(
            request.cache,
            f"{name}-{request.name}",
            self.description,
            shapes,
            lambda: build_sentence_map(source.sequence_lengths, bounds, options, num_samples=request.num_samples),
        )
        self.rows, self.source, self.prefix = arrays["sample_index"], source, source.prefix
        self.tokens_per_epoch = int(tokens)
        self.samples_per_epoch = len(self.rows) / int(arrays["epochs"][0])

    def __len__(self) -> int:
        """The number of samples; at least as many as were asked for."""
        return len(self.rows)

    def row(self, index: int) -> tuple[int, int, int]:
        """Return (first sentence, one past the last, target length) of a sample. `IndexError` out of range."""
        if not 0 <= index < len(self.rows):
            raise IndexError(f"sample {index} of {len(self.rows)}")
        first, last, target = self.rows[index].tolist()
        return first, last, target

    def token_ids(self, first: int, last: int) -> list[int]:
        """Return the ids of sentences [first, last) end to end. `DataError` if the index does not fit the data."""
        try:
            return [token for sentence in range(first, last) for token in self.source.get(sentence).tolist()]
        except (IndexError, ValueError) as error:
            raise DataError(
                f"the index of {self.prefix} does not fit its data ({error}); if the files were replaced while "
                "the run was going on, start again; else remove the index cache"
            ) from error

    def token_spans(self, first: int, last: int, low: int, high: int, start: int) -> list[TokenSpan]:
        """Return the sentences of tokens [low, high) of sentences [first, last), placed from position `start` on."""
        result, at = [], 0
        for sentence in range(first, last):
            length = int(self.source.sequence_lengths[sentence])
            begin, end = max(low, at), min(high, at + length)
            if begin < end:
                document = int(np.searchsorted(self.source.document_indices, sentence, side="right")) - 1
                result.append(TokenSpan(self.prefix, document, sentence, begin - at, end - begin, start + begin - low))
            at += length
        return result

    def samples_with_document(self, document: int) -> np.ndarray:
        """The samples made of sentences of this document, in rising order. int64 [samples]"""
        first, last = self.source.document_indices[document : document + 2].tolist()
        return np.flatnonzero((self.rows[:, 0] >= first) & (self.rows[:, 0] < last))


def usable_document_mask(lengths: np.ndarray, bounds: np.ndarray, least_sentences: int) -> np.ndarray:
    """Return which documents give samples: enough sentences, and none too long beside others. bool [documents]

    lengths: tokens of every sentence. bounds: the first sentence of each document and, last, one past the last.
    """
    count = np.diff(bounds)
    long = np.flatnonzero(lengths[bounds[0] : bounds[-1]] > LONGEST_SENTENCE) + bounds[0]
    has_long = np.diff(np.searchsorted(long, bounds)) > 0
    return (count >= max(1, least_sentences)) & ~(has_long & (count > 1))


def sentence_map_dtype(num_sentences: int) -> type:
    """Return the dtype of a sentence map's rows: uint32, or uint64 if there are too many sentences."""
    return np.uint32 if num_sentences <= np.iinfo(np.uint32).max else np.uint64


def build_sentence_map(
    lengths: np.ndarray, bounds: np.ndarray, options: SentenceMapOptions, *, num_samples: int | None
) -> Arrays:
    """Build the shuffled rows of at least `num_samples` samples, in whole epochs; one epoch if None.

    lengths: tokens of every sentence. bounds: the first sentence of each document and, last, one past the last.
    Returns sample_index [samples, 3] and epochs [1].
    """
    lengths = np.array(lengths)  # a file's are not aligned, which makes every look-up slow
    usable = np.flatnonzero(usable_document_mask(lengths, bounds, options.least_sentences))
    firsts, lasts = bounds[usable], bounds[usable + 1]
    targets = _random_sample_lengths(options)
    begins, ends, requested = array("q"), array("q"), array("q")
    epochs = 0
    while epochs == 0 or (num_samples is not None and len(begins) < num_samples):
        for start in range(0, len(firsts), _DOCUMENTS_AT_ONCE):
            part = slice(start, start + _DOCUMENTS_AT_ONCE)
            _append_sentence_map_rows(
                lengths, firsts[part], lasts[part], options.least_sentences, targets, (begins, ends, requested)
            )
        epochs += 1
    order = fisher_yates_order(len(begins), options.seed + 1)
    rows = np.stack([np.frombuffer(column, np.int64)[order] for column in (begins, ends, requested)], axis=1)
    return {"sample_index": rows.astype(sentence_map_dtype(len(lengths))), "epochs": np.array([epochs], np.int64)}


def _append_sentence_map_rows(
    lengths: np.ndarray,
    firsts: np.ndarray,
    lasts: np.ndarray,
    least: int,
    targets: Iterator[int],
    rows: tuple[array, array, array],
) -> None:
    """Append the rows (begin, end, target) of some documents: each has the fewest sentences that reach its target."""
    low, high = int(firsts[0]), int(lasts[-1])
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[low:high], dtype=np.int64)]).tolist()
    begins, ends, requested = rows
    for first, last in zip((firsts - low).tolist(), (lasts - low).tolist()):
        target, end = next(targets), first
        while end < last:
            begin = end
            end = max(bisect_left(before, before[begin] + target, begin + 1, last), begin + least)
            if end >= last - 1:  # a sentence alone is not left behind
                end = last
            begins.append(begin + low)
            ends.append(end + low)
            requested.append(target)
            target = next(targets)


def _random_sample_lengths(options: SentenceMapOptions) -> Iterator[int]:
    """Yield target lengths endlessly: `max_length`, or by `short_seq_prob` a shorter one, drawn by mt19937."""
    longest = options.max_length
    if options.short_seq_prob == 0:
        while True:
            yield longest
    ratio = math.floor(1.0 / options.short_seq_prob + 0.5)  # rounded as C does, halves up
    generator = np.random.RandomState(options.seed % 2**32)
    while True:
        draws = generator.randint(0, 2**32, _DRAWS_AT_ONCE, np.uint32).astype(np.int64)
        yield from np.where(draws % ratio == 0, 2 + draws % (longest - 1), longest).tolist()


def fisher_yates_order(count: int, seed: int) -> np.ndarray:
    """0 ... count - 1 shuffled from the last place down (Fisher and Yates), by draws of mt19937_64. int64 [count]"""
    order = array("q", range(count))
    places = np.arange(count - 1, 0, -1, dtype=np.uint64)
    others = (mt19937_64(seed, len(places)) % (places + np.uint64(1))).tolist()
    for place, other in zip(range(count - 1, 0, -1), others):
        order[place], order[other] = order[other], order[place]
    return np.frombuffer(order, np.int64)


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """The first draws of the 64-bit Mersenne Twister (Nishimura, 2000), as C++ seeds it. uint64 [count]"""
    size, middle, mask = 312, 156, 2**64 - 1
    words = [seed & mask]
    for number in range(1, size):
        words.append((6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + number) & mask)
    state = np.array(words, np.uint64)
    draws = np.empty(-(-count // size) * size, np.uint64)
    for start in range(0, len(draws), size):
        for low, high in ((0, middle), (middle, size - 1), (size - 1, size)):  # each needs words of the one before it
            here, following = state[low:high], np.take(state, range(low + 1, high + 1), mode="wrap")
            mixed = (here & np.uint64(0xFFFFFFFF80000000)) | (following & np.uint64(0x7FFFFFFF))
            twisted = (mixed >> np.uint64(1)) ^ ((mixed & np.uint64(1)) * np.uint64(0xB5026F5AA96619E9))
            state[low:high] = np.take(state, range(low + middle, high + middle), mode="wrap") ^ twisted
        x = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
        x = x ^ ((x << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000))
        x = x ^ ((x << np.uint64(37)) & np.uint64(0xFFF7EEE000000000))
        draws[start : start + size] = x ^ (x >> np.uint64(43))
    return draws[:count]


def _document_lengths(lengths: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Tokens of each document. int64 [documents]"""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[bounds[0] : bounds[-1]], dtype=np.int64)])
    return np.diff(ends[bounds - bounds[0]])
