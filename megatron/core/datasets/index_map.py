"""From sequences on disk to fixed-length samples: three arrays, the same as Megatron's bit for bit.

Lay the sequences of a split end to end, once per epoch, in the order of the *document index*. Every L tokens a sample
begins; it also takes the next sample's first token, as the label of its last. The *sample index* holds where each
begins, as (place in the document index, token within that sequence). The *shuffle index* says which of them comes k-th.
When the last epoch is needed only in part, it is shuffled by itself, so that early samples do not draw on it.

    one RandomState(seed):  shuffle documents  [, shuffle the last epoch's]  ->  shuffle samples  [, the last epoch's]

`load_or_build_arrays` keeps such arrays on disk. Of the processes of one machine the first to come builds, and the others wait
for it. Files appear by renaming and hold the same bytes whichever process built them, so processes of several machines may race;
a process that finds a file missing, cut short or with another content builds it again.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from megatron.core.datasets.storage import DataError, atomic_file

LAST_EPOCH_SHARE = 0.80  # a last epoch of which less than this is needed is shuffled by itself

WALKED_AT_ONCE = 2**16
CHECKED_BYTES = 2**30  # larger files are compared by header and size alone: reading them would hold up every start
LONGEST_WAIT = 600  # seconds for which another process may build
LOOK_AGAIN = 0.02
LEFT_BEHIND_AFTER = 24 * 3600  # age in seconds at which a temporary file belongs to no one

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[tuple[int | None, ...], type]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpochAndSampleCounts:
    """How often the sequences are gone through, and how many samples that gives."""

    epochs: int
    samples: int
    samples_before_last: int  # below `samples` when the last epoch is shuffled by itself

    @property
    def separates_last_epoch(self) -> bool:
        """Whether the last epoch is shuffled by itself."""
        return self.samples_before_last < self.samples


def plan_epochs(
    tokens: int, num_samples: int | None, *, sequence_length: int, keep_partial: bool = False
) -> EpochAndSampleCounts:
    """Plan the fewest epochs of `tokens` tokens that give `num_samples` samples; one epoch if that is None.

    keep_partial: count a last sample that is not full.
    """
    assert tokens > 0, "a split without tokens has no samples"
    needed = tokens if num_samples is None else num_samples * sequence_length + 1
    epochs = max(1, -(-needed // tokens))
    available = epochs * tokens - 1  # the last token is only a label
    samples = -(-available // sequence_length) if keep_partial else available // sequence_length
    if epochs == 1 or num_samples is None:
        return EpochAndSampleCounts(epochs, samples, samples)
    before = ((epochs - 1) * tokens - 1) // sequence_length
    per_epoch = (tokens - 1) // sequence_length
    separate = num_samples - before < int(LAST_EPOCH_SHARE * per_epoch)
    return EpochAndSampleCounts(epochs, samples, before if separate else samples)


def build_gpt_indices(
    lengths: np.ndarray, plan: EpochAndSampleCounts, *, first: int, sequence_length: int, seed: int
) -> Arrays:
    """The three index arrays of the sequences [first, first + len(lengths)) whose lengths are given.

    Returns document_index [epochs * len(lengths)], sample_index [samples + 1, 2], shuffle_index [samples].
    """
    assert plan.samples > 0, "a plan without samples has no index"
    random = np.random.RandomState(seed)
    document_index = _document_index(len(lengths), plan, first, random)
    sample_index = _sample_index(lengths, document_index, plan, first=first, sequence_length=sequence_length)
    shuffle_index = _shuffle_index(plan, random)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def gpt_index_shapes(num_sequences: int, plan: EpochAndSampleCounts) -> Shapes:
    """Shape and type of each array of `build_gpt_indices`."""
    documents = num_sequences * plan.epochs
    return {
        "document_index": ((documents,), np.int32),
        "sample_index": ((plan.samples + 1, 2), _sample_index_dtype(documents)),
        "shuffle_index": ((plan.samples,), _shuffle_index_dtype(plan.samples)),
    }


def _sample_index_dtype(num_documents: int) -> type:
    # Offsets within a sequence always fit, since the format's lengths are int32.
    return np.int32 if num_documents <= np.iinfo(np.int32).max else np.int64


def _shuffle_index_dtype(samples: int) -> type:
    return np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64


def _document_index(count: int, plan: EpochAndSampleCounts, first: int, random: np.random.RandomState) -> np.ndarray:
    """Return the shuffled sequence numbers of all epochs, the last apart if so planned. int32 [epochs * count]"""
    together = plan.epochs - 1 if plan.separates_last_epoch else plan.epochs
    ids = np.arange(first, first + count, dtype=np.int32)
    index = np.tile(ids, plan.epochs)
    random.shuffle(index[: together * count])
    if plan.separates_last_epoch:
        random.shuffle(index[together * count :])
    return index


def _sample_index(
    lengths: np.ndarray, document_index: np.ndarray, plan: EpochAndSampleCounts, *, first: int, sequence_length: int
) -> np.ndarray:
    """Where each sample begins and, last, where the last one ends. lengths: of the sequences from `first` on."""
    # The first sample begins at (0, 0) even when the first sequence is empty.
    index: np.ndarray = np.zeros((plan.samples + 1, 2), _sample_index_dtype(len(document_index)))
    lengths = np.array(lengths)  # a file's are not aligned, which makes every look-up slow
    total = plan.epochs * int(lengths.sum(dtype=np.int64))
    end, placed = 0, 1
    # Some sequences at a time: what is computed on the way stays in the processor's cache.
    for at in range(0, len(document_index), WALKED_AT_ONCE):
        here = lengths.take(document_index[at : at + WALKED_AT_ONCE] - first)
        ends = end + np.cumsum(here, dtype=np.int64)
        end = int(ends[-1])
        full = plan.samples if end == total else max(end - 1, 0) // sequence_length
        following = 1 + min(full, plan.samples)
        starts = np.arange(placed, following, dtype=np.int64) * sequence_length
        # A last sample that is not full ends with the last token, its last label.
        np.minimum(starts, total - 1, out=starts)
        place = np.searchsorted(ends, starts, side="right")
        index[placed:following, 0] = at + place
        index[placed:following, 1] = starts - ends[place] + here[place]
        placed = following
        if placed > plan.samples:
            break
    return index


def _shuffle_index(plan: EpochAndSampleCounts, random: np.random.RandomState) -> np.ndarray:
    """Return the shuffled order of the samples, [samples]; those of the last epoch apart if the plan says so."""
    index: np.ndarray = np.arange(plan.samples, dtype=_shuffle_index_dtype(plan.samples))
    random.shuffle(index[: plan.samples_before_last])
    if plan.separates_last_epoch:
        random.shuffle(index[plan.samples_before_last :])
    return index


@dataclass(frozen=True, slots=True)
class IndexCacheFolder:
    """Where index arrays are kept; `folder` None: nowhere.

    chosen: the user named the folder, so that failing to write there is an error. Otherwise the arrays are only used.
    """

    folder: Path | None
    chosen: bool = True

    @staticmethod
    def from_flag(data_cache_path: str | None, *, otherwise: Path | None) -> IndexCacheFolder:
        """Return the folder of --data-cache-path, else `otherwise`."""
        if data_cache_path:
            return IndexCacheFolder(Path(data_cache_path))
        return IndexCacheFolder(otherwise, chosen=False)

    def raise_or_warn_unwritable(self, error: OSError) -> None:
        """Raise `DataError` if the user chose the folder, else warn, that it cannot be written."""
        message = f"index cache {self.folder} cannot be written: {error.strerror}"
        if self.chosen:
            raise DataError(f"{message}; choose a folder with --data-cache-path") from error
        logger.warning("%s; each process builds its own (--data-cache-path chooses another folder)", message)


def hash_arrays(*arrays: np.ndarray) -> str:
    """Return a hash of the dtypes, shapes and contents of arrays of any shape, as a key of what an index is built from."""
    total = xxhash.xxh3_128()
    for array in arrays:
        total.update(f"{array.dtype.str}{array.shape}".encode())
        total.update(array.view(np.uint8))
    return total.hexdigest()


def load_or_build_arrays(
    cache: IndexCacheFolder, name: str, description: Mapping[str, Any], shapes: Shapes, build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays that `description` determines: mapped from the cache, or built and stored there.

    name: name of the files, behind the hash of the description. shapes: [...] of each array; a None in a shape is a
    size that is known only after building.
    """
    if cache.folder is None:
        return build()
    text = json.dumps(description, indent=4)
    stem = f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{name}"
    entry = _IndexCacheEntry(cache.folder, stem, text, shapes)
    result = entry.load()
    if result is not None:
        return result
    with ExitStack() as stack:
        try:
            cache.folder.mkdir(parents=True, exist_ok=True)
            lock = _lock_file(entry.path("lock"))
        except OSError as error:
            cache.raise_or_warn_unwritable(error)
            return build()
        if lock is not None:
            stack.callback(_remove_lock_file, entry.path("lock"), lock)
            result = entry.load()  # by the process that held the lock before
            if result is not None:
                return result
        arrays = build()
        try:
            entry.write_arrays(arrays)
        except OSError as error:
            cache.raise_or_warn_unwritable(error)
            return arrays
    # Processes of one machine share the pages of the mapped files; a built copy would be each one's own.
    return entry.load() or arrays


