"""Which tokens are hidden: against a slow version that draws as the description says, and by statistics."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.datasets.masking import (
    MaskedTokens,
    TokenMaskingOptions,
    group_positions_by_word,
    mask_tokens,
    word_continuation_mask,
)
from tests.helpers.sentences import CLS, MASK, SEP, LetterTokenizer

TOKENIZER = LetterTokenizer()
CONTINUES = word_continuation_mask(TOKENIZER)


def slow(
    ids: list[int], words: list[list[int]], options: TokenMaskingOptions, target: int, random: np.random.RandomState
) -> tuple[dict, list]:
    """Positions and their labels, and the spans in the order of choice; replaced tokens are not looked at."""
    requested = min(options.probability * target, max(1, int(round(len(ids) * options.probability))))
    sizes = np.arange(1, options.max_ngram + 1)
    shares = 1.0 / sizes
    shares /= shares.sum(keepdims=True)
    grams = [[words[start : start + size] for size in sizes] for start in range(len(words))]
    random.shuffle(grams)
    labels, spans = {}, []
    for gram in grams:
        if len(labels) >= requested:
            break
        size = min(random.geometric(0.2), options.max_ngram) if options.geometric else random.choice(sizes, p=shares)
        while size > 1 and len(labels) + len(sum(gram[size - 1], [])) > requested:
            size -= 1
        span = sum(gram[size - 1], [])
        if len(labels) + len(span) > requested or any(position in labels for position in span):
            continue
        labels.update((position, ids[position]) for position in span)
        spans.append(span)
    return labels, spans


def text(length: int, random: np.random.RandomState) -> list[int]:
    return [CLS, *random.randint(6, 100, length).tolist(), SEP]


def hidden(
    options: TokenMaskingOptions, length: int = 60, seed: int = 0, target: int = 60
) -> tuple[list[int], MaskedTokens]:
    ids = text(length, np.random.RandomState(seed))
    return ids, mask_tokens(
        ids,
        group_positions_by_word(ids, CONTINUES, (CLS, SEP)),
        options,
        target_length=target,
        replace=lambda token: MASK,
        random=np.random.RandomState(seed + 1),
    )


@pytest.mark.parametrize(
    "options",
    [
        TokenMaskingOptions(0.15),
        TokenMaskingOptions(0.3, 1),
        TokenMaskingOptions(0.15, 10, geometric=True),
        TokenMaskingOptions(0.2, 4),
    ],
)
def test_the_choice_is_the_slow_one_draw_by_draw(options: TokenMaskingOptions) -> None:
    for seed in range(60):
        ids, result = hidden(options, length=3 + seed, seed=seed)
        words = group_positions_by_word(ids, CONTINUES, (CLS, SEP))
        labels, spans = slow(ids, words, options, 60, np.random.RandomState(seed + 1))
        assert (result.labels, result.spans) == (labels, spans)


def test_words_are_hidden_whole_and_special_tokens_never() -> None:
    for seed in range(200):
        ids, result = hidden(TokenMaskingOptions(0.3), seed=seed)
        for position, token in enumerate(ids[:-1]):
            if CONTINUES[ids[position + 1]] and token not in (CLS, SEP):
                assert (position in result.labels) == (position + 1 in result.labels), "a word was torn apart"
        assert not {0, len(ids) - 1} & set(result.labels)
        assert all(result.ids[p] == (MASK if p in result.labels else token) for p, token in enumerate(ids))


def test_as_many_tokens_are_hidden_as_was_said() -> None:
    for length, target, requested in ((60, 60, 9), (60, 30, 4), (4, 60, 1), (200, 190, 28)):
        counts = [
            len(hidden(TokenMaskingOptions(0.15, 1), length=length, seed=seed, target=target)[1].labels)
            for seed in range(100)
        ]
        assert max(counts) == requested and sum(count == requested for count in counts) > 90, (
            length,
            target,
            set(counts),
        )


def test_every_place_is_as_likely_as_any_other() -> None:
    ids = list(range(9, 9 + 4 * 20, 4))  # no id continues a word
    words, runs = group_positions_by_word(ids, CONTINUES, ()), 4000
    random = np.random.RandomState(3)
    count = np.zeros(len(ids))
    for _ in range(runs):
        count[
            list(
                mask_tokens(
                    ids, words, TokenMaskingOptions(0.15, 1), target_length=20, replace=int, random=random
                ).labels
            )
        ] += 1
    share = 3 / 20
    assert np.abs(count / runs - share).max() < 4 * (share * (1 - share) / runs) ** 0.5  # 20 places at once: 4 sigma


def test_lengths_of_runs_have_the_stated_probabilities() -> None:
    ids = [9] * 400
    words, random, options = (
        group_positions_by_word(ids, CONTINUES, ()),
        np.random.RandomState(1),
        TokenMaskingOptions(0.5, 3),
    )
    firsts = [
        len(mask_tokens(ids, words, options, target_length=400, replace=int, random=random).spans[0])
        for _ in range(3000)
    ]
    shares = np.array([6, 3, 2]) / 11
    for size, share in zip((1, 2, 3), shares):
        # A run that begins at the last place or the last but one is cut short.
        assert abs(firsts.count(size) / 3000 - share) < 3 * (share * (1 - share) / 3000) ** 0.5 + 2 / 400


def test_words_of_a_sentencepiece_vocabulary_begin_after_a_space() -> None:
    tokenizer = LetterTokenizer(12, extra=2)
    names = {6: "\u2581a", 7: "b", 8: "\u2581c", 9: "d"}
    tokenizer.id_to_token = lambda token: names.get(token, f"<{token}>")
    assert np.flatnonzero(word_continuation_mask(tokenizer)).tolist() == [7, 9]
    assert group_positions_by_word([6, 7, 9, 8, 10, 7], word_continuation_mask(tokenizer), (10,)) == [[0, 1, 2], [3, 5]]
