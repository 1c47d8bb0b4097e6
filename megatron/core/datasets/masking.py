"""Which tokens of a sample are hidden from the network, and what stands in their place.

Candidates are words: a token and the pieces that continue it. Runs of one to `max_ngram` words are chosen in random
order until enough tokens are covered; short runs are likelier (1/n, or a geometric distribution). The draws, and so the
samples, are Megatron's.

    [CLS] the quick ##ly run ##ning dog [SEP]        candidates 1 | 2 3 | 4 5 | 6
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.core.tokenizers.base import Tokenizer

_GEOMETRIC = 0.2  # SpanBERT's (Joshi et al., 2019)


@dataclass(frozen=True, slots=True)
class TokenMaskingOptions:
    """Which tokens are masked. probability: share of tokens. max_ngram: longest run, in words. geometric: run lengths
    are drawn from a geometric distribution, else with 1/n.
    """

    probability: float
    max_ngram: int = 3
    geometric: bool = False

    @property
    def cumulative_ngram_probs(self) -> list[float]:
        """Probability of a run of at most 1, 2, ... max_ngram words."""
        shares = 1.0 / np.arange(1, self.max_ngram + 1)
        total = (shares / shares.sum(keepdims=True)).cumsum()
        return (total / total[-1]).tolist()


@dataclass(slots=True)
class MaskedTokens:
    """ids: what the network sees. labels: position -> the token that stood there. spans: the runs, as they were chosen."""

    ids: list[int]
    labels: dict[int, int] = field(default_factory=dict)
    spans: list[list[int]] = field(default_factory=list)


def word_continuation_mask(tokenizer: Tokenizer) -> np.ndarray:
    """Return which ids continue a word: ## pieces, or for SentencePiece those without a leading space. bool [v]"""
    tokens = [tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size)]
    if any(token.startswith("\u2581") for token in tokens):
        special = {tokenizer.pad, *tokenizer.special_ids, *tokenizer.additional_special_tokens_ids}
        return np.array(
            [not token.startswith("\u2581") and number not in special for number, token in enumerate(tokens)]
        )
    return np.array([token.startswith("##") for token in tokens])


def group_positions_by_word(ids: Sequence[int], continues: np.ndarray, apart: Sequence[int]) -> list[list[int]]:
    """The positions of each word. apart: ids that belong to no word, such as [CLS]."""
    result: list[list[int]] = []
    for position, (token, joins) in enumerate(zip(ids, continues[np.asarray(ids, np.int64)].tolist())):
        if token in apart:
            continue
        if joins and result:
            result[-1].append(position)
        else:
            result.append([position])
    return result


def mask_tokens(
    ids: list[int],
    words: list[list[int]],
    options: TokenMaskingOptions,
    *,
    target_length: int,
    replace: Callable[[int], int],
    random: np.random.RandomState,
) -> MaskedTokens:
    """Mask about `options.probability` of the tokens, at most that share of `target_length` (so none if it is small).

    words: positions that are masked together. replace: returns the id that stands in the place of a masked one; may
    draw from `random`.
    """
    requested = min(options.probability * target_length, max(1, int(round(len(ids) * options.probability))))
    result = MaskedTokens(list(ids))
    order = np.arange(len(words))
    random.shuffle(order)
    for span in _choose_mask_spans(order, words, options, requested, random):
        result.spans.append(span)
        for position in span:
            result.labels[position] = ids[position]
            result.ids[position] = replace(ids[position])
    return result


def _choose_mask_spans(
    order: np.ndarray,
    words: list[list[int]],
    options: TokenMaskingOptions,
    target: float,
    random: np.random.RandomState,
) -> Iterator[list[int]]:
    """Yield disjoint runs of words, as positions, until `target` are chosen. order: words at which to try to start."""
    covered: set[int] = set()
    count, cumulative = 0, options.cumulative_ngram_probs
    for start in order.tolist():
        if count + 1 > target:  # not even one more
            return
        if options.geometric:
            size = min(int(random.geometric(_GEOMETRIC)), options.max_ngram)
        else:  # what random.choice with these probabilities draws, without its checks
            size = bisect_right(cumulative, random.random_sample()) + 1
        span = [position for word in words[start : start + size] for position in word]
        while count + len(span) > target and size > 1:
            size -= 1
            span = [position for word in words[start : start + size] for position in word]
        if count + len(span) > target or not covered.isdisjoint(span):
            continue
        covered.update(span)
        count += len(span)
        yield span
