"""Pairs for the data benchmarks: an index with lognormal document lengths, and a .bin file of holes or of random ids."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

WRITTEN_AT_ONCE = 2**24


def lengths_of(documents: int, tokens: int) -> np.ndarray:
    """Lengths, int32, of about so many tokens in all; as spread as those of web text."""
    raw = np.random.default_rng(0).lognormal(5.8, 1.0, documents)
    return np.maximum(1, raw * (tokens / raw.sum())).astype(np.int32)


def write_pair(prefix: Path, documents: int, tokens: int, *, vocabulary: int | None = None) -> int:
    """A pair of uint16 ids. vocabulary: below which ids are random; None: a sparse file of zeros. Returns its tokens."""
    lengths = lengths_of(documents, tokens)
    total = int(lengths.sum(dtype=np.int64))
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with open(f"{prefix}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        for part in (
            lengths,
            np.concatenate([np.zeros(1, np.int64), ends[:-1]]),
            np.arange(documents + 1, dtype=np.int64),
        ):
            part.tofile(index)
    random = np.random.default_rng(1)
    with open(f"{prefix}.bin", "wb") as file:
        for at in range(0, total if vocabulary else 0, WRITTEN_AT_ONCE):
            random.integers(0, vocabulary, min(WRITTEN_AT_ONCE, total - at), np.uint16).tofile(file)
        file.truncate(2 * total)
    return total
