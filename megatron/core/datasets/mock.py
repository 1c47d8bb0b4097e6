"""Made-up tokens, so that a run needs no files: sequences 1, 2, 3, ... of random lengths, the same in every process."""

from __future__ import annotations

import numpy as np

from megatron.core.datasets.paths import MOCK_PREFIX

NUM_SEQUENCES = 100_000
LENGTH_LIMIT = 4096


class MockTokens:
    """A token source of 100,000 sequences, each counting up from 1 (modulo the vocabulary) and ending in `eod`."""

    prefix = MOCK_PREFIX

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.sequence_lengths = np.random.default_rng(0).integers(1, LENGTH_LIMIT, NUM_SEQUENCES, dtype=np.int32)

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
