"""The .bin/.idx pair: sequences of token ids on disk, read in place and written whole.

`PREFIX.bin` is every sequence's ids end to end, with no header. `PREFIX.idx` says how to cut it (little endian, no
padding; S sequences, D = number of documents + 1):

    magic 9 | version u64 | dtype code u8 | S u64 | D u64 | S lengths i32 | S byte offsets i64 | D document starts i64
    and, for images and text only, S modes i8

A document is a run of sequences; document d is sequences [documents[d], documents[d + 1]). Text for GPT has one
sequence per document; an empty document has none. The reader touches only the bytes it is asked for; `bin_idx_check.py`
reads them all. The writer works under temporary names and renames the files at the end, the index last, so a pair under
its final name is always complete.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import numpy as np
import xxhash

from megatron.core.datasets import sidecar
from megatron.core.datasets.sidecar import CHECKSUM, DatasetSidecar, Fingerprint, sidecar_path
from megatron.core.datasets.storage import (
    COPY_BYTES,
    DataError,
    FileRangeReader,
    MappedFile,
    ObjectBlockReader,
    file_or_object_size,
    fsync_file,
    fsync_parent_folder,
    is_remote_path,
    open_for_writing,
    read_whole_file,
    temporary_name,
)

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
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
LONGEST_SEQUENCE = 2**31 - 1
COPY_ENTRIES = 2**20
_FEWEST_DOCUMENTS = 64  # of which one that is odd cannot be meant
CHECKED_AT_ONCE = 2**16  # what is computed on the way stays in the processor's cache
_INT32 = struct.Struct("<i")


def token_id_dtype(vocab_size: int | None) -> np.dtype:
    """Return the dtype in which new files store ids: uint16 for a vocabulary below 65500, else (or unknown) int32."""
    return np.dtype(np.uint16) if vocab_size is not None and vocab_size < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | Path) -> str:
    """The file that holds the ids."""
    return f"{prefix}.bin"


def idx_path(prefix: str | Path) -> str:
    """The file that says how to cut them."""
    return f"{prefix}.idx"


class IndexedDataset:
    """A .bin/.idx pair, open for reading.

    sequence_lengths: int32 [S] tokens of each sequence. document_indices: int64 [D], the first sequence of each
    document and, last, S. sequence_modes: int8 [S], 0 for text and 1 for an image, of a pair opened as multimodal; else
    None. All are views of the index. num_tokens, num_bytes: what all sequences take.

    mmap: map the .bin file into memory; off: read each sequence with its own system call. A prefix such as s3://bucket/x
    names objects: their ids are read by ranges, and the index is kept in the folder `cache`, else in memory.
    check: off: the arrays of the index are not compared with each other, nor the pair with its sidecar.
    """

    def __init__(
        self,
        prefix: str | Path,
        mmap: bool = True,
        *,
        cache: str | None = None,
        multimodal: bool = False,
        check: bool = True,
    ) -> None:
        self.prefix = str(prefix)
        self.mmap, self.cache, self.multimodal = mmap, cache, multimodal
        self._read_index()
        if check:
            self._check_idx_consistency()
        path = bin_path(prefix)
        expected, result = self.num_bytes, file_or_object_size(path)
        if result < expected:
            raise DataError(
                f"{path} has {result} bytes, but {idx_path(prefix)} describes {expected}; "
                "the pair is damaged or not of one run: write it again"
            )
        if check and result > expected and sidecar.read_sidecar(prefix) is None:
            raise DataError(
                f"{path} has {result} bytes, {result - expected} more than {idx_path(prefix)} describes; the pair is damaged or "
                "not of one run: write it again"
            )
        self._reader: MappedFile | FileRangeReader | ObjectBlockReader
        if is_remote_path(path):
            self._reader = ObjectBlockReader(path, result)
        else:
            self._reader = MappedFile(path) if mmap else FileRangeReader(path)

    def _read_index(self) -> None:
        """Read the index file and set the arrays that the class describes. `DataError` if it is no valid index."""
        path = idx_path(self.prefix)
        size = file_or_object_size(path)
        if size < HEADER.size:
            raise DataError(f"{path} has {size} bytes, fewer than its header of {HEADER.size}; write it again")
        content = read_whole_file(path, self.cache)
        magic, version, code, sequences, documents = HEADER.unpack(content[: HEADER.size].tobytes())
        if magic.startswith(OLD_MAGIC):
            raise DataError(
                f"{path} begins with {OLD_MAGIC!r}: it is of the format 'lazy' or 'cached' of the first "
                "Megatrons, which is no longer read; write the data again with tools/preprocess_data.py"
            )
        if magic != MAGIC:
            raise DataError(f"{path} begins with {magic!r}, not with {MAGIC!r}; it is not an index of this format")
        if version != VERSION:
            raise DataError(f"{path} has format version {version}; this reader knows version {VERSION}")
        if code not in DTYPES:
            raise DataError(f"{path} has dtype code {code}; known codes are {sorted(DTYPES)}")
        expected = HEADER.size + (13 if self.multimodal else 12) * sequences + 8 * documents
        if len(content) < expected:
            raise DataError(
                f"{path} has {size} bytes, but {sequences} sequences and {documents} document entries "
                f"need {expected}; it is truncated: write it again"
            )
        self.dtype, self._index = DTYPES[code], content
        at = HEADER.size
        self.sequence_lengths = np.frombuffer(content, np.int32, sequences, at)
        self._offsets = np.frombuffer(content, np.int64, sequences, at + 4 * sequences)
        self.document_indices = np.frombuffer(content, np.int64, documents, at + 12 * sequences)
        self.sequence_modes = (
            np.frombuffer(content, np.int8, sequences, at + 12 * sequences + 8 * documents) if self.multimodal else None
        )
        ends = (int(self.document_indices[0]), int(self.document_indices[-1])) if documents else None
        if ends != (0, sequences):
            raise DataError(f"{path} has a document array from {ends}, expected (0, {sequences}); write it again")
        self.num_tokens = int(self.sequence_lengths.sum(dtype=np.int64))
        self.num_bytes = self.num_tokens * self.dtype.itemsize
        shortest = int(self.sequence_lengths.min(initial=0))
        if shortest < 0:
            raise DataError(f"{path} has a sequence of {shortest} tokens; it is damaged: write it again")
        first, end = (
            (self._offsets.item(0), self._offsets.item(-1) + self.sequence_lengths.item(-1) * self.dtype.itemsize)
            if sequences
            else (0, 0)
        )
        if (first, end) != (0, self.num_bytes):
            raise DataError(
                f"{path} lays its sequences from byte {first} to {end}, but their lengths take bytes 0 to "
                f"{self.num_bytes}; it is damaged: write it again"
            )

    def _check_idx_consistency(self) -> None:
        """Raise `DataError` where the index contradicts itself, or the sidecar the pair."""
        path = idx_path(self.prefix)
        facts = sidecar.read_sidecar(self.prefix)
        problems = index_problems(
            path,
            self.sequence_lengths,
            self._offsets,
            self.document_indices,
            itemsize=self.dtype.itemsize,
            has_checksum=facts is not None,
        )
        if problems:
            raise DataError(
                f"{'; '.join(problems)}; the index is damaged: see megatron inspect-dataset --verify, and write it again"
            )
        if facts is not None:
            problems = sidecar.sidecar_mismatches(
                self.prefix, facts, self.totals_and_dtype, {"idx": self.index_checksum}
            )
        if problems:
            raise DataError(
                f"{'; '.join(problems)}; one of the files is damaged or of another run: write the pair again, or "
                f"remove {sidecar_path(self.prefix)} to use the pair without its checks"
            )

    @property
    def index_checksum(self) -> str:
        """Hex xxh3_128 of the index."""
        return xxhash.xxh3_128(self._index).hexdigest()

    @property
    def totals_and_dtype(self) -> dict[str, int | str]:
        """What a sidecar says of a pair: documents, sequences, tokens and dtype."""
        return {
            "documents": self.num_documents,
            "sequences": len(self),
            "dtype": str(self.dtype),
            "tokens": self.num_tokens,
        }

    @property
    def num_documents(self) -> int:
        """The number of documents, empty ones too."""
        return len(self.document_indices) - 1

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
        start, tokens = self._sequence_location(sequence)
        if length is None:
            length = tokens - offset
        if offset < 0 or length < 0 or offset + length > tokens:
            raise IndexError(
                f"tokens [{offset}, {offset + length}) of sequence {sequence} of {self.prefix}, "
                f"which has {tokens} tokens"
            )
        if length == 0:
            return np.empty(0, self.dtype)
        start += offset * self.dtype.itemsize
        return np.frombuffer(self._reader.read(start, length * self.dtype.itemsize), self.dtype)

    def _sequence_location(self, sequence: int) -> tuple[int, int]:
        """Return (first byte, number of tokens) of a sequence. `DataError` if it does not end where the next begins."""
        start, tokens = self._offsets.item(sequence), self.sequence_lengths.item(sequence)
        last = sequence + 1 == len(self._offsets)
        end = self.num_bytes if last else self._offsets.item(sequence + 1)
        if start < 0 or start + tokens * self.dtype.itemsize != end or end > self.num_bytes:
            raise DataError(
                f"{idx_path(self.prefix)} gives sequence {sequence} {tokens} tokens of {self.dtype} from byte "
                f"{start}, but the next begins at byte {end} of {self.num_bytes}; the index is damaged: see "
                "megatron inspect-dataset --verify, and write it again"
            )
        return start, tokens

    def offsets(self, first: int, last: int) -> np.ndarray:
        """Where sequences [first, last) begin in the .bin file, in bytes, as the index says. int64"""
        return self._offsets[first:last]

    def read_raw_bytes(self, start: int, count: int) -> np.ndarray:
        """Bytes [start, start + count) of the .bin file, uint8."""
        return np.frombuffer(self._reader.read(start, count), np.uint8)

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Pickle as a name: another process opens the files for itself."""
        return partial(IndexedDataset, self.prefix, self.mmap, cache=self.cache, multimodal=self.multimodal), ()


