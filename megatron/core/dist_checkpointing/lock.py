"""The lock of a checkpoint folder: one job at a time may write into it, any number may read. Needs no torch.

    SAVE/writer.lock    the owner, as JSON: host, machine, process, job, token, since; touched every few seconds (heartbeat)

The file is created atomically with its content, by a hard link (which fails if the name exists, on network file systems too), or
without hard links by exclusive creation. A job that finds another owner decides in this order:

    it is this process, or was this same job on another machine   take over at once: the launcher or the queue has restarted it
    it ran on this machine and its process has ended              take over at once
    it runs on this machine, and does not end within seconds      refuse
    its heartbeat changes while it is watched                     refuse
    its heartbeat does not change for WATCH seconds               take over

Clocks of different machines are never compared. The heartbeat touches the open file and not its name, so that an owner that was
replaced touches nothing of its successor; it notices at its next save, and ends. Nothing depends on the lock alone: a save that two
jobs write at the same time fails, or is complete (see checkpoint_folders.py).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError

LOCK = "writer.lock"
HEARTBEAT, WATCH = 5.0, 20.0  # seconds
_ATTEMPTS = 20  # of several that find the same stale lock, one gets it, and the others look again


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that holds a lock.

    machine: its boot and process namespace, in which the process number is valid. born: distinguishes it from a later
    process with the same number. job: the same for a restart of the job; "" if not known. since: when it acquired the
    lock.
    """

    host: str
    machine: str
    process: int
    born: str
    job: str
    token: str
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}{f' (job {self.job})' if self.job else ''}, since {self.since}"


