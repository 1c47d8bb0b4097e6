"""Where the bytes of data files are: on a file system, or in object storage behind fsspec.

A path with `://` in it (s3://bucket/x, gs://, memory://) names an object; everything else is a file. Small objects that
are read whole, such as an index, are kept as files in a local cache. Large ones are read by ranges:

    mmap_file     file -> array of its bytes, read as they are touched
    MappedFile   the same of a file that may be truncated while it is read
    FileRangeReader   file -> ranges, each with a system call of its own
    ObjectBlockReader  object -> ranges, out of the blocks of 1 MiB that were fetched last

fsspec needs one package more for each kind of storage (s3fs for s3://, gcsfs for gs://) and finds the credentials where
that package looks for them.
"""

from __future__ import annotations

import hashlib
import io
import logging
import mmap
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import numpy as np

READ_PAUSES = (1, 5, 25)  # seconds before each further try of a read that failed, as network file systems may
BLOCK_BYTES = 2**20
KEPT_BLOCKS = 16
COPY_BYTES = 16 * 2**20
WRITE_BYTES = 2**20

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


class DataError(Exception):
    """A data file that cannot be used. The message names the file, what was found and what was expected."""


def is_remote_path(path: str | Path) -> bool:
    """Whether a path or prefix names objects of a storage service rather than files."""
    return "://" in str(path)


def temporary_name(path: str | Path) -> str:
    """A name beside `path` that no other process, on any machine, uses."""
    return f"{path}.{uuid.uuid4().hex}.tmp"


@contextmanager
def errors_name_file(path: str | Path) -> Iterator[None]:
    """Within: an `OSError` that names no file, as that of a full disk, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class _NamedFile(io.FileIO):
    """A file whose failed writes name it, as `open` names what it cannot open."""

    def write(self, content: Any, /) -> int:
        """Write bytes; return how many were written."""
        with errors_name_file(str(self.name)):
            return super().write(content)


def open_for_writing(path: str | Path, mode: Literal["wb", "r+b"] = "wb") -> io.BufferedRandom | io.BufferedWriter:
    """Open a file for writing whose errors name it, a full disk's too."""
    raw = _NamedFile(path, mode)
    return io.BufferedRandom(raw, WRITE_BYTES) if mode == "r+b" else io.BufferedWriter(raw, WRITE_BYTES)


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all. An `OSError` names it."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fsync_file(file: IO[bytes]) -> None:
    """Flush a file and wait until it is on disk."""
    with errors_name_file(str(file.name)):
        file.flush()
        os.fsync(file.fileno())


def fsync_parent_folder(path: str | Path) -> None:
    """Fsync the folder that holds `path`, so that renames in it are on disk; do nothing where that is not possible."""
    try:
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(folder)
    except OSError:
        pass
    finally:
        os.close(folder)


@contextmanager
def atomic_file(path: str | Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file for writing that is renamed to `path` when the block ends, and removed if it raises.

    durable: fsync it first. Without that, a power failure may leave a damaged file, for data that the reader can check.
    """
    temporary = temporary_name(path)
    try:
        with errors_name_file(path), open(temporary, "wb") as file:
            yield file
            if durable:
                fsync_file(file)
        os.replace(temporary, path)
        if durable:
            fsync_parent_folder(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_text_lines(path: str | Path) -> list[str]:
    """Return the lines of a UTF-8 file, without their ends and a byte order mark. Raises `OSError` or `UnicodeDecodeError`."""
    return split_text_lines(Path(path).read_bytes().decode("utf-8-sig"))


def split_text_lines(text: str) -> list[str]:
    """Return the lines of a text, which end at newlines alone.

    `str.splitlines` would also end them at characters that stand within JSON strings, such as U+2028 and U+0085.
    """
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def read_with_retries(read: Callable[[], Answer], name: str) -> Answer:
    """Return the result of `read`, called again after a pause (READ_PAUSES) if it fails as busy storage does.

    `DataError` that names `name` if the last try fails, and at once for errors that a retry cannot cure.
    """
    for pause in (*READ_PAUSES, None):
        try:
            return read()
        except DataError:
            raise
        except (ImportError, ValueError) as error:
            raise DataError(
                f"{name} cannot be read: {error}; storage other than files needs its fsspec package, such "
                "as s3fs for s3:// and gcsfs for gs://"
            ) from error
        except Exception as error:  # each storage service has errors of its own
            final = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError))
            if pause is None or final:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise DataError(
                    f"{name} cannot be opened: {reason}" if final else f"{name} cannot be read: {reason}"
                ) from error
            logger.warning("%s cannot be read (%s); next try in %d s", name, error, pause)
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _fsspec_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. fsspec keeps one for each process and thread."""
    import fsspec  # the local path has no use for it, and tools start without it

    return fsspec.core.url_to_fs(url)


@dataclass(frozen=True, slots=True)
class RemoteObjectState:
    """One state of an object. version: differs after each change, in the words of the storage service."""

    url: str
    size: int
    version: str


def stat_remote_object(url: str) -> RemoteObjectState:
    """Return size and version of a remote object. `DataError` if there is none or it cannot be reached."""

    def query_object_state() -> RemoteObjectState:
        system, path = _fsspec_file_system(url)
        return RemoteObjectState(url, int(system.info(path)["size"]), str(system.ukey(path)))

    return read_with_retries(query_object_state, url)


def fetch_object_range(url: str, start: int, end: int) -> bytes:
    """Return bytes [start, end) of a remote object. `DataError` if it has become shorter."""

    def read_range() -> bytes:
        system, path = _fsspec_file_system(url)
        content = system.cat_file(path, start=start, end=end)
        if len(content) != end - start:
            raise DataError(f"{url} ends before byte {end}; it has become shorter since it was opened")
        return content

    return read_with_retries(read_range, f"{url} at byte {start}")


def file_or_object_size(path: str) -> int:
    """Return the size of a file or remote object in bytes. `DataError` if there is none."""
    if is_remote_path(path):
        return stat_remote_object(path).size
    try:
        return os.stat(path).st_size
    except (OSError, ValueError) as error:
        stem, suffix = os.path.splitext(os.path.splitext(path)[0])
        hint = f"; give the prefix without the ending: {stem}" if suffix in (".bin", ".idx") else ""
        raise DataError(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}{hint}") from error


def read_start_if_exists(path: str, limit: int) -> bytes | None:
    """Return the first `limit` + 1 bytes of a file or remote object (all, if it has fewer); None if it does not exist."""
    if not is_remote_path(path):
        try:
            with open(path, "rb") as file:
                return file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error

    def read_object_start() -> bytes | None:
        system, place = _fsspec_file_system(path)
        if not system.exists(place):
            return None
        return system.cat_file(place, start=0, end=min(limit + 1, int(system.info(place)["size"])))

    return read_with_retries(read_object_start, path)


def mmap_file(path: str) -> np.ndarray:
    """Map a file's bytes read-only: uint8 [bytes], a plain array, since slices of `np.memmap` are slow."""
    if os.stat(path).st_size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)