@dataclass(frozen=True, slots=True)
class _IndexCacheEntry:
    """The files of one description: an .npy file an array, and, written last, the description with their checksums."""

    folder: Path
    stem: str
    text: str
    shapes: Shapes

    def path(self, part: str) -> Path:
        """The file of an array, of the description, or the lock."""
        return self.folder / f"{self.stem}-{part}"

    def write_arrays(self, arrays: Arrays) -> None:
        """Write all files; each appears whole."""
        message = {}
        for key, array in arrays.items():
            assert self._has_declared_shape(key, array), f"{key} is as announced"
            with atomic_file(self.path(f"{key}.npy"), durable=array.nbytes > CHECKED_BYTES) as file:
                np.save(file, np.ascontiguousarray(array))
            message[key] = {"shape": array.shape, "checksum": xxhash.xxh3_128(np.ascontiguousarray(array)).hexdigest()}
        with atomic_file(self.path("description.txt"), durable=False) as file:
            file.write(f"{self.text}\n{json.dumps(message)}".encode())
        for left in self.folder.glob(f"{glob.escape(self.stem)}-*.tmp"):  # by processes that were killed
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > LEFT_BEHIND_AFTER:
                    left.unlink()

    def load(self) -> Arrays | None:
        """Return the arrays, memory-mapped; None if they are not cached, or damaged, which is logged."""
        try:
            message = self._array_descriptions()
            return None if message is None else {key: self._map_array(key, **message[key]) for key in self.shapes}
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning(
                "index cache %s is damaged and is built again: %s",
                self.folder / self.stem,
                f"no {error}" if isinstance(error, KeyError) else error,
            )
            return None

    def _array_descriptions(self) -> dict[str, Any] | None:
        """Return each array's shape and checksum; None without a description file. `ValueError` if it is another's."""
        path = self.path("description.txt")
        if not path.is_file():
            return None
        text, _, message = path.read_text().rpartition("\n")
        if text != self.text:
            raise ValueError(f"{path.name} has another content")
        return json.loads(message)

    def _map_array(self, key: str, *, shape: Sequence[int], checksum: str) -> np.ndarray:
        """Memory-map one array. `ValueError` if size, shape, type or (up to CHECKED_BYTES) checksum is another."""
        path = self.path(f"{key}.npy")
        mapped = np.load(path, mmap_mode="r")
        whole = path.stat().st_size == mapped.offset + mapped.nbytes and mapped.flags.c_contiguous
        if not whole or mapped.shape != tuple(shape) or not self._has_declared_shape(key, mapped):
            raise ValueError(
                f"{path.name} is not an array of shape {tuple(shape)} and type {self.shapes[key][1].__name__}"
            )
        if mapped.nbytes <= CHECKED_BYTES and xxhash.xxh3_128(mapped).hexdigest() != checksum:
            raise ValueError(f"{path.name} has another checksum than it was written with")
        return mapped.view(np.ndarray)

    def _has_declared_shape(self, key: str, array: np.ndarray) -> bool:
        """Return whether an array has the dtype and shape declared for its key (None: any size)."""
        shape, dtype = self.shapes[key]
        return (
            array.dtype == dtype
            and array.ndim == len(shape)
            and all(size in (None, result) for size, result in zip(shape, array.shape))
        )


def _lock_file(path: Path) -> IO[bytes] | None:
    """Take the lock file that no other process of this machine holds, waiting for it; it is released when this process
    dies.

    None after LONGEST_WAIT seconds, or on a file system without locks: then each process builds for itself, which costs
    time and memory only. `OSError` if the file cannot be made.
    """
    began = time.monotonic()
    while time.monotonic() - began < LONGEST_WAIT:
        file = open(path, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == os.stat(path).st_ino:
                return file
            file.close()  # the holder before us removed it
        except FileNotFoundError:
            file.close()
        except BlockingIOError:
            file.close()
            time.sleep(LOOK_AGAIN)
        except OSError:
            file.close()
            return None
    logger.warning("another process has held %s for %d s; this one builds for itself", path, LONGEST_WAIT)
    return None


def _remove_lock_file(path: Path, lock: IO[bytes]) -> None:
    """Remove the lock file and release the lock."""
    path.unlink(missing_ok=True)
    lock.close()
