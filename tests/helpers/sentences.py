"""Sentences without files, and a tokenizer of letters, for tests of BERT's and T5's samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.core.datasets.indexed import IndexedDataset, IndexedDatasetBuilder

PAD, CLS, SEP, MASK, BOS, EOS = range(6)
FIRST = 6  # ids below are special


class LetterTokenizer:
    """Ids 6, 7, ... are text; every fourth continues a word. The last `extra` ids are sentinels."""

    pad, cls, sep, mask, bos, eos, eod = PAD, CLS, SEP, MASK, BOS, EOS, EOS
    special_ids = (CLS, SEP, MASK, BOS, EOS)
    chat_template = None
    engine = "none"

    def __init__(self, vocab_size: int = 100, extra: int = 0) -> None:
        self.vocab_size = vocab_size
        self.additional_special_tokens_ids = tuple(range(vocab_size - extra, vocab_size))
        self.unique_identifiers = {"class": "letters", "vocab_size": vocab_size, "extra": extra}

    def tokenize(self, text: str) -> list[int]:
        """An id for each letter."""
        return [FIRST + ord(letter) % 64 for letter in text]

    def id_to_token(self, token: int) -> str:
        """##n for ids that continue a word."""
        text = self.special_ids[-1] < token < self.vocab_size - len(self.additional_special_tokens_ids)
        return f"##{token}" if text and token % 4 == 0 else f"w{token}"


def write(prefix: object, documents: Sequence[Sequence[Sequence[int]]]) -> IndexedDataset:
    """A pair of files of documents of sentences, open for reading."""
    with IndexedDatasetBuilder(str(prefix), np.dtype(np.uint16)) as builder:
        for document in documents:
            for sentence in document:
                builder.add_sequence(np.array(sentence, np.uint16))
            builder.end_document()
    return IndexedDataset(str(prefix))


def some_documents(count: int, *, seed: int = 0, longest: int = 12, high: int = 100) -> list[list[list[int]]]:
    """Documents of 0 to 8 random sentences of plain ids."""
    random = np.random.default_rng(seed)
    return [
        [random.integers(FIRST, high, random.integers(1, longest + 1)).tolist() for _ in range(random.integers(0, 9))]
        for _ in range(count)
    ]
