"""The few things that saving, loading and deleting checkpoints do to files. All of them pass here, and nowhere else.

`DISK` does them. A test puts another `Files` in its place: one that fails, is slow or full, or that knows what would be
left if the power went off at any moment. Whatever fails is an `OSError`. Needs no torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_AT_ONCE = 1 << 24  # bytes given to one write
POPULATE_READ, POPULATE_WRITE = 22, 23  # MADV_..., which Python's mmap does not name


@dataclass(frozen=True, slots=True, order=True)
class FolderEntry:
    """A name in a folder. is_folder: what it is, or what a link leads to."""

    name: str
    is_folder: bool
    is_link: bool


class Writing(Protocol):
    """A file that is being written, from its first byte on."""

    def write(self, content: memoryview) -> int:
        """Add bytes at the end; returns how many of them were taken, which may be fewer than given."""

    def sync(self) -> None:
        """Return when what was written would outlive a loss of power."""

    def close(self) -> None:
        """Give the file back."""


class Reading(Protocol):
    """A file that is being read."""

    def read_into(self, content: memoryview, place: int) -> int:
        """Fill a memory with the bytes from `place` on; returns how many there were, 0 at the end of the file."""

    def close(self) -> None:
        """Give the file back."""


class Files(Protocol):
    """A file system."""

    def make_folder(self, path: Path, *, durable: bool) -> None:
        """Make a folder, and those above it; nothing happens when it is there. durable: it outlives a loss of power."""

    def list(self, path: Path) -> list[FolderEntry]:
        """What lies in a folder, by name."""

    def size(self, path: Path) -> int:
        """Bytes in a file."""

    def create(self, path: Path) -> Writing:
        """Begin a file; one that is there loses its content."""

    def open(self, path: Path) -> Reading:
        """Begin to read a file."""

    def map(self, path: Path) -> memoryview:
        """The content of a file without reading it: pages come when they are looked at. Changes stay in this process."""

    def fetch(self, content: memoryview, start: int, length: int) -> None:
        """Bring a range of a mapping into memory. To look at what the disk cannot read would end the process; this fails."""

    def rename(self, path: Path, to: Path) -> None:
        """Give a file or a folder another name, at one blow. A file that has this name goes away; no folder may have it."""

    def remove(self, path: Path) -> None:
        """Delete a file, or a link."""

    def remove_folder(self, path: Path) -> None:
        """Delete an empty folder."""

    def sync_folder(self, path: Path) -> None:
        """Return when the names in a folder would outlive a loss of power."""


class Disk:
    """The file system of the machine."""

    def make_folder(self, path: Path, *, durable: bool) -> None:
        """See `Files`."""
        if path.is_dir():
            return
        if not path.parent.is_dir():
            self.make_folder(path.parent, durable=durable)
        path.mkdir(exist_ok=True)
        if durable:
            self.sync_folder(path.parent)

    def list(self, path: Path) -> list[FolderEntry]:
        """See `Files`."""
        with os.scandir(path) as entries:
            return sorted(FolderEntry(entry.name, _is_folder(entry), entry.is_symlink()) for entry in entries)

    def size(self, path: Path) -> int:
        """See `Files`."""
        return path.stat().st_size

    def create(self, path: Path) -> Writing:
        """See `Files`."""
        return _DiskFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))

    def open(self, path: Path) -> Reading:
        """See `Files`."""
        return _DiskFile(_opened(path))

    def map(self, path: Path) -> memoryview:
        """See `Files`."""
        file = _opened(path)
        try:
            if not os.fstat(file).st_size:
                return memoryview(bytearray())
            return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(file)

    def fetch(self, content: memoryview, start: int, length: int) -> None:
        """See `Files`. Systems that cannot do it read the pages when they are looked at."""
        if not length or not advise(content, start, length, POPULATE_READ):
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):  # a kernel before 5.14
            number = errno.EIO if number == errno.EFAULT else number
            raise OSError(number, os.strerror(number))

    def rename(self, path: Path, to: Path) -> None:
        """See `Files`."""
        os.rename(path, to)

    def remove(self, path: Path) -> None:
        """See `Files`."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """See `Files`."""
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """See `Files`."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that keep names safe by themselves
                raise
        finally:
            os.close(handle)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Of a link: whether it leads to one; a link that loops leads nowhere."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _opened(path: Path) -> int:
    """A file to read. A pipe would be waited for, which this refuses."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return file


class _DiskFile:
    """An open file of the machine."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def write(self, content: memoryview) -> int:
        return os.write(self._handle, content)

    def read_into(self, content: memoryview, place: int) -> int:
        return os.preadv(self._handle, [content], place)

    def sync(self) -> None:
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


DISK = Disk()


def advise(content: memoryview, start: int, length: int, advice: int) -> int:
    """Tell Linux what to do with a range of mapped memory; 0 if that worked. Other threads run meanwhile, unlike with mmap's own."""
    if sys.platform != "linux":
        return 0
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    address = ctypes.addressof(ctypes.c_char.from_buffer(content))
    return ctypes.CDLL(None, use_errno=True).madvise(
        ctypes.c_void_p(address + first), ctypes.c_size_t(start + length - first), ctypes.c_int(advice)
    )


def write_all(file: Writing, content: memoryview) -> None:
    """Add all of the bytes, however many a single write takes."""
    done = 0
    while done < len(content):
        taken = file.write(content[done : done + _AT_ONCE])
        if taken <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        done += taken


def write_file(files: Files, path: Path, content: bytes) -> None:
    """A whole file, durable when this returns, except for its name."""
    with closing(files.create(path)) as file:
        write_all(file, memoryview(content))
        file.sync()


def read_file(files: Files, path: Path) -> bytes:
    """All bytes of a small file."""
    content = bytearray(files.size(path))
    with closing(files.open(path)) as file:
        done = 0
        while done < len(content):
            there = file.read_into(memoryview(content)[done:], done)
            if not there:
                break
            done += there
    return bytes(content[:done])


def remove_tree(files: Files, path: Path) -> None:
    """Delete a folder and everything in it. Links are deleted, not followed."""
    for entry in files.list(path):
        if entry.is_folder and not entry.is_link:
            remove_tree(files, path / entry.name)
        else:
            files.remove(path / entry.name)
    files.remove_folder(path)
