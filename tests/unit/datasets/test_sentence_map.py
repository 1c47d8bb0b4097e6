"""The map from sentences to samples, against a slow one written from its description, draw by draw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.sentence_map import (
    SentenceMap,
    SentenceMapOptions,
    build_sentence_map,
    fisher_yates_order,
    mt19937_64,
    usable_document_mask,
)
from tests.helpers.sentences import some_documents, write


def twister(bits: int, seed: int) -> Iterator[int]:
    """The Mersenne Twister of Matsumoto and Nishimura, word by word, as std::mt19937 and std::mt19937_64 are defined."""
    n, m, r, a, f, u, d, s, b, t, c, last = {
        32: (624, 397, 31, 0x9908B0DF, 1812433253, 11, 0xFFFFFFFF, 7, 0x9D2C5680, 15, 0xEFC60000, 18),
        64: (
            312,
            156,
            31,
            0xB5026F5AA96619E9,
            6364136223846793005,
            29,
            0x5555555555555555,
            17,
            0x71D67FFFEDA60000,
            37,
            0xFFF7EEE000000000,
            43,
        ),
    }[bits]
    full, low = 2**bits - 1, 2**r - 1
    x = [seed & full]
    for i in range(1, n):
        x.append((f * (x[-1] ^ (x[-1] >> (bits - 2))) + i) & full)
    while True:
        for i in range(n):
            y = (x[i] & ~low & full) | (x[(i + 1) % n] & low)
            x[i] = x[(i + m) % n] ^ (y >> 1) ^ (a if y & 1 else 0)
        for z in x:
            z ^= (z >> u) & d
            z ^= (z << s) & b
            z ^= (z << t) & c
            yield (z ^ (z >> last)) & full


def slow_map(lengths: list[list[int]], options: SentenceMapOptions, wanted: int | None) -> list[list[int]]:
    """Sentence by sentence. lengths: of the sentences of each document."""
    draws, rows = twister(32, options.seed), []

    def target() -> int:
        if not options.short_seq_prob:
            return options.max_length
        draw = next(draws)
        return (
            options.max_length if draw % int(1 / options.short_seq_prob + 0.5) else 2 + draw % (options.max_length - 1)
        )

    while True:
        first = 0
        for document in lengths:
            start, left = first, len(document)
            first += left
            if left < max(1, options.least_sentences) or (left > 1 and max(document) > 512):
                continue
            aim, tokens, taken = target(), 0, 0
            for number, length in enumerate(document):
                tokens, taken, left = tokens + length, taken + 1, left - 1
                if (tokens >= aim and left > 1 and taken >= options.least_sentences) or left == 0:
                    rows.append([start, first - len(document) + number + 1, aim])
                    start, tokens, taken, aim = rows[-1][1], 0, 0, target()
        if wanted is None or len(rows) >= wanted:
            break
    order = twister(64, options.seed + 1)
    for place in range(len(rows) - 1, 0, -1):
        other = next(order) % (place + 1)
        rows[place], rows[other] = rows[other], rows[place]
    return rows


def arrays(lengths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    flat = np.array([length for document in lengths for length in document], np.int32)
    return flat, np.cumsum([0, *map(len, lengths)])


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 30) | st.just(513), max_size=7), min_size=1, max_size=30),
    st.integers(4, 60),
    st.sampled_from([0.0, 0.1, 0.3, 0.4, 1.0]),
    st.integers(1, 2),
    st.integers(1, 2**31),
    st.none() | st.integers(1, 40),
)
def test_the_map_is_the_slow_one(
    lengths: list, longest: int, short: float, least: int, seed: int, wanted: int | None
) -> None:
    options = SentenceMapOptions(longest, short, least, seed)
    flat, bounds = arrays(lengths)
    if not usable_document_mask(flat, bounds, least).any():
        return
    result = build_sentence_map(flat, bounds, options, num_samples=wanted)
    assert result["sample_index"].tolist() == slow_map(lengths, options, wanted)


def test_the_map_of_a_part_of_the_documents_counts_sentences_of_the_whole() -> None:
    lengths = [[5, 6, 7], [3, 3], [9, 9, 9, 9], [4]]
    flat, bounds = arrays(lengths)
    result = build_sentence_map(flat, bounds[1:4], SentenceMapOptions(8, 0.0, 1, 3), num_samples=None)["sample_index"]
    assert sorted(result.tolist()) == [[3, 5, 8], [5, 6, 8], [6, 7, 8], [7, 9, 8]]


def test_the_generators_are_those_of_the_cpp_standard() -> None:
    # ISO C++ [rand.predef]: the 10000th draw of a generator with the default seed, 5489.
    assert mt19937_64(5489, 10000)[-1] == 9981545732273789042
    assert np.random.RandomState(5489).randint(0, 2**32, 10000, np.uint32)[-1] == 4123659995
    draws = twister(64, 11)
    assert mt19937_64(11, 1000).tolist() == [next(draws) for _ in range(1000)]


def test_a_shuffle_is_a_permutation_without_a_favourite() -> None:
    assert sorted(fisher_yates_order(1000, 5).tolist()) == list(range(1000))
    firsts = np.bincount([fisher_yates_order(5, seed)[0] for seed in range(2000)], minlength=5)
    assert abs(firsts - 400).max() < 3 * (2000 * 0.2 * 0.8) ** 0.5 + 1, firsts


def sentence_map(
    source: object,
    *,
    options: SentenceMapOptions = SentenceMapOptions(20, 0.1, 2, 1),
    documents: int = 40,
    num_samples: int | None = None,
    cache: IndexCacheFolder = IndexCacheFolder(None),
) -> SentenceMap:
    return SentenceMap(source, options, SplitRequest(range(documents), num_samples, "train", cache))


def test_a_cached_map_is_not_used_for_the_same_documents_in_another_order(tmp_path: Path) -> None:
    documents, cache = some_documents(40), IndexCacheFolder(tmp_path / "cache")
    sentence_map(write(tmp_path / "data", documents), cache=cache)
    source = write(tmp_path / "data", documents[::-1])
    assert sentence_map(source, cache=cache).rows.tolist() == sentence_map(source).rows.tolist()


def test_the_map_is_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = write(tmp_path / "data", some_documents(40)), IndexCacheFolder(tmp_path / "cache")
    first = sentence_map(source, cache=cache)
    other = sentence_map(source, cache=cache, options=SentenceMapOptions(20, 0.1, 2, 2))
    assert other.rows.tolist() != first.rows.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(
            "megatron.core.datasets.sentence_map.build_sentence_map", lambda *_, **__: pytest.fail("built again")
        )
        assert sentence_map(source, cache=cache).rows.tolist() == first.rows.tolist()
    assert first.samples_per_epoch == len(first) and sentence_map(
        source, num_samples=3 * len(first)
    ).samples_per_epoch < 1.5 * len(first)


def test_documents_that_make_no_sample_are_refused_with_the_mend(tmp_path: Path) -> None:
    source = write(tmp_path / "data", [[[7, 8]], [[9]], []])
    with pytest.raises(
        DataError,
        match=r"train split of .*data holds 3 of its 3 documents, and none .* 2 sentences .*--split-sentences",
    ):
        sentence_map(source, documents=3)


def test_spans_and_samples_of_a_document_agree(tmp_path: Path) -> None:
    source = write(tmp_path / "data", some_documents(40))
    result = sentence_map(source)
    for document in range(40):
        of_rows = [
            index
            for index in range(len(result))
            if any(span.document == document for span in result.token_spans(*result.row(index)[:2], 0, 10**6, 0))
        ]
        assert result.samples_with_document(document).tolist() == of_rows
    for index in range(len(result)):
        first, last, _ = result.row(index)
        tokens = result.token_ids(first, last)
        for span in result.token_spans(first, last, 2, 9, 0):
            assert (
                source.get(span.sequence, span.offset, span.length).tolist()
                == tokens[2:9][span.start : span.start + span.length]
            )
