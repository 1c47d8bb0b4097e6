"""All file system operations of saving, loading and deleting checkpoints.

`DISK` performs them. Tests replace it by another `FileSystem`: one that fails, is slow or full, or that knows what would
remain after a power failure at any moment. Every failure is an `OSError`. Needs no torch.
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

_AT_ONCE = 1 << 24  # bytes given to one write
POPULATE_READ, POPULATE_WRITE = 22, 23  # MADV_..., which Python's mmap does not name


@dataclass(frozen=True, slots=True, order=True)
class FolderEntry:
    """A name in a folder. is_folder: it is a folder, or a link to one."""

    name: str
    is_folder: bool
    is_link: bool


class OpenFile:
    """An open file of this machine. handle: its descriptor. path: named in errors, which the system's do not."""

    def __init__(self, handle: int, path: Path) -> None:
        self._handle, self._path = handle, path

    def write(self, content: memoryview) -> int:
        """Append bytes; returns how many were written, which may be fewer than given."""
        try:
            return os.write(self._handle, content)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def read_into(self, content: memoryview, place: int) -> int:
        """Fill `content` with the bytes from offset `place`; returns how many were read, 0 at the end of the file."""
        return os.preadv(self._handle, [content], place)

    def sync(self) -> None:
        """Return once the written bytes are durable, that is, survive a power failure."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


class FileSystem:
    """The file system of this machine."""

    def make_folder(self, path: Path, *, durable: bool) -> None:
        """Create a folder and its parents, if they do not exist. durable: they survive a power failure."""
        if path.is_dir():
            return
        if not path.parent.is_dir():
            self.make_folder(path.parent, durable=durable)
        path.mkdir(exist_ok=True)
        if durable:
            self.sync_folder(path.parent)

    def list_entries(self, path: Path) -> list[FolderEntry]:
        """Return the entries of a folder, by name."""
        with os.scandir(path) as entries:
            return sorted(FolderEntry(entry.name, _is_folder(entry), entry.is_symlink()) for entry in entries)

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes."""
        return path.stat().st_size

    def create(self, path: Path) -> OpenFile:
        """Create or truncate a file and open it for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        return OpenFile(os.open(path, flags, 0o666), path)

    def open_for_reading(self, path: Path) -> OpenFile:
        """Open a file for reading; a pipe, which would block, is refused."""
        return OpenFile(_open_regular_file(path), path)

    def map(self, path: Path) -> memoryview:
        """Memory-map a file and return its bytes: pages are read when accessed. Changes stay private to this process."""
        file = _open_regular_file(path)
        try:
            if not os.fstat(file).st_size:
                return memoryview(bytearray())
            return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(file)

    def prefault_range(self, content: memoryview, start: int, length: int) -> None:
        """Read the range [start, start + length) of a mapping into memory, so that an unreadable page raises `OSError`
        here; accessing it would kill the process. On systems without support, pages are read when they are accessed.
        """
        if not length or not madvise_range(content, start, length, POPULATE_READ):
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):  # a kernel before 5.14
            number = errno.EIO if number == errno.EFAULT else number
            raise OSError(number, os.strerror(number))

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file or folder atomically. A file with the new name is replaced; a folder with it must not exist."""
        os.rename(path, to)

    def symlink(self, path: Path, to: Path) -> None:
        """Make `path` a symbolic link to `to`, in the same folder, replacing an older link atomically."""
        made = path.with_suffix(".tmp")
        if os.path.lexists(made):
            os.unlink(made)
        os.symlink(to.name, made)
        os.rename(made, path)

    def remove(self, path: Path) -> None:
        """Delete a file or a link."""
        os.unlink(path)

    def remove_empty_folder(self, path: Path) -> None:
        """Delete an empty folder."""
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        """Return once the names in a folder are durable, that is, survive a power failure."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that keep names safe by themselves
                raise
        finally:
            os.close(handle)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to one; a link that loops is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _open_regular_file(path: Path) -> int:
    """Open a file for reading; refuses a pipe, which would block."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return file


DISK = FileSystem()


def madvise_range(content: memoryview, start: int, length: int, advice: int) -> int:
    """Call madvise on a range of mapped memory without holding the GIL; returns 0 on success."""
    if sys.platform != "linux":
        return 0
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    address = ctypes.addressof(ctypes.c_char.from_buffer(content))
    return ctypes.CDLL(None, use_errno=True).madvise(
        ctypes.c_void_p(address + first), ctypes.c_size_t(start + length - first), ctypes.c_int(advice)
    )


def write_all_bytes(file: OpenFile, content: memoryview) -> None:
    """Write all bytes to the file, in as many calls as needed. Raises `OSError` if a write takes none."""
    done = 0
    while done < len(content):
        taken = file.write(content[done : done + _AT_ONCE])
        if taken <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        done += taken


def write_and_fsync_file(files: FileSystem, path: Path, content: bytes) -> None:
    """Write a whole file and make its content durable; not its name, for which the folder must be synced."""
    with closing(files.create(path)) as file:
        write_all_bytes(file, memoryview(content))
        file.sync()


def read_file(files: FileSystem, path: Path) -> bytes:
    """Return the whole content of a small file."""
    content = bytearray(files.size(path))
    with closing(files.open_for_reading(path)) as file:
        done = 0
        while done < len(content):
            there = file.read_into(memoryview(content)[done:], done)
            if not there:
                break
            done += there
    return bytes(content[:done])


def remove_tree(files: FileSystem, path: Path) -> None:
    """Delete a folder and its content. Links are deleted, not followed."""
    for entry in files.list_entries(path):
        if entry.is_folder and not entry.is_link:
            remove_tree(files, path / entry.name)
        else:
            files.remove(path / entry.name)
    files.remove_empty_folder(path)
