"""Pairs of texts with hidden words, for a masked language model with a head over the pair (Devlin et al., 2018).

    sentences of a row   s0 s1 s2 s3          cut at a random place, here after s0; half of the pairs swap
    text                 [CLS] s1 s2 [MASK] s3 [SEP] s0 [SEP] [PAD] ...
    types                0     0  0  0      0  0     1  1     0
    labels, loss_mask    only where a token is hidden
    is_random            1: the pair is in the wrong order (or, for next-sentence, does not belong together)

Sample k is drawn from a generator of its own, RandomState(seed + k), so it depends on nothing but the settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron.core.datasets.dataset_protocols import Sample, SplitRequest, TokenSpan
from megatron.core.datasets.gpt import TokenSource, check_ids_in_vocab
from megatron.core.datasets.masking import TokenMaskingOptions, group_positions_by_word, mask_tokens
from megatron.core.datasets.sentence_map import SentenceMap, SentenceMapOptions

PairTask = Literal["sentence-order", "next-sentence"]


@dataclass(frozen=True, slots=True)
class BERTSampleOptions:
    """How sentences become one BERT sample of `sequence_length` tokens, [CLS] and [SEP] included.

    pairs: the task of the binary head; None: one text and no such label. continues: bool [v], whether an id continues a
    word (its length is the vocabulary size). cls, sep, mask, pad: token ids.
    """

    sequence_length: int
    short_seq_prob: float
    masking: TokenMaskingOptions
    pairs: PairTask | None
    continues: np.ndarray
    cls: int
    sep: int
    mask: int
    pad: int


class BERTDataset(SentenceMap):
    """One split of one token source, as shuffled samples.

    request: its part is a range of documents. A sample holds text, types, labels,
    loss_mask, padding_mask (0 where [PAD] stands; all int64 [L]), is_random and truncated (int64 scalars).
    """

    def __init__(self, source: TokenSource, options: BERTSampleOptions, request: SplitRequest, *, seed: int) -> None:
        # [CLS] and two [SEP] are not the sentences'.
        rows = SentenceMapOptions(options.sequence_length - 3, options.short_seq_prob, 2 if options.pairs else 1, seed)
        super().__init__(source, rows, request)
        self.options, self.seed = options, seed
        self.description |= {"mask_prob": options.masking.probability, "pairs": options.pairs}

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample."""
        options, (random, texts, is_random, target) = self.options, self._text_pair(index)
        parts = [self._token_ids_of_text(text) for text in texts]
        truncated = any(text.high - text.low < text.length for text in texts)
        ids = [options.cls, *parts[0], options.sep]
        first_length = len(ids)
        if len(parts) > 1 and parts[1]:
            ids += [*parts[1], options.sep]

        def replace_masked_token(token: int) -> int:
            if random.random_sample() < 0.8:
                return options.mask
            return int(random.randint(0, len(options.continues))) if random.random_sample() >= 0.5 else token

        hidden = mask_tokens(
            ids,
            group_positions_by_word(ids, options.continues, (options.cls, options.sep)),
            options.masking,
            target_length=target,
            replace=replace_masked_token,
            random=random,
        )
        size, used = options.sequence_length, len(ids)
        text, types, labels, loss_mask, padding_mask = (np.zeros(size, np.int64) for _ in range(5))
        text[:used], text[used:] = hidden.ids, options.pad
        types[first_length:used] = 1
        padding_mask[:used] = text[:used] != options.pad  # as in Megatron, a random id that is [PAD] is not attended to
        positions = list(hidden.labels)
        labels[positions], loss_mask[positions] = list(hidden.labels.values()), 1
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "is_random": np.array(is_random, np.int64),
            "loss_mask": loss_mask,
            "padding_mask": padding_mask,
            "truncated": np.array(truncated, np.int64),
        }

    def token_sources(self, index: int) -> list[TokenSpan]:
        """Where the tokens of the index-th sample came from, before words were hidden."""
        _, texts, _, _ = self._text_pair(index)
        result, start = [], 1
        for text in texts:
            result += self.token_spans(text.first, text.last, text.low, text.high, start)
            start += text.high - text.low + 1
        return result

    def _text_pair(self, index: int) -> tuple[np.random.RandomState, list[_SentenceTokenRange], bool, int]:
        """Return what sample `index` is made of: its random generator; its one or two texts, cut to the target length;
        whether they are a wrong pair (is_random); and the target length in tokens.
        """
        first, last, target = self.row(index)
        random = np.random.RandomState((self.seed + index) % 2**32)
        if self.options.pairs is None:
            texts, is_random = [self._token_range_of_sentences(first, last)], False
        else:
            pivot = first + (int(random.randint(1, last - first)) if last - first >= 3 else 1)
            texts = [self._token_range_of_sentences(first, pivot), self._token_range_of_sentences(pivot, last)]
            is_random = bool(random.random_sample() < 0.5)
            if is_random and self.options.pairs == "sentence-order":
                texts.reverse()
            elif is_random:
                other, end, _ = self.row(int(random.randint(0, len(self))))
                texts[1] = self._token_range_of_sentences(int(random.randint(other, end)), end)
        _truncate_pair(texts, target, random)
        return random, texts, is_random, target

    def _token_range_of_sentences(self, first: int, last: int) -> _SentenceTokenRange:
        """Return the uncut token range of sentences [first, last)."""
        length = int(self.source.sequence_lengths[first:last].sum(dtype=np.int64))
        return _SentenceTokenRange(first, last, length, 0, length)

    def _token_ids_of_text(self, text: _SentenceTokenRange) -> list[int]:
        """Return the ids of a text's tokens [low, high). `DataError` for ids outside the vocabulary."""
        ids = self.token_ids(text.first, text.last)[text.low : text.high]
        check_ids_in_vocab(np.asarray(ids, np.int64), len(self.options.continues), self.prefix)
        return ids


@dataclass(slots=True)
class _SentenceTokenRange:
    """Tokens [low, high) of the `length` tokens of sentences [first, last)."""

    first: int
    last: int
    length: int
    low: int
    high: int


def _truncate_pair(texts: list[_SentenceTokenRange], target: int, random: np.random.RandomState) -> None:
    """Shorten the texts in place to `target` tokens together: drop one token at a time from the longer text (of equals
    the last), at its front or its back as `random` draws.
    """
    excess = sum(text.length for text in texts) - target
    for draw in random.random_sample(max(0, excess)):
        longer = (
            texts[0] if len(texts) == 1 or texts[0].high - texts[0].low > texts[1].high - texts[1].low else texts[1]
        )
        if draw < 0.5:
            longer.low += 1
        else:
            longer.high -= 1
