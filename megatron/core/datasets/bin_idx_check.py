"""A .bin/.idx pair read from end to end: everything that is wrong with it, and how long its documents are.

Reading for training looks only at what it needs. `bin_idx_pair_problems` reads every byte once, a piece at a time, and compares:

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
from megatron.core.datasets.indexed import (
    HEADER,
    IndexedDataset,
    WrongIndexEntryCounter,
    bin_path,
    idx_path,
    index_problems,
)
from megatron.core.datasets.storage import COPY_BYTES, DataError, file_or_object_size, write_file

Advance = Callable[[int], object]


def bin_idx_pair_problems(
    prefix: str, *, vocab_size: int | None = None, multimodal: bool = False, advance: Advance = lambda count: None
) -> list[str]:
    """Read a .bin/.idx pair whole and return a sentence for each thing wrong with it; empty for a good one.

    vocab_size: if None, the sidecar's. advance: called with the number of .bin bytes read since the last call.
    """
    problems: list[str] = []
    facts = None
    try:
        facts = sidecar.read_sidecar(prefix)
    except DataError as error:
        problems.append(str(error))
    try:
        data = IndexedDataset(prefix, multimodal=multimodal, check=False)
    except DataError as error:
        return [*problems, str(error)]
    problems += _index_file_problems(data, has_checksum=facts is not None)
    if vocab_size is None and facts is not None and facts.tokenizer is not None:
        given = facts.tokenizer.get("vocab_size")
        vocab_size = given if isinstance(given, int) else None
    tokens, checksum, size = _OutOfVocabCount(vocab_size), xxhash.xxh3_128(), file_or_object_size(bin_path(prefix))
    text = data.sequence_modes is None
    for start in range(0, size, COPY_BYTES):
        piece = data.read_raw_bytes(start, min(COPY_BYTES, size - start))
        checksum.update(piece)
        if text:
            tokens.scan(piece[: max(0, data.num_bytes - start)].view(data.dtype), start // data.dtype.itemsize)
        advance(len(piece))
    if not text and not problems:
        for sequence in np.flatnonzero(data.sequence_modes == 0).tolist():
            tokens.scan(data[sequence], int(data.offsets(sequence, sequence + 1)[0]) // data.dtype.itemsize)
    if tokens.count:
        problems.append(_bad_id_message(data, tokens))
    if size > data.num_bytes:
        problems.append(f"{bin_path(prefix)} has {size} bytes, {size - data.num_bytes} more than its index describes")
    if facts is not None:
        problems += sidecar.sidecar_mismatches(
            data.prefix, facts, data.totals_and_dtype, {"bin": checksum.hexdigest(), "idx": data.index_checksum}
        )
    return problems


def _index_file_problems(data: IndexedDataset, *, has_checksum: bool) -> list[str]:
    """Return a sentence for each thing wrong with the size or the arrays of the .idx file."""
    path, expected = (
        idx_path(data.prefix),
        HEADER.size + (13 if data.multimodal else 12) * len(data) + 8 * len(data.document_indices),
    )
    problems = []
    if file_or_object_size(path) != expected:
        problems.append(
            f"{path} has {file_or_object_size(path)} bytes; {len(data)} sequences and {len(data.document_indices)} document "
            f"entries take {expected} (modes of images and text are read with --multimodal)"
        )
    return problems + index_problems(
        path,
        data.sequence_lengths,
        data.offsets(0, len(data)),
        data.document_indices,
        itemsize=data.dtype.itemsize,
        has_checksum=has_checksum,
    )


def write_sidecar_of_pair(prefix: str, *, multimodal: bool = False, advance: Advance = lambda count: None) -> None:
    """Write the sidecar of a pair of another program, with counts and checksums, which later tell damage.

    advance: as in `bin_idx_pair_problems`. `DataError` if the pair cannot be opened, or has a sidecar already.
    """
    data, size = IndexedDataset(prefix, multimodal=multimodal), file_or_object_size(bin_path(prefix))
    sidecar.check_sidecar_path_free(prefix)
    if sidecar.read_sidecar(prefix) is not None:
        raise DataError(f"{sidecar.sidecar_path(prefix)} is there already")
    checksum = xxhash.xxh3_128()
    for start in range(0, size, COPY_BYTES):
        piece = data.read_raw_bytes(start, min(COPY_BYTES, size - start))
        checksum.update(piece)
        advance(len(piece))
    facts = sidecar.DatasetSidecar(
        data.num_documents,
        len(data),
        data.num_tokens,
        str(data.dtype),
        level="document" if np.diff(data.document_indices).max(initial=0) <= 1 else "sentence",
        checksums={
            "bin": f"{sidecar.CHECKSUM}:{checksum.hexdigest()}",
            "idx": f"{sidecar.CHECKSUM}:{data.index_checksum}",
        },
    )
    write_file(sidecar.sidecar_path(prefix), sidecar.encode_sidecar(facts))


class _OutOfVocabCount(WrongIndexEntryCounter):
    """Counts values that are not ids of the vocabulary; if its size is unknown, those below 0."""

    def __init__(self, vocab_size: int | None) -> None:
        super().__init__()
        self.vocab_size, self.value = vocab_size, 0.0

    def scan(self, ids: np.ndarray, at: int) -> None:
        """Count the wrong ones of `ids`, the values from token `at` of the .bin file on."""
        whole_numbers = ids.dtype.kind in "iu"
        low, high = (ids.min(), ids.max()) if len(ids) else (0, 0)
        if whole_numbers and low >= 0 and (self.vocab_size is None or high < self.vocab_size):
            return
        good = ids >= 0 if self.vocab_size is None else (ids >= 0) & (ids < self.vocab_size)
        wrong = ~(good if whole_numbers else good & (ids == np.floor(ids)))
        if not self.count and wrong.any():
            self.value = ids[wrong.argmax()].item()
        self.add_mask(wrong, at)


def _bad_id_message(data: IndexedDataset, tokens: _OutOfVocabCount) -> str:
    """Return a sentence on how many values are not ids, and the first of them."""
    limit = "no ids" if tokens.vocab_size is None else f"outside the vocabulary of {tokens.vocab_size}"
    starts = data.offsets(0, len(data))
    sequence = int(np.searchsorted(starts, tokens.first * data.dtype.itemsize, side="right")) - 1
    return (
        f"{bin_path(data.prefix)}: {tokens.count} numbers are {limit}, first {tokens.value} at token {tokens.first} of the "
        f"file, in sequence {sequence}"
    )


def document_lengths(data: IndexedDataset) -> np.ndarray:
    """Tokens of each document. int64 [documents]"""
    ends = np.zeros(len(data) + 1, np.int64)
    np.cumsum(data.sequence_lengths, out=ends[1:])
    return np.diff(ends[data.document_indices])