class WrongIndexEntryCounter:
    """How many entries are wrong, and which is the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, 0

    def add_mask(self, wrong: np.ndarray, at: int) -> None:
        """Count the entries that are wrong, and keep the number of the first.

        wrong: bool [n], one for each entry from number `at` on.
        """
        result = int(np.count_nonzero(wrong))
        if result and not self.count:
            self.first = at + int(wrong.argmax())
        self.count += result


def index_problems(
    path: str, lengths: np.ndarray, offsets: np.ndarray, documents: np.ndarray, *, itemsize: int, has_checksum: bool
) -> list[str]:
    """Return a sentence for each inconsistency between the arrays of an index (`IndexedDataset` describes them).

    path: the name of the index in the sentences. lengths, offsets: [sequences]; documents: [documents + 1]. itemsize:
    bytes of an id. has_checksum: whether a sidecar tells damage that leaves the arrays plausible. The caller checks the ends of the arrays.
    """
    problems: list[str] = []
    misplaced, falling, end = WrongIndexEntryCounter(), WrongIndexEntryCounter(), 0
    for first in range(0, len(lengths), CHECKED_AT_ONCE):
        ends = end + np.cumsum(lengths[first : first + CHECKED_AT_ONCE], dtype=np.int64) * itemsize
        starts = offsets[first : first + CHECKED_AT_ONCE]
        misplaced.add_mask(np.append(starts[:1] != end, starts[1:] != ends[:-1]), first)
        end = int(ends[-1])
    if misplaced.count:
        problems.append(
            f"{path}: {misplaced.count} sequences do not begin where the lengths before them end, first "
            f"sequence {misplaced.first}"
        )
    for first in range(0, len(documents) - 1, CHECKED_AT_ONCE):
        starts = documents[first : first + CHECKED_AT_ONCE + 1]
        falling.add_mask(starts[1:] < starts[:-1], first)
    if falling.count:
        problems.append(f"{path}: {falling.count} documents end before they begin, first document {falling.first}")
    if not has_checksum and _FEWEST_DOCUMENTS < len(documents) == len(lengths) + 1:
        odd = np.flatnonzero(documents != np.arange(len(documents)))
        if len(odd) == 1:  # of documents of a sequence each nothing else tells it
            problems.append(f"{path}: each document is one sequence, but for entry {odd[0]} of the document array")
    return problems


@dataclass(frozen=True, slots=True)
class BuilderResumePoint:
    """How much of an unfinished pair is on disk: so many whole documents, their sequences and their tokens."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0