class FolderLock:
    """The right of one job to write into a folder, held by one rank. heartbeat, watch: seconds, see the module."""

    def __init__(
        self, folder: str | Path, *, job: str = "", heartbeat: float = HEARTBEAT, watch: float = WATCH
    ) -> None:
        self.folder, self.path, self._heartbeat, self._watch = Path(folder), Path(folder) / LOCK, heartbeat, watch
        number = os.getpid()
        self.owner = LockOwner(
            socket.gethostname(),
            _machine_id(),
            number,
            _process_start_time(number),
            job,
            uuid.uuid4().hex,
            f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        )
        self._over = threading.Event()
        self._file = -1

    def acquire(self) -> str:
        """Acquire the lock. Returns a note about a former owner, usually "".

        Raises `CheckpointError` if another job writes there.
        """
        note = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                if self._create_lock():
                    return note
                note = self._remove_stale_lock(*self._read_lock_file())
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror or error}") from None
        raise CheckpointError(
            f"{self.path} changes its owner all the time: several jobs are started with --save {self.folder}; "
            "give each a folder of its own"
        )

    def check_ownership(self) -> None:
        """Raise `CheckpointError` if another job owns the folder now. A lock file that was deleted is restored."""
        owner, _ = self._read_lock_file()
        if owner is None and not self.path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._create_lock():
                return
            owner, _ = self._read_lock_file()
        if owner is None or owner.token != self.owner.token:
            raise CheckpointError(
                f"another job has taken --save {self.folder} over: {owner or 'nobody knows which'}; this one stood still, or "
                "was started twice. It ends, so that the checkpoints of one do not replace the other's"
            )

    def release(self) -> None:
        """Release the lock."""
        self._over.set()
        try:
            owner, _ = self._read_lock_file()
            if owner is not None and owner.token == self.owner.token:
                self.path.unlink()
        except OSError:
            pass  # the next job finds that this process has ended

    def _create_lock(self) -> bool:
        """Create the lock file if there is none and start its heartbeat; returns whether it was created."""
        content = (json.dumps(asdict(self.owner)) + "\n").encode()
        new = self.path.with_name(f"{LOCK}.{self.owner.token[:8]}")
        try:
            new.write_bytes(content)
            os.link(new, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            try:
                with self.path.open("xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
        finally:
            new.unlink(missing_ok=True)
        self._over.set()  # of a file that was removed
        self._over, self._file = threading.Event(), os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(
            target=_heartbeat_loop, args=(self._file, self._over, self._heartbeat), name="heartbeat", daemon=True
        ).start()
        return True

    def _remove_stale_lock(self, owner: LockOwner | None, stamp: int) -> str:
        """Remove the lock of an owner that has ended; returns a note. Raises `CheckpointError` if it has not ended."""
        mine = self.owner
        if owner is None and stamp < 0:
            return ""  # gone by itself
        # This owner's job, restarted on another machine.
        restarted = owner is not None and owner.job == mine.job != "" and owner.machine != mine.machine
        if owner is not None and owner.machine == mine.machine:
            if (owner.process, owner.born) != (mine.process, mine.born) and not self._wait_for_process_end(owner):
                raise self._locked_error(owner)
        elif not restarted and self._heartbeat_changes(stamp):
            raise self._locked_error(owner)
        same = owner is None or owner.process == mine.process or restarted
        if not self._remove_lock_if_owned_by(owner) or same:
            return ""
        return f"--save {self.folder} is taken over from a job that has ended without a word: {owner}"

    def _remove_lock_if_owned_by(self, owner: LockOwner | None) -> bool:
        """Remove the lock if it is this owner's; restore it if it was another's. Returns False if there is none."""
        grave = self.path.with_name(f"{LOCK}.{self.owner.token[:8]}.gone")
        try:
            os.rename(self.path, grave)
        except FileNotFoundError:
            return False
        if _read_owner(grave)[0] != owner:  # another was faster, and owns it rightly
            with suppress(OSError):  # one more has come between: that one owns it
                os.link(grave, self.path)
        grave.unlink(missing_ok=True)
        return True

    def _wait_for_process_end(self, owner: LockOwner) -> bool:
        """Wait a short time for the owner's process, on this machine, to end; return whether it did."""
        deadline = time.monotonic() + self._watch / 4
        while _is_process_running(owner):
            if time.monotonic() > deadline:
                return False
            time.sleep(min(0.5, self._watch / 10))
        return True

    def _heartbeat_changes(self, stamp: int) -> bool:
        """Watch the lock file's modification time for the watch time; return whether it changes from `stamp` (ns)."""
        deadline = time.monotonic() + self._watch
        while time.monotonic() < deadline:
            time.sleep(min(0.5, self._watch / 10))
            if self._read_lock_file()[1] != stamp:
                return self.path.exists()
        return False

    def _locked_error(self, owner: LockOwner | None) -> CheckpointError:
        """Return the error that another job owns the folder."""
        return CheckpointError(
            f"--save {self.folder} is being written by another job: {owner or 'one that does not say who it is'}; end that one, "
            f"or give this one a folder of its own (who owns a folder is told by {LOCK} in it)"
        )

    def _read_lock_file(self) -> tuple[LockOwner | None, int]:
        """Return the owner, if the file names it, and the file's modification time; -1 without a file."""
        try:
            return _read_owner(self.path)
        except FileNotFoundError:
            return None, -1


def _heartbeat_loop(file: int, over: threading.Event, heartbeat: float) -> None:
    """Touch the lock file regularly (the heartbeat thread)."""
    while not over.wait(heartbeat):
        try:
            os.utime(file)
        except OSError:
            pass  # a moment without the server; or another owns the name, which the next save finds out
    os.close(file)


def _read_owner(path: Path) -> tuple[LockOwner | None, int]:
    """Return a file's owner and modification time. Opening it revalidates network caches; a pipe never blocks."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _parse_owner(os.read(file, 1 << 16)), os.fstat(file).st_mtime_ns
    finally:
        os.close(file)


def _parse_owner(content: bytes) -> LockOwner | None:
    """Parse a lock file's content; None if it is cut short or of another program."""
    try:
        result = LockOwner(**json.loads(content))
        return result if isinstance(result.process, int) and result.process > 0 else None
    except (ValueError, TypeError):
        return None  # cut short, or another program's


def _machine_id() -> str:
    """Return an identifier of this boot of the machine and container; "" if not available."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.name}"


def _process_start_time(process: int) -> str:
    """Return when a process of this machine started, in the system's units; "" for a zombie or if not available."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _is_process_running(owner: LockOwner) -> bool:
    """Return whether a process of this machine still runs."""
    try:
        os.kill(owner.process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    known = os.path.exists(f"/proc/{owner.process}/stat")  # not everywhere, and not always those of others
    return not known or _process_start_time(owner.process) == owner.born
