"""The .bin/.idx pair: sequences of token ids on disk, read in place and written whole.

`PREFIX.bin` is every sequence's ids end to end, with no header. `PREFIX.idx` says how to cut it (little endian, no
padding; S sequences, D = number of documents + 1):

    magic 9 | version u64 | dtype code u8 | S u64 | D u64 | S lengths i32 | S byte offsets i64 | D document starts i64

A document is a run of sequences; document d is sequences [documents[d], documents[d + 1]). Text for GPT has one
sequence per document; an empty document has none. The reader touches only the bytes it is asked for. The writer works
under temporary names and renames both files at the end, so a pair under its final name is always complete.
"""

from __future__ import annotations

import array
import logging
import os
import struct
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float64),
    7: np.dtype(np.float32),
    8: np.dtype(np.uint16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
READ_PAUSES = (1, 5, 25)  # seconds before each further try of a read that failed, as network file systems may
LONGEST_SEQUENCE = 2**31 - 1
COPY_BYTES = 16 * 2**20

logger = logging.getLogger(__name__)


class DataError(Exception):
    """A data file that cannot be used. The message names the file, what was found and what was expected."""


def best_dtype(vocab_size: int | None) -> np.dtype:
    """The smallest of uint16 and int32 that new files use for a vocabulary of this size (unknown: int32)."""
    return np.dtype(np.uint16) if vocab_size is not None and vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | Path) -> str:
    """The file that holds the ids."""
    return f"{prefix}.bin"


def idx_path(prefix: str | Path) -> str:
    """The file that says how to cut them."""
    return f"{prefix}.idx"


def temporary_name(path: str | Path) -> str:
    """A name beside `path` that no other process, on any machine, uses."""
    return f"{path}.{uuid.uuid4().hex}.tmp"