def read_whole_file(path: str, cache: str | Path | None) -> np.ndarray:
    """Return all bytes of a file or object, uint8 [bytes].

    An object is cached as a file in the folder `cache`, else kept in memory.
    """
    if not is_remote_path(path):
        return mmap_file(path)
    if cache is not None:
        return mmap_file(str(cached_local_copy(path, Path(cache))))
    size = file_or_object_size(path)
    content = np.empty(size, np.uint8)
    for start in range(0, size, COPY_BYTES):
        end = min(start + COPY_BYTES, size)
        content[start:end] = np.frombuffer(fetch_object_range(path, start, end), np.uint8)
    return content


def cached_local_copy(url: str, folder: Path) -> Path:
    """Return a file in `folder` with a remote object's bytes, downloaded unless its present version is there already.

    The name depends on URL, size and version, and the file appears whole, so any number of processes may call this.
    `DataError` if the object changes meanwhile or the folder cannot be written.
    """
    state = stat_remote_object(url)
    name = hashlib.sha256(repr(state).encode()).hexdigest()[:32]
    copy = folder / f"{name}-{url.rsplit('/', 1)[-1]}"
    if copy.is_file() and copy.stat().st_size == state.size:
        return copy
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(copy) as file:
            for start in range(0, state.size, COPY_BYTES):
                file.write(fetch_object_range(url, start, min(start + COPY_BYTES, state.size)))
            if stat_remote_object(url) != state:
                raise DataError(f"{url} changed while it was fetched; start again when it is complete")
    except OSError as error:
        raise DataError(
            f"{url} cannot be kept in {folder}: {error.strerror}; choose a folder with --object-storage-cache-path"
        ) from error
    return copy


class MappedFile:
    """A mapped file that is looked at again before each use: where it was cut, touching its pages would kill the process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._map: mmap.mmap | None = None  # an empty file cannot be mapped
        if os.stat(path).st_size:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._map or b"")

    def read(self, start: int, count: int) -> memoryview:
        """Return `count` bytes from `start` on, to be used at once and not kept. `DataError` if the file was truncated."""
        size = self._map.size() if self._map is not None else 0  # of the file as it is now: 0.3 us
        if size < len(self._bytes):
            raise DataError(
                f"{self.path} has {size} bytes, and had {len(self._bytes)} when it was opened: it was cut or is written anew "
                "while it is read; put the whole file back and start again, and replace files by renaming"
            )
        return self._bytes[start : start + count]


class FileRangeReader:
    """Ranges of a file, each read with its own system call; safe for threads."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on."""

        def pread_fully() -> bytes:
            content = bytearray()
            while len(content) < count:
                piece = os.pread(self._file.fileno(), count - len(content), start + len(content))
                if not piece:
                    raise DataError(
                        f"{self.path} ends before byte {start + count}; it has become shorter since it was opened"
                    )
                content += piece
            return bytes(content)

        return read_with_retries(pread_fully, f"{self.path} at byte {start}")


class ObjectBlockReader:
    """Ranges of an object, out of blocks of which the last few are kept: 16 MiB; safe for threads."""

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.size = size
        # The cache holds no lock while a block is fetched: threads wait for the network side by side.
        self._cached_block = lru_cache(KEPT_BLOCKS)(self._fetch_block)

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on."""
        end = start + count
        if end > self.size:
            raise DataError(f"{self.url} ends before byte {end}; it has {self.size} bytes")
        blocks = range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        if len(blocks) > KEPT_BLOCKS // 2:  # one request, and the kept blocks stay
            return fetch_object_range(self.url, start, end)
        content = b"".join(self._cached_block(number) for number in blocks)
        skipped = start - blocks.start * BLOCK_BYTES
        return content[skipped : skipped + count]

    def _fetch_block(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        return fetch_object_range(self.url, start, min(start + BLOCK_BYTES, self.size))
