"""A .bin/.idx pair read from end to end: everything that is wrong with it, and how long its documents are.

Reading for training looks only at what it needs. `problems_of` reads every byte once, a piece at a time, and compares:

    index       size, offsets the running sum of the lengths, document array rising from 0 to S
    ids         within the vocabulary (the one given, else the sidecar's, else only not negative)
    .bin file   as long as the index says
    sidecar     counts, type and checksums
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from megatron.core.datasets import sidecar
from megatron.core.datasets.indexed import COPY_ENTRIES, HEADER, IndexedDataset, bin_path, idx_path
from megatron.core.datasets.sidecar import CHECKSUM, Sidecar, sidecar_path
from megatron.core.datasets.storage import COPY_BYTES, DataError, size_of, whole

Advance = Callable[[int], object]


def problems_of(
    prefix: str, *, vocab_size: int | None = None, multimodal: bool = False, advance: Advance = lambda count: None
) -> list[str]:
    """A sentence for each thing that is wrong with a pair; empty for a good one.

    advance: called with the number of bytes of the .bin file that were read since the last call.
    """
    problems: list[str] = []
    facts = None
    try:
        facts = sidecar.read(prefix)
    except DataError as error:
        problems.append(str(error))
    try:
        data = IndexedDataset(prefix, multimodal=multimodal)
    except DataError as error:
        return [*problems, str(error)]
    problems += _index_problems(data)
    if vocab_size is None and facts is not None and facts.tokenizer is not None:
        given = facts.tokenizer.get("vocab_size")
        vocab_size = given if isinstance(given, int) else None
    tokens, checksum, size = _IdRange(vocab_size), xxhash.xxh3_128(), size_of(bin_path(prefix))
    text = data.sequence_modes is None
    for start in range(0, size, COPY_BYTES):
        piece = data.raw(start, min(COPY_BYTES, size - start))
        checksum.update(piece)
        if text:
            tokens.look(piece[: max(0, data.num_bytes - start)].view(data.dtype), start // data.dtype.itemsize)
        advance(len(piece))
    if not text and not problems:
        for sequence in np.flatnonzero(data.sequence_modes == 0).tolist():
            tokens.look(data[sequence], int(data.offsets(sequence, sequence + 1)[0]) // data.dtype.itemsize)
    if tokens.count:
        problems.append(_place_of_id(data, tokens))
    if size > data.num_bytes:
        problems.append(f"{bin_path(prefix)} has {size} bytes, {size - data.num_bytes} more than its index describes")
    if facts is not None:
        problems += _sidecar_problems(data, facts, checksum.hexdigest())
    return problems


def _index_problems(data: IndexedDataset) -> list[str]:
    """What is wrong between the arrays of the index."""
    path = idx_path(data.prefix)
    problems: list[str] = []
    expected = HEADER.size + (13 if data.multimodal else 12) * len(data) + 8 * len(data.document_indices)
    if size_of(path) != expected:
        problems.append(f"{path} has {size_of(path)} bytes; {len(data)} sequences and {len(data.document_indices)} document "
                        f"entries take {expected} (modes of images and text are read with --multimodal)")
    misplaced, end = _Findings(), 0
    for first in range(0, len(data), COPY_ENTRIES):
        lengths = data.sequence_lengths[first : first + COPY_ENTRIES]
        ends = end + np.cumsum(lengths, dtype=np.int64) * data.dtype.itemsize
        starts = np.concatenate([np.full(1, end, np.int64), ends[:-1]])
        misplaced.add(data.offsets(first, first + COPY_ENTRIES) != starts, first)
        end = int(ends[-1])
    if misplaced.count:
        problems.append(f"{path}: {misplaced.count} sequences do not begin where the lengths before them end, first "
                        f"sequence {misplaced.first}")
    falling, array = _Findings(), data.document_indices
    for first in range(0, len(array) - 1, COPY_ENTRIES):
        falling.add(np.diff(array[first : first + COPY_ENTRIES + 1]) < 0, first)
    if falling.count:
        problems.append(f"{path}: {falling.count} documents end before they begin, first document {falling.first}")
    return problems


class _Findings:
    """How many entries are wrong, and which is the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, 0

    def add(self, wrong: np.ndarray, at: int) -> None:
        """wrong: which of the entries from number `at` on are."""
        found = int(np.count_nonzero(wrong))
        if found and not self.count:
            self.first = at + int(wrong.argmax())
        self.count += found


class _IdRange(_Findings):
    """Numbers that are no ids of the vocabulary; of one of unknown size, those below 0."""

    def __init__(self, vocab_size: int | None) -> None:
        super().__init__()
        self.vocab_size, self.value = vocab_size, 0.0

    def look(self, ids: np.ndarray, at: int) -> None:
        """ids: from token `at` of the .bin file on."""
        whole_numbers = ids.dtype.kind in "iu"
        low, high = (ids.min(), ids.max()) if len(ids) else (0, 0)
        if whole_numbers and low >= 0 and (self.vocab_size is None or high < self.vocab_size):
            return
        good = ids >= 0 if self.vocab_size is None else (ids >= 0) & (ids < self.vocab_size)
        wrong = ~(good if whole_numbers else good & (ids == np.floor(ids)))
        if not self.count and wrong.any():
            self.value = ids[wrong.argmax()].item()
        self.add(wrong, at)


def _place_of_id(data: IndexedDataset, tokens: _IdRange) -> str:
    limit = "no ids" if tokens.vocab_size is None else f"outside the vocabulary of {tokens.vocab_size}"
    starts = data.offsets(0, len(data))
    sequence = int(np.searchsorted(starts, tokens.first * data.dtype.itemsize, side="right")) - 1
    return (f"{bin_path(data.prefix)}: {tokens.count} numbers are {limit}, first {tokens.value} at token {tokens.first} of the "
            f"file, in sequence {sequence}")


def _sidecar_problems(data: IndexedDataset, facts: Sidecar, bin_checksum: str) -> list[str]:
    path = sidecar_path(data.prefix)
    found = {"documents": data.num_documents, "sequences": len(data), "dtype": str(data.dtype),
             "tokens": data.num_tokens}
    problems = [f"{path} says {name} {getattr(facts, name)}, but the pair has {value}"
                for name, value in found.items() if getattr(facts, name) != value]
    index_checksum = xxhash.xxh3_128(whole(idx_path(data.prefix), None)).hexdigest()
    for part, value, name in (("bin", bin_checksum, bin_path), ("idx", index_checksum, idx_path)):
        told = facts.checksums.get(part)
        if told is not None and told.startswith(f"{CHECKSUM}:") and told != f"{CHECKSUM}:{value}":
            problems.append(f"{name(data.prefix)} has the checksum {CHECKSUM}:{value}, but was written with {told}")
    return problems


def document_lengths(data: IndexedDataset) -> np.ndarray:
    """Tokens of each document. int64 [documents]"""
    ends = np.zeros(len(data) + 1, np.int64)
    np.cumsum(data.sequence_lengths, out=ends[1:])
    return np.diff(ends[data.document_indices])
