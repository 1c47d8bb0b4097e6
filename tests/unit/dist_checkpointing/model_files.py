"""A file system in memory that knows what would be left after a crash, whether of the process or of the machine.

A process that is killed loses nothing that it handed to the system. A machine that loses power keeps what was synced; of
everything since then it keeps any part: bytes may be there, missing, torn or zero, and changes of names in a folder, each
of which is whole, may be there or not, in any order.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.files import FileSystem, FolderEntry


class Crash(BaseException):
    """The end of the process. No handler of errors sees it."""


class File:
    """Bytes as the system shows them, and as they lie on the disk."""

    def __init__(self) -> None:
        self.content, self.durable = bytearray(), b""

    def after_power_loss(self, kept: str) -> None:
        lost = bytes(self.content)
        if lost != self.durable:
            self.durable = {
                "none": self.durable,
                "all": lost,
                "half": lost[: len(lost) // 2],
                "zeros": bytes(len(lost)),
            }[kept]
        self.content = bytearray(self.durable)


class Folder:
    """Names as the system shows them, as they lie on the disk, and the changes between the two, in order."""

    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}
        self.pending: list[dict[str, File | Folder | None]] = []

    def change(self, **names: File | Folder | None) -> None:
        """One change: names that appear, lead elsewhere, or go (None)."""
        _apply(self.names, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.names), []

    def after_power_loss(self, chosen: list[bool]) -> None:
        for names, retained in zip(self.pending, chosen, strict=True):
            if retained:
                _apply(self.durable, names)
        self.names, self.pending = dict(self.durable), []


class ModelFiles(FileSystem):
    """A file system that raises `Crash` instead of doing the change number `crash_at`; `log` names every change."""

    def __init__(self, *, syncs_files: bool = True, syncs_folders: bool = True) -> None:
        self.root = Folder()
        self.crash_at: int | None = None
        self.log: list[str] = []
        self.syncs_files, self.syncs_folders = syncs_files, syncs_folders

    def make_folder(self, path: Path, *, durable: bool) -> None:
        node = self.root
        for name in path.parts[1:]:
            if name not in node.names:
                self._step(f"mkdir {path}")
                node.change(**{name: Folder()})
                if durable:
                    self._step(f"sync folder above {path}")
                    if self.syncs_folders:
                        node.sync()
            node = self._folder(node.names[name], path)

    def list_entries(self, path: Path) -> list[FolderEntry]:
        return sorted(
            FolderEntry(name, isinstance(node, Folder), False) for name, node in self._folder_at(path).names.items()
        )

    def size(self, path: Path) -> int:
        return len(self._file_at(path).content)

    def create(self, path: Path) -> _Open:
        self._step(f"create {path}")
        folder, file = self._folder_at(path.parent), File()
        if path.name in folder.names:
            file = self._file_at(path)
            file.content = bytearray()
        else:
            folder.change(**{path.name: file})
        return _Open(self, file, path)

    def open_for_reading(self, path: Path) -> _Open:
        return _Open(self, self._file_at(path), path)

    def map(self, path: Path) -> memoryview:
        return memoryview(bytearray(self._file_at(path).content))

    def prefault_range(self, content: memoryview, start: int, length: int) -> None:
        pass

    def rename(self, path: Path, to: Path) -> None:
        assert path.parent == to.parent, "checkpoints are renamed where they lie"
        folder = self._folder_at(path.parent)
        if path.name not in folder.names:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        there = folder.names.get(to.name)
        if isinstance(there, Folder) and there.names:
            raise OSError(39, "Directory not empty", str(to))
        self._step(f"rename {path} {to.name}")
        folder.change(**{path.name: None, to.name: folder.names[path.name]})

    def symlink(self, path: Path, to: Path) -> None:
        folder = self._folder_at(path.parent)
        self._step(f"link {path} {to.name}")
        folder.change(**{path.name: folder.names[to.name]})

    def remove(self, path: Path) -> None:
        self._file_at(path)
        self._step(f"remove {path}")
        self._folder_at(path.parent).change(**{path.name: None})

    def remove_empty_folder(self, path: Path) -> None:
        if self._folder_at(path).names:
            raise OSError(39, "Directory not empty", str(path))
        self._step(f"rmdir {path}")
        self._folder_at(path.parent).change(**{path.name: None})

    def sync_folder(self, path: Path) -> None:
        folder = self._folder_at(path)
        self._step(f"sync folder {path}")
        if self.syncs_folders:
            folder.sync()

    def settle(self) -> None:
        """Let everything reach the disk, as it does after a while; and forget the log."""
        for node in self._nodes():
            if isinstance(node, Folder):
                node.sync()
            else:
                node.durable = bytes(node.content)
        self.log, self.crash_at = [], None

    def shown(self, node: File | Folder | None = None) -> object:
        """Everything that a process sees, as a value: equal for file systems that cannot be told apart."""
        node = node or self.root
        if isinstance(node, File):
            return bytes(node.content)
        return tuple((name, self.shown(inner)) for name, inner in sorted(node.names.items()))

    def killed(self) -> ModelFiles:
        """What the next process finds."""
        return self._survivor()

    def without_power(self, random_: random.Random, samples: int) -> Iterator[ModelFiles]:
        """Some of what the next process may find on a machine that lost power."""
        for retained in ("none", "all", "half", "zeros"):
            for names in ("none", "all", "last", "but last", *range(samples)):
                survivor = self._survivor()
                for node in survivor._nodes():  # before any name changes: nodes that only the system showed count too
                    if isinstance(node, File):
                        node.after_power_loss(
                            retained if names in ("none", "all") else random_.choice(("none", "all", "half", "zeros"))
                        )
                for node in [node for node in survivor._nodes() if isinstance(node, Folder)]:
                    count = len(node.pending)
                    node.after_power_loss(
                        {
                            "none": [False] * count,
                            "all": [True] * count,
                            "last": [False] * (count - 1) + [True] * min(count, 1),
                            "but last": [True] * (count - 1) + [False] * min(count, 1),
                        }.get(names, [random_.random() < 0.5 for _ in range(count)])
                    )
                yield survivor

    def _survivor(self) -> ModelFiles:
        survivor = copy.deepcopy(self)
        survivor.log, survivor.crash_at = [], None
        return survivor

    def _step(self, what: str) -> None:
        if self.crash_at == len(self.log):
            raise Crash(what)
        self.log.append(what)

    def _nodes(self) -> list[File | Folder]:
        """Everything that the system shows, or the disk holds."""
        result: dict[int, File | Folder] = {}
        waiting: list[File | Folder] = [self.root]
        while waiting:
            node = waiting.pop()
            if id(node) not in result:
                result[id(node)] = node
                if isinstance(node, Folder):
                    changed = [other for names in node.pending for other in names.values() if other is not None]
                    waiting += [*node.names.values(), *node.durable.values(), *changed]
        return list(result.values())

    def _folder(self, node: File | Folder | None, path: Path) -> Folder:
        if node is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        if isinstance(node, File):
            raise NotADirectoryError(20, "Not a directory", str(path))
        return node

    def _folder_at(self, path: Path) -> Folder:
        node = self.root
        for name in path.parts[1:]:
            node = self._folder(node.names.get(name), path)
        return node

    def _file_at(self, path: Path) -> File:
        node = self._folder_at(path.parent).names.get(path.name)
        if not isinstance(node, File):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return node


class _Open:
    """A file that is open."""

    def __init__(self, files: ModelFiles, file: File, path: Path) -> None:
        self._files, self._file, self._path = files, file, path

    def write(self, content: memoryview) -> int:
        self._files._step(f"write {self._path}")
        self._file.content += content
        return len(content)

    def read_into(self, content: memoryview, place: int) -> int:
        result = self._file.content[place : place + len(content)]
        content[: len(result)] = result
        return len(result)

    def sync(self) -> None:
        self._files._step(f"sync {self._path}")
        if self._files.syncs_files:
            self._file.durable = bytes(self._file.content)

    def close(self) -> None:
        pass


def _apply(folder: dict[str, File | Folder], names: dict[str, File | Folder | None]) -> None:
    for name, node in names.items():
        if node is None:
            folder.pop(name, None)
        else:
            folder[name] = node
