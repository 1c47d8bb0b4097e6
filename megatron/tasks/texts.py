"""Labelled texts as samples of ids for an encoder: [CLS] first [SEP] second [SEP], types 0 and 1, and which tokens are padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.special_tokens import encode_without_special_tokens
from megatron.core.tokenizers.base import Tokenizer
from megatron.tasks.flags import missing_encoder_tokens, needed_tokens_text
from megatron.tasks.glue import GlueSample
from megatron.tasks.race import CHOICES, MOST_QUESTION_TOKENS, RaceQuestion

Sample = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TextPairTokenizer:
    """Tokenizes texts and pairs to rows of `length` ids. `ConfigError` without [CLS], [SEP] or padding."""

    tokenizer: Tokenizer
    length: int

    def __post_init__(self) -> None:
        if lacking := missing_encoder_tokens(self.tokenizer):
            raise ConfigError(needed_tokens_text(lacking))

    def encode_texts_without_specials(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text without special tokens; `encode_pair` adds [CLS] and [SEP]."""
        return [ids.tolist() for ids in encode_without_special_tokens(self.tokenizer, texts)]

    def encode_pair(
        self, first: Sequence[int], second: Sequence[int] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, types and padding mask (1: a token) of [CLS] first [SEP] second [SEP], cut, int64 [length] each."""
        tokenizer = self.tokenizer
        ids = [tokenizer.cls, *first, tokenizer.sep]
        types = [0] * len(ids)
        if second is not None:
            ids += [*second, tokenizer.sep]
            types += [1] * (len(second) + 1)
        if len(ids) > self.length:
            ids, types = [*ids[: self.length - 1], tokenizer.sep], types[: self.length]
        rest = self.length - len(ids)
        padded = ids + [tokenizer.pad] * rest, types + [0] * rest, [1] * len(ids) + [0] * rest
        ids_array, types_array, mask = (np.array(column, np.int64) for column in padded)
        return ids_array, types_array, mask


class PairSamples:
    """Sentences or pairs of sentences with a class or a number each.

    A sample holds tokens, types, padding_mask (int64 [length]), labels (int64 [1]; numbers: float32), index (int64 [1]),
    loss_mask (float32 [1]; 0 without a label). cut: places of the texts that are longer than a row.
    """

    def __init__(self, texts: Sequence[GlueSample], encoder: TextPairTokenizer, *, numbers: bool = False) -> None:
        self.texts, self.encoder, self._numbers = texts, encoder, numbers
        firsts = encoder.encode_texts_without_specials([text.first for text in texts])
        seconds = encoder.encode_texts_without_specials([text.second or "" for text in texts])
        self._ids = list(zip(firsts, seconds))
        special = 2 if texts and texts[0].second is None else 3
        self.cut = [
            f"{text.place} ({len(a) + len(b) + special} tokens)"
            for text, (a, b) in zip(texts, self._ids)
            if len(a) + len(b) + special > encoder.length
        ]

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample."""
        text, (first, second) = self.texts[index], self._ids[index]
        ids, types, mask = self.encoder.encode_pair(first, None if text.second is None else second)
        return {
            "tokens": ids,
            "types": types,
            "padding_mask": mask,
            **_class_label_arrays(index, text.label, numbers=self._numbers),
        }


class MultipleChoiceSamples:
    """Questions with several answers, one of them right.

    A sample holds tokens, types, padding_mask (int64 [4, length]), labels, index (int64 [1]), loss_mask (float32 [1]) and
    choices (float32 [4]; 0 for an answer, minus infinity where there is none). A question with fewer than four answers
    repeats its first, without a chance. cut: places of the texts that are longer than a row.
    """

    def __init__(self, questions: Sequence[RaceQuestion], encoder: TextPairTokenizer) -> None:
        self.texts, self.encoder = questions, encoder
        articles = list(dict.fromkeys(question.article for question in questions))
        self._articles = dict(zip(articles, encoder.encode_texts_without_specials(articles)))
        flat = encoder.encode_texts_without_specials([answer for question in questions for answer in question.answers])
        self._answers, at = [], 0
        for question in questions:
            self._answers.append([ids[:MOST_QUESTION_TOKENS] for ids in flat[at : at + len(question.answers)]])
            at += len(question.answers)
        longest = [
            max(map(len, answers)) + len(self._articles[question.article]) + 3
            for question, answers in zip(questions, self._answers)
        ]
        self.cut = [
            f"{question.place} ({size} tokens)" for question, size in zip(questions, longest) if size > encoder.length
        ]

    def __len__(self) -> int:
        """The number of questions."""
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        """The index-th sample."""
        question, answers = self.texts[index], self._answers[index]
        article, missing = self._articles[question.article], CHOICES - len(answers)
        rows = [self.encoder.encode_pair(answer, article) for answer in [*answers, *answers[:1] * missing]]
        ids, types, mask = (np.stack(column) for column in zip(*rows))
        chances = np.array([0.0] * len(answers) + [-np.inf] * missing, np.float32)
        return {
            "tokens": ids,
            "types": types,
            "padding_mask": mask,
            "choices": chances,
            **_class_label_arrays(index, question.label),
        }


def _class_label_arrays(index: int, label: int | float | None, *, numbers: bool = False) -> Sample:
    """Return labels, index and loss_mask of a sample; without a label the mask is 0."""
    return {
        "labels": np.array([label or 0], np.float32 if numbers else np.int64),
        "index": np.array([index], np.int64),
        "loss_mask": np.array([label is not None], np.float32),
    }


def truncation_warning(samples: PairSamples | MultipleChoiceSamples, name: str, length: int, *, refuse: bool) -> str:
    """Return a sentence on samples longer than a row, or "". With `refuse`, raise it as `DataError`."""
    if not samples.cut:
        return ""
    first = ", ".join(samples.cut[:3]) + (", ..." if len(samples.cut) > 3 else "")
    message = f"{name}: {len(samples.cut)} of {len(samples)} samples are longer than --seq-length {length}: {first}"
    if refuse:
        raise DataError(f"{message}; give a larger --seq-length, or --long-texts cut")
    return f"{message}; they lose their ends"
