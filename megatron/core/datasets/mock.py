"""Made-up tokens, so that a run needs no files: sequences 1, 2, 3, ... of random lengths, the same in every process."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.data_splits import MOCK_PREFIX

NUM_SEQUENCES = 100_000
LENGTH_LIMIT = 4096
NUM_CONVERSATIONS = 10_000
CONVERSATION_LIMIT = 256


class MockTokens:
    """A token source of 100,000 sequences, each counting up from 1 (modulo the vocabulary) and ending in `eod`."""

    prefix = MOCK_PREFIX

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.sequence_lengths = np.random.default_rng(0).integers(1, LENGTH_LIMIT, NUM_SEQUENCES, dtype=np.int32)
        self.document_indices = np.arange(NUM_SEQUENCES + 1)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [offset, offset + length) of one sequence, to its end when `length` is None. int64"""
        whole = int(self.sequence_lengths[sequence])
        stop = whole if length is None else offset + length
        if not 0 <= offset <= stop <= whole:
            raise IndexError(f"tokens [{offset}, {stop}) of mock sequence {sequence}, which has {whole} tokens")
        ids = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == whole and offset < whole:
            ids[-1] = self.eod
        return ids


class MockConversations:
    """10,000 made-up conversations: each counts up from 1 (modulo the vocabulary) and ends in `eod`; half is the answer.

    Ids of the first half, which are not learnt, are given as ~id.
    """

    prefix = MOCK_PREFIX

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.sequence_lengths = np.random.default_rng(0).integers(
            4, CONVERSATION_LIMIT, NUM_CONVERSATIONS, dtype=np.int32
        )
        self.document_indices = np.arange(NUM_CONVERSATIONS + 1)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [offset, offset + length) of one conversation, to its end when `length` is None. int64"""
        whole = int(self.sequence_lengths[sequence])
        ids = np.append(np.arange(1, whole) % self.vocab_size, self.eod)
        ids[: whole // 2] = ~ids[: whole // 2]
        return ids[offset : whole if length is None else offset + length]


class MockSentences:
    """10,000 mock documents of 1 to 20 sentences of 1 to 40 tokens; each sentence counts up from a start of its own.

    plain: the ids to use, as if they were 0, 1, 2, ...
    """

    prefix = MOCK_PREFIX

    def __init__(self, plain: np.ndarray) -> None:
        self.plain, random = plain, np.random.default_rng(0)
        sentences = random.integers(1, 21, NUM_CONVERSATIONS)
        self.document_indices = np.concatenate([np.zeros(1, np.int64), np.cumsum(sentences)])
        self.sequence_lengths = random.integers(1, 41, self.document_indices[-1], dtype=np.int32)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [offset, offset + length) of one sentence, to its end when `length` is None. int64"""
        whole = int(self.sequence_lengths[sequence])
        places = np.arange(offset, whole if length is None else offset + length) + 7 * sequence
        return self.plain[places % len(self.plain)]
