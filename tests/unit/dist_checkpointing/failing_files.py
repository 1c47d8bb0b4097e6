"""The machine's file system, with faults."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

from megatron.core.dist_checkpointing.files import DISK, FileSystem, OpenFile


class Faulty(FileSystem):
    """Fails, is slow, or takes less than it is given, in files or folders whose path holds `where`.

    fault: the number of an error. on: the operation that has it. after: how many of these go well before. at_once: most
    bytes that a write takes. gate: writes wait for it.
    """

    def __init__(
        self,
        where: str = "",
        *,
        fault: int | None = None,
        on: str = "write",
        after: int = 0,
        at_once: int | None = None,
        delay: float = 0.0,
        gate: threading.Event | None = None,
    ) -> None:
        self.where, self.fault, self.on, self.after = where, fault, on, after
        self.at_once, self.delay, self.gate = at_once, delay, gate
        self.written = 0

    def strike(self, operation: str, path: Path) -> None:
        """Fail if it is time."""
        if self.fault is not None and operation == self.on and self.where in str(path):
            if self.after == 0:
                raise OSError(self.fault, os.strerror(self.fault), str(path))
            self.after -= 1

    def make_folder(self, path: Path, *, durable: bool) -> None:
        self.strike("make_folder", path)
        super().make_folder(path, durable=durable)

    def create(self, path: Path) -> OpenFile:
        self.strike("create", path)
        return FaultyFile(self, path, super().create(path))

    def rename(self, path: Path, to: Path) -> None:
        self.strike("rename", path)
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        self.strike("remove", path)
        super().remove(path)

    def map(self, path: Path) -> memoryview:
        self.strike("map", path)
        return super().map(path)

    def prefault_range(self, content: memoryview, start: int, length: int) -> None:
        self.strike("prefault_range", Path())
        super().prefault_range(content, start, length)

    def sync_folder(self, path: Path) -> None:
        self.strike("sync_folder", path)
        super().sync_folder(path)

    def open_for_reading(self, path: Path) -> FaultyFile:
        self.strike("open", path)
        return FaultyFile(self, path, super().open_for_reading(path))


class FaultyFile:
    """A file of such a file system."""

    def __init__(self, files: Faulty, path: Path, file: object) -> None:
        self.files, self.path, self.file = files, path, file

    def write(self, content: memoryview) -> int:
        self.files.strike("write", self.path)
        if self.files.gate is not None:
            assert self.files.gate.wait(30), "the test opens the gate"
        time.sleep(self.files.delay)
        content = content[: self.files.at_once] if self.files.at_once is not None else content
        self.files.written += len(content)
        return self.file.write(content)

    def read_into(self, content: memoryview, place: int) -> int:
        self.files.strike("read", self.path)
        return self.file.read_into(content, place)

    def sync(self) -> None:
        self.files.strike("sync", self.path)
        self.file.sync()

    def close(self) -> None:
        self.file.close()


FULL, BROKEN, READ_ONLY = errno.ENOSPC, errno.EIO, errno.EROFS
SOUND = DISK