class IndexedDataset:
    """A .bin/.idx pair, open for reading.

    sequence_lengths: int32 [S] tokens of each sequence. document_indices: int64 [D], the first sequence of each
    document and, last, S. Both are views of the mapped file.
    mmap: map the .bin file into memory; off: read each sequence with its own system call.
    """

    def __init__(self, prefix: str | Path, mmap: bool = True) -> None:
        self.prefix = str(prefix)
        self.mmap = mmap
        self._read_index()
        path = bin_path(prefix)
        expected = self._bytes_expected()
        found = _file_size(path)
        if found < expected:
            raise DataError(f"{path} has {found} bytes, but {idx_path(prefix)} describes {expected}; "
                            "the pair is damaged or not of one run: write it again")
        self._file = None if mmap else open(path, "rb", buffering=0)
        self._bytes = _map(path) if mmap else None

    def _read_index(self) -> None:
        path = idx_path(self.prefix)
        size = _file_size(path)
        if size < HEADER.size:
            raise DataError(f"{path} has {size} bytes, fewer than its header of {HEADER.size}; write it again")
        content = _map(path)
        magic, version, code, sequences, documents = HEADER.unpack(content[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise DataError(f"{path} begins with {magic!r}, not with {MAGIC!r}; it is not an index of this format")
        if version != VERSION:
            raise DataError(f"{path} has format version {version}; this reader knows version {VERSION}")
        if code not in DTYPES:
            raise DataError(f"{path} has dtype code {code}; known codes are {sorted(DTYPES)}")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size < expected:
            raise DataError(f"{path} has {size} bytes, but {sequences} sequences and {documents} document entries "
                            f"need {expected}; it is truncated: write it again")
        self.dtype = DTYPES[code]
        at = HEADER.size
        self.sequence_lengths = np.frombuffer(content, np.int32, sequences, at)
        self._offsets = np.frombuffer(content, np.int64, sequences, at + 4 * sequences)
        self.document_indices = np.frombuffer(content, np.int64, documents, at + 12 * sequences)
        ends = (int(self.document_indices[0]), int(self.document_indices[-1])) if documents else None
        if ends != (0, sequences):
            raise DataError(f"{path} has a document array from {ends}, expected (0, {sequences}); write it again")

    def _bytes_expected(self) -> int:
        if len(self) == 0:
            return 0
        return int(self._offsets[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """All ids of one sequence."""
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [offset, offset + length) of one sequence, to its end when `length` is None. Read-only, in `dtype`."""
        if not 0 <= sequence < len(self.sequence_lengths):
            raise IndexError(f"sequence {sequence} of {self.prefix}, which has {len(self)}")
        whole = int(self.sequence_lengths[sequence])
        if length is None:
            length = whole - offset
        if offset < 0 or length < 0 or offset + length > whole:
            raise IndexError(f"tokens [{offset}, {offset + length}) of sequence {sequence} of {self.prefix}, "
                             f"which has {whole} tokens")
        start = int(self._offsets[sequence]) + offset * self.dtype.itemsize
        if length == 0:
            return np.empty(0, self.dtype)
        if self._bytes is not None:
            return np.frombuffer(self._bytes, self.dtype, length, start)
        return np.frombuffer(self._read(start, length * self.dtype.itemsize), self.dtype)

    def _read(self, start: int, count: int) -> bytes:
        """`count` bytes of the .bin file, with a few tries for file systems that fail for a moment."""
        assert self._file is not None, "unmapped data is read from an open file"
        for pause in (*READ_PAUSES, None):
            try:
                content = bytearray()
                while len(content) < count:
                    piece = os.pread(self._file.fileno(), count - len(content), start + len(content))
                    if not piece:
                        raise DataError(f"{bin_path(self.prefix)} ends before byte {start + count}; "
                                        "it has become shorter since it was opened")
                    content += piece
                return bytes(content)
            except OSError as error:
                if pause is None:
                    raise DataError(f"{bin_path(self.prefix)} cannot be read at byte {start}: {error}") from error
                logger.warning("%s cannot be read (%s); next try in %d s", bin_path(self.prefix), error, pause)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, bool]]:
        """Pickle as a name: another process opens the files for itself."""
        return IndexedDataset, (self.prefix, self.mmap)


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        stem, suffix = os.path.splitext(os.path.splitext(path)[0])
        hint = f"; give the prefix without the ending: {stem}" if suffix in (".bin", ".idx") else ""
        raise DataError(f"{path} cannot be opened: {error.strerror}{hint}") from error


def _map(path: str) -> np.ndarray:
    """The file's bytes, mapped read-only; a plain array, whose slices cost less than those of `np.memmap`."""
    if os.stat(path).st_size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)


class IndexedDatasetBuilder:
    """Writes a .bin/.idx pair.

    As a context manager it finishes the pair at the end of the block, or removes what it wrote when the block raises.
    Until it finishes, whatever stands under the final names stays as it was.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"{prefix}: no code for ids of type {self.dtype}; use one of {[str(d) for d in CODES]}")
        os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
        self._names = {path: temporary_name(path) for path in (bin_path(prefix), idx_path(prefix))}
        self._bin = open(self._names[bin_path(prefix)], "wb", buffering=2**20)
        # Machine integers, not Python's: 12 bytes a document whatever the size of the corpus.
        self._lengths = array.array("i")
        self._documents = array.array("q", [0])
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._documents) - 1

    def add_sequence(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one sequence to the document in progress."""
        ids = np.asarray(tokens)
        if ids.ndim != 1:
            raise DataError(f"{self.prefix}: a sequence has one dimension, not {ids.ndim}")
        if len(ids) > LONGEST_SEQUENCE:
            raise DataError(f"{self.prefix}: a sequence of {len(ids)} tokens; the format ends at {LONGEST_SEQUENCE}")
        if ids.dtype != self.dtype:
            self._check_range(ids)
            ids = ids.astype(self.dtype)
        self._bin.write(ids.tobytes())
        self._lengths.append(len(ids))
        self.num_tokens += len(ids)

    def _check_range(self, ids: np.ndarray) -> None:
        if len(ids) == 0 or self.dtype.kind == "f":
            return
        allowed = np.iinfo(self.dtype)
        low, high = int(ids.min()), int(ids.max())
        if low < allowed.min or high > allowed.max:
            raise DataError(f"{self.prefix}: id {low if low < allowed.min else high} does not fit {self.dtype}, which "
                            f"holds {allowed.min} to {allowed.max}; the vocabulary size given is too small")

    def end_document(self) -> None:
        """End the document in progress; one without sequences counts as a document too."""
        self._documents.append(len(self._lengths))

    def add_index(self, prefix: str | Path) -> None:
        """Append every document of another pair of the same dtype."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(f"{idx_path(prefix)} holds ids of type {other.dtype}, not {self.dtype} like the pairs "
                            "before it; tokenize all parts with the same vocabulary")
        tokens = int(other.sequence_lengths.sum(dtype=np.int64))
        total = tokens * self.dtype.itemsize
        if total != other._bytes_expected():
            raise DataError(f"{idx_path(prefix)} does not lay its sequences end to end; write it again")
        assert self._documents[-1] == len(self._lengths), "pairs are joined between documents"
        self._documents.frombytes((other.document_indices[1:] + len(self._lengths)).tobytes())
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self.num_tokens += tokens
        with open(bin_path(prefix), "rb") as source:
            while total:
                piece = source.read(min(total, COPY_BYTES))
                if not piece:
                    raise DataError(f"{bin_path(prefix)} has become shorter while it was copied")
                self._bin.write(piece)
                total -= len(piece)

    def finish(self) -> None:
        """Write the index, and put both files under their final names."""
        assert self._documents[-1] == len(self._lengths), "the last document was not ended"
        lengths = np.frombuffer(self._lengths, np.int32)
        offsets = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        offsets = np.concatenate([np.zeros(1, np.int64), offsets])[: len(lengths)]
        with open(self._names[idx_path(self.prefix)], "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
            for part in (self._lengths, offsets, self._documents):
                index.write(part)
            _sync(index)
        _sync(self._bin)
        self._bin.close()
        # Between the two renames the old index must not stand beside the new ids: better no pair than a mixed one.
        Path(idx_path(self.prefix)).unlink(missing_ok=True)
        for path, temporary in self._names.items():
            os.replace(temporary, path)

    def discard(self) -> None:
        """Remove what stands under temporary names; after `finish` there is nothing."""
        self._bin.close()
        for temporary in self._names.values():
            Path(temporary).unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