def _open_new_or_truncated(path: str, keep: int | None) -> IO[bytes]:
    """Open a new file for writing; or with `keep` an old one, cut to that many bytes. `DataError` if it is shorter."""
    if keep is None:
        return open_for_writing(path)
    if not os.path.exists(path) or os.path.getsize(path) < keep:
        raise DataError(f"{path} has fewer than the {keep} bytes that were written to it; start anew")
    file = open_for_writing(path, "r+b")
    file.truncate(keep)
    file.seek(keep)
    return file


class IndexedDatasetBuilder:
    """Writes a .bin/.idx pair and its sidecar.

    tokenizer, shard, level: what the sidecar says of the pair; see `DatasetSidecar`. multimodal: each sequence has a mode.
    Memory does not grow with what is written.

    As a context manager it finishes the pair at the end of the block, or removes what it wrote when the block raises.
    Until it finishes, whatever stands under the final names stays as it was.

    To go on after a crash: give `partial`, the ending of the unfinished files' names (they are PREFIX.bin.ENDING and so
    on; left out, names are unique), keep what `flush` returns in a journal, and hand it to a new builder as `marks`. It
    drops what was written after that.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type,
        *,
        tokenizer: Fingerprint | None = None,
        shard: tuple[int, int] | None = None,
        level: Literal["document", "sentence"] = "document",
        multimodal: bool = False,
        partial: str | None = None,
        marks: BuilderResumePoint | None = None,
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"{prefix}: no code for ids of type {self.dtype}; use one of {[str(d) for d in CODES]}")
        if is_remote_path(prefix):
            raise DataError(f"{prefix}: pairs are written to files; write to a local folder, and copy the files")
        assert marks is None or partial is not None, "files that are found again have names that are known"
        os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
        sidecar.check_sidecar_path_free(prefix)
        self._tokenizer, self._shard, self._level, self._multimodal = tokenizer, shard, level, multimodal
        self._ending = partial or temporary_name("")[1:]
        at = marks or BuilderResumePoint()
        self.num_documents, self.num_sequences, self.num_tokens = at.documents, at.sequences, at.tokens
        self._document_end = self.num_sequences
        sizes = {
            "bin": at.tokens * self.dtype.itemsize,
            "lengths": at.sequences * 4,
            "modes": at.sequences * multimodal,
            "documents": at.documents * 8,
        }
        self._files = [
            _open_new_or_truncated(self._temporary_name(part), None if marks is None else size)
            for part, size in sizes.items()
        ]
        self._bin, self._lengths, self._modes, self._documents = self._files
        self._checksum = _resume_file_hasher(self._temporary_name("bin"), sizes["bin"])

    def _temporary_name(self, part: str) -> str:
        """The name of a file until the pair is finished; it ends on no ending of a finished pair."""
        return f"{self.prefix}.{part}.{self._ending}"

    def add_sequence(self, tokens: Sequence[int] | np.ndarray, mode: int = 0) -> None:
        """Append a sequence, ids [tokens], to the document in progress.

        mode: of multimodal pairs; 0 is text, 1 an image.
        """
        assert self._multimodal or mode == 0, "sequences have modes in multimodal pairs"
        ids = np.asarray(tokens)
        if len(ids.shape) == 1 and len(ids) > LONGEST_SEQUENCE:
            raise DataError(f"{self.prefix}: a sequence of {len(ids)} tokens; the format ends at {LONGEST_SEQUENCE}")
        self._write_ids(ids)
        self._lengths.write(_INT32.pack(len(ids)))
        if self._multimodal:
            self._modes.write(bytes([mode]))
        self.num_sequences += 1

    def end_document(self) -> None:
        """End the document in progress; one without sequences counts as a document too."""
        self._append_document_ends(np.zeros(1, np.int64), 0)

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray, sequences: np.ndarray | None = None) -> None:
        """Append whole documents, which is faster than one at a time.

        ids: [tokens], all documents concatenated. lengths: [sequences], tokens of each sequence. sequences:
        [documents], sequences of each document; left out, `lengths` are those of the documents: one sequence each, or
        none where the length is 0.
        """
        assert not self._multimodal, "sequences of multimodal pairs are added with their mode"
        self._assert_between_documents()
        if sequences is None:
            sequences, lengths = lengths > 0, lengths[lengths > 0]
        assert lengths.sum() == len(ids) and sequences.sum() == len(lengths), "the lengths belong to these ids"
        if len(lengths) and lengths.max() > LONGEST_SEQUENCE:
            raise DataError(
                f"{self.prefix}: a sequence of {lengths.max()} tokens; the format ends at {LONGEST_SEQUENCE}"
            )
        self._write_ids(ids)
        self._lengths.write(lengths.astype(np.int32).tobytes())
        self._append_document_ends(np.cumsum(sequences, dtype=np.int64), len(lengths))

    def _append_document_ends(self, ends: np.ndarray, sequences: int) -> None:
        """Record `sequences` new sequences, and documents that end after `ends` of them. ends: int64 [documents]"""
        self._documents.write((self.num_sequences + ends).tobytes())
        self.num_documents += len(ends)
        self.num_sequences += sequences
        self._document_end = self.num_sequences

    def _assert_between_documents(self) -> None:
        assert self._document_end == self.num_sequences, "the last document was not ended"

    def _write_ids(self, ids: np.ndarray) -> None:
        """Convert ids [tokens] to the pair's dtype and append them to the .bin file. `DataError` if they do not fit."""
        if ids.ndim != 1:
            raise DataError(f"{self.prefix}: a sequence has one dimension, not {ids.ndim}")
        if ids.dtype != self.dtype:
            self._check_ids_fit_dtype(ids)
            ids = ids.astype(self.dtype)
        content = memoryview(np.ascontiguousarray(ids)).cast("B") if len(ids) else b""
        self._bin.write(content)
        self._checksum.update(content)
        self.num_tokens += len(ids)

    def _check_ids_fit_dtype(self, ids: np.ndarray) -> None:
        """Raise `DataError` for ids that are no integers or out of range; to a float dtype any number may go."""
        if len(ids) == 0 or self.dtype.kind == "f":
            return
        if ids.dtype.kind not in "iu":
            raise DataError(f"{self.prefix}: ids of type {ids.dtype} are no integers, as {self.dtype} holds them")
        allowed = np.iinfo(self.dtype)
        low, high = int(ids.min()), int(ids.max())
        if low < allowed.min or high > allowed.max:
            raise DataError(
                f"{self.prefix}: id {low if low < allowed.min else high} does not fit {self.dtype}, which "
                f"holds {allowed.min} to {allowed.max}; the vocabulary size given is too small"
            )

    def add_index(self, prefix: str | Path) -> None:
        """Append every document of another pair of the same dtype."""
        other = IndexedDataset(prefix, multimodal=self._multimodal)
        if other.dtype != self.dtype:
            raise DataError(
                f"{idx_path(prefix)} holds ids of type {other.dtype}, not {self.dtype} like the pairs "
                "before it; tokenize all parts with the same vocabulary"
            )
        self._assert_between_documents()
        for first in range(0, len(other), COPY_ENTRIES):
            self._lengths.write(other.sequence_lengths[first : first + COPY_ENTRIES].tobytes())
            if other.sequence_modes is not None:
                self._modes.write(other.sequence_modes[first : first + COPY_ENTRIES].tobytes())
        for start in range(0, other.num_bytes, COPY_BYTES):
            piece = other.read_raw_bytes(start, min(COPY_BYTES, other.num_bytes - start))
            self._bin.write(piece)
            self._checksum.update(piece)
        self.num_tokens += other.num_tokens
        self._append_document_ends(other.document_indices[1:], len(other))

    def sync_to_resume_point(self) -> BuilderResumePoint:
        """Fsync everything written; return how much it is, from where to go on later. Call between documents."""
        self._assert_between_documents()
        for file in self._files:
            fsync_file(file)
        return BuilderResumePoint(self.num_documents, self.num_sequences, self.num_tokens)

    def close_unfinished(self) -> None:
        """Close the files and leave them under the names they have."""
        for file in self._files:
            with suppress(OSError):  # what is wanted was synced; a full disk does not take the rest
                file.close()

    def finish(self) -> None:
        """Write the index and the sidecar, and put the files under their final names, the index last."""
        self.sync_to_resume_point()
        self.close_unfinished()
        checksum = xxhash.xxh3_128()
        with open_for_writing(self._temporary_name("idx")) as index:
            for piece in self._index_file_chunks():
                index.write(piece)
                checksum.update(piece)
            fsync_file(index)
        facts = DatasetSidecar(
            self.num_documents,
            self.num_sequences,
            self.num_tokens,
            str(self.dtype),
            self._tokenizer,
            self._level,
            self._shard,
            {"bin": f"{CHECKSUM}:{self._checksum.hexdigest()}", "idx": f"{CHECKSUM}:{checksum.hexdigest()}"},
        )
        with open_for_writing(self._temporary_name("json")) as file:
            file.write(sidecar.encode_sidecar(facts))
            fsync_file(file)
        # Between the renames the old index must not stand beside the new ids: better no pair than a mixed one.
        Path(idx_path(self.prefix)).unlink(missing_ok=True)
        for part, path in (("bin", bin_path), ("json", sidecar_path), ("idx", idx_path)):
            os.replace(self._temporary_name(part), path(self.prefix))
        fsync_parent_folder(self.prefix)
        self.discard()

    def _index_file_chunks(self) -> Iterator[bytes | np.ndarray]:
        """Yield the content of the .idx file, from front to back."""
        yield HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.num_sequences, self.num_documents + 1)
        yield from _read_array_chunks(self._temporary_name("lengths"), np.int32)
        end = 0
        for lengths in _read_array_chunks(self._temporary_name("lengths"), np.int32):
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            yield np.concatenate([np.full(1, end, np.int64), ends[:-1]])
            end = int(ends[-1])
        yield bytes(8)
        yield from _read_array_chunks(self._temporary_name("documents"), np.int64)
        yield from _read_array_chunks(self._temporary_name("modes"), np.int8)

    def discard(self) -> None:
        """Remove the unfinished files; after `finish` there is nothing."""
        self.close_unfinished()
        for part in ("bin", "lengths", "modes", "documents", "json", "idx"):
            Path(self._temporary_name(part)).unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()


def _read_array_chunks(path: str, dtype: type) -> Iterator[np.ndarray]:
    """Yield the values of a binary file, as arrays of `dtype` of at most COPY_ENTRIES values."""
    with open(path, "rb") as file:
        piece: np.ndarray
        while len(piece := np.fromfile(file, dtype, COPY_ENTRIES)):
            yield piece


def _resume_file_hasher(path: str, size: int) -> xxhash.xxh3_128:
    """Return an xxh3 hasher of the first `size` bytes of a file, to be updated further."""
    checksum = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while size:
            piece = file.read(min(size, COPY_BYTES))
            assert piece, "the file was cut to this size"
            checksum.update(piece)
            size -= len(piece)
    return checksum
