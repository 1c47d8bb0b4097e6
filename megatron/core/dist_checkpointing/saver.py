"""Asynchronous saving: copy, continue training, and commit when every rank has written.

    start              all ranks: agree on who writes what; copy that to host memory; let a thread write and hash it
    wait_for_staging   a rank whose copy runs beside its computation waits for it here, before it changes the tensors
    poll               all ranks, after every step while a save is in flight: has every rank written? then rank 0 commits, in its
                       thread too; is that done? then all ranks learn of it. Answers come a step late, so that no step waits
    finish             the same, blocking

Collectives are called from the calling thread only, and every rank calls these functions at the same points, so there
is no deadlock. At most one save is in flight, and host memory holds one copy of what this rank writes. A save that
fails leaves the run and all older checkpoints as they were, and reports the reason.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import checkpoint_folders, rank_file, save_plan
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, SavedRunConfig
from megatron.core.dist_checkpointing.files import DISK, FileSystem
from megatron.core.dist_checkpointing.lock import FolderLock
from megatron.core.dist_checkpointing.manifest import Manifest, data_file_name
from megatron.core.dist_checkpointing.save_plan import BoxToWrite
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.sharded_state import ShardedTensor, Tree
from megatron.core.dist_checkpointing.threaded_copy import (
    allocate_prefaulted_memory,
    copy_tensors_in_threads,
    tensor_bytes_view,
)
from megatron.core.parallel import collectives
from megatron.core.parallel.device import synchronize
from megatron.core.parallel.late_reduction import LaggedIntegerReduction
from megatron.core.parallel.mesh import Axis

_ALONE = Axis("world")
_MOST_OF_MEMORY = 0.8  # largest share of the free memory that a copy may take


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Settings of saves. asynchronous: training goes on meanwhile. interval, keep_last: see `expired_checkpoints`."""

    asynchronous: bool = False
    interval: int | None = None
    keep_last: int | None = None

    @property
    def may_delete_older(self) -> bool:
        """Whether older checkpoints may be deleted."""
        return self.interval is not None or self.keep_last is not None


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The result of a save. problems: why it failed, else empty. notes: other messages. size: bytes on disk. blocked:
    seconds that training waited in `start` and `wait_for_staging`; seconds: until the commit.
    """

    iteration: int
    folder: Path
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    size: int
    blocked: float
    seconds: float


class BackgroundJob:
    """A function run in a thread (or at once). result: what it returned; failure: the message of its error, else ""."""

    def __init__(self, action: Callable[[], Any], *, in_background: bool) -> None:
        self.result: Any = None
        self.failure = ""
        self._action = action
        # A daemon thread: a run that fails does not wait for it, and partial files are harmless.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if in_background else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._thread is None or not self._thread.is_alive()

    def wait_until_ended(self) -> None:
        """Block until it has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.result = self._action()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.failure = (
                str(error) if isinstance(error, (CheckpointError, OSError)) else f"{type(error).__name__}: {error}"
            )


class HostSnapshotBuffer:
    """Host memory for what this rank writes, reused by saves: new memory costs ten times as much as the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, device: torch.device) -> None:
        """Have at least `size` bytes of host memory, page-locked for copies from a GPU; kept if large enough."""
        if len(self._memory) >= size:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)
        if device.type == "cuda":
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = allocate_prefaulted_memory(size)

    def copy_to_host(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        """Copy the bytes of tensors of any shape into host memory, one after the other, and return the copies."""
        places, end = [], 0
        for tensor in tensors:
            places.append(self._memory[end : end + tensor.nbytes])
            end += tensor.nbytes
        copy_tensors_in_threads(
            (place.view(tensor.dtype).view(tensor.shape), tensor) for place, tensor in zip(places, tensors, strict=True)
        )
        for device in {tensor.device for tensor in tensors}:
            synchronize(device)
        return [memoryview(place.numpy()) for place in places]


@dataclass(slots=True)
class _InFlightSave:
    """A save in progress. shares: the boxes that each rank writes. best: see `Saver.start`."""

    iteration: int
    save: str
    shares: list[list[BoxToWrite]]
    job: BackgroundJob
    values: dict[str, Any]
    description: SavedRunConfig
    started: float
    copied: threading.Event
    best: int | None = None
    blocked: float = 0.0
    commits: bool = False
    notes: list[str] = field(default_factory=list)


class CheckpointSaver:
    """Writes the checkpoints of a run into a folder. Every method is collective over the axis."""

    def __init__(
        self,
        folder: str | Path,
        axis: Axis = _ALONE,
        *,
        rules: SavePolicy = SavePolicy(),
        device: torch.device = torch.device("cpu"),
        files: FileSystem = DISK,
        lock: FolderLock | None = None,
    ) -> None:
        """Prepare saving. lock: an acquired lock, which the first rank checks; None: no other job knows the folder."""
        self.lock = lock if axis.is_first else None
        self.folder, self.axis, self.rules, self.device, self.files = Path(folder), axis, rules, device, files
        self._snapshot = HostSnapshotBuffer()
        self._plan: tuple[list[BoxToWrite], list[list[BoxToWrite]]] | None = None
        self._copies = rules.asynchronous
        self._in_flight: _InFlightSave | None = None
        self._notes: list[str] = []
        # How many jobs of all saves each rank has ended: a late answer is about the job it was asked for, or an earlier one.
        self._jobs = 0
        self._ended_jobs = LaggedIntegerReduction(axis, device, "min", first=0)

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress."""
        return self._in_flight is not None

    def plan_and_allocate(self, state: Tree) -> None:
        """Do the slow part of the first save in advance: assign the boxes, and allocate the memory for a copy."""
        self._assign_write_shares(save_plan.sharded_tensors_of_state(state))

    def start(
        self,
        state: Tree,
        iteration: int,
        description: SavedRunConfig,
        *,
        until_staged: bool = False,
        best: int | None = None,
    ) -> None:
        """Start to save the tree that the ranks hold together. When this returns, the tree may change.

        until_staged: it may change only after `wait_for_staging`; the copy is made beside other work until then. best: the
        iteration whose checkpoint is kept and linked as the best. No save may be in progress. Raises `CheckpointError` on all
        ranks if another job owns the folder now.
        """
        assert self._in_flight is None, "one save at a time; finish() the other first"
        started = time.perf_counter()
        tensors = save_plan.sharded_tensors_of_state(state)
        shares = self._assign_write_shares(tensors)
        save, lost = collectives.broadcast_object((uuid.uuid4().hex, self._lock_lost_error()), self.axis)
        if lost is not None:
            raise lost
        share = shares[self.axis.rank]
        sources = [save_plan.local_tensor_of_box(offer, tensors).detach() for offer in share]
        # Values that change later must not leak in either.
        values = json.loads(json.dumps(save_plan.non_tensor_values(state))) if self.axis.is_first else {}
        copied = threading.Event()
        contents = self._content_provider(sources, copied, later=until_staged)
        job = BackgroundJob(lambda: self._write_rank_file(iteration, save, share, contents), in_background=self._copies)
        self._jobs += 1
        self._in_flight = _InFlightSave(
            iteration, save, shares, job, values, description, started, notes=self._notes, copied=copied, best=best
        )
        self._notes = []
        self._in_flight.blocked = time.perf_counter() - started

    def wait_for_staging(self) -> None:
        """Wait until this rank's copy is complete: from now on the tree may change. Not collective."""
        if self._in_flight is not None and not self._in_flight.copied.is_set():
            started = time.perf_counter()
            self._in_flight.copied.wait()
            self._in_flight.blocked += time.perf_counter() - started

    def _content_provider(
        self, sources: Sequence[Tensor], copied: threading.Event, *, later: bool
    ) -> Callable[[], Iterable[memoryview]]:
        """Return a function that returns the bytes to write. later: it makes the copy when it is called; else it is
        made here, if saves are asynchronous.
        """
        if not self._copies:
            copied.set()
            return lambda: (memoryview(tensor_bytes_view(source.cpu().contiguous())) for source in sources)
        if not later:
            taken = self._snapshot.copy_to_host(sources)
            copied.set()
            return lambda: taken

        def copy_sources_to_host() -> Iterable[memoryview]:
            try:
                return self._snapshot.copy_to_host(sources)
            finally:
                copied.set()

        return copy_sources_to_host

    def poll(self) -> SaveOutcome | None:
        """Advance the save in progress without waiting. Returns its outcome, once."""
        if self._in_flight is None:
            return None
        ended = self._jobs if self._in_flight.job.done else self._jobs - 1
        return self._advance_stage() if self._ended_jobs.start_and_return_previous(ended) >= self._jobs else None

    def finish(self) -> SaveOutcome | None:
        """Wait for the save in progress. Returns its outcome; None if there was none."""
        outcome = None
        while self._in_flight is not None:
            self._in_flight.job.wait_until_ended()
            outcome = self._advance_stage()
        return outcome

    def _lock_lost_error(self) -> CheckpointError | None:
        """Return the error if another job owns the folder now, else None."""
        try:
            if self.lock is not None:
                self.lock.check_ownership()
        except CheckpointError as error:
            return error
        except OSError:
            pass  # if the folder cannot be read, the save will tell
        return None

    def _assign_write_shares(self, tensors: dict[str, ShardedTensor]) -> list[list[BoxToWrite]]:
        """Return which rank writes which boxes; computed again only when the boxes of any rank have changed."""
        mine = save_plan.local_boxes_to_write(tensors)
        same = self._plan is not None and self._plan[0] == mine
        if not all(collectives.gather_objects(same, self.axis)):
            self._plan = mine, save_plan.assign_writers(collectives.gather_objects(mine, self.axis))
            self._copies = self.rules.asynchronous and self._reserve_copy_memory()
        assert self._plan is not None, "the first time, no rank has a plan"
        return self._plan[1]

    def _reserve_copy_memory(self) -> bool:
        """Reserve memory for the copies of this machine's ranks; return whether there was enough. Collective."""
        size = sum(offer.num_bytes for offer in self._plan[1][self.axis.rank]) if self._plan else 0
        machine = socket.gethostname()
        needed = sum(
            theirs for other, theirs in collectives.gather_objects((machine, size), self.axis) if other == machine
        )
        free = _available_host_memory()
        if free is not None and needed > _MOST_OF_MEMORY * free:
            self._notes.append(
                f"training waits for saves: a copy to write from takes {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} "
                "GB are free"
            )
            return False
        try:
            self._snapshot.reserve(size, self.device)
        except (MemoryError, OSError, RuntimeError) as error:
            self._notes.append(f"training waits for saves: there is no memory for a copy to write from ({error})")
            return False
        return True

    def _write_rank_file(
        self, iteration: int, save: str, share: Sequence[BoxToWrite], contents: Callable[[], Iterable[memoryview]]
    ) -> list[str]:
        """Write this rank's file, if it has anything to write; returns the hashes of its content."""
        taken = contents()
        if self.axis.is_first:  # first of all, since what died may have left no room
            checkpoint_folders.remove_interrupted_saves(self.folder, save=save, files=self.files)
        made, name = (
            checkpoint_folders.begin_save(self.folder, iteration, save, files=self.files),
            data_file_name(self.axis.rank),
        )
        if not share:
            return []
        header = save_plan.rank_file_header(self.axis.rank, share, save=save, iteration=iteration)
        hashes = rank_file.write_rank_file(self.files, made / name, header, taken)
        if self.rules.may_delete_older:  # nothing older goes before this is known to be readable
            ranges = save_plan.rank_file_ranges(self.axis.rank, share, header, hashes)
            problems = rank_file.verify_ranges(self.files, made, ranges, save=save, threads=1)
            if problems:
                raise CheckpointError("what was written does not read back", problems)
        return hashes

    def _advance_stage(self) -> SaveOutcome | None:
        """Start the commit and return None, or return the outcome of a save that failed or is committed. Collective.

        To be called only when the jobs of all ranks have ended.
        """
        in_flight = self._in_flight
        assert in_flight is not None, "a save is on its way"
        if in_flight.commits:
            failure, result = collectives.broadcast_object((in_flight.job.failure, in_flight.job.result), self.axis)
            size, notes = result or (0, [])
            return self._end_save_in_flight([failure] if failure else [], notes, size)
        results = collectives.gather_objects((in_flight.job.failure, in_flight.job.result), self.axis)
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(results) if failure]
        if failures:
            if self.axis.is_first:
                checkpoint_folders.abandon_save(self.folder, in_flight.iteration, in_flight.save, files=self.files)
            return self._end_save_in_flight(failures, [], 0)
        in_flight.commits = True
        self._jobs += 1
        hashes = [written for _, written in results]
        action = (lambda: self._commit(in_flight, hashes)) if self.axis.is_first else (lambda: None)
        in_flight.job = BackgroundJob(action, in_background=self._copies and self.axis.is_first)
        return None

    def _commit(self, in_flight: _InFlightSave, hashes: list[list[str]]) -> tuple[int, list[str]]:
        """On the first rank: commit the save, delete expired checkpoints. Returns the bytes saved, and problems."""
        try:
            files, tensors = save_plan.manifest_entries(
                in_flight.shares, hashes, save=in_flight.save, iteration=in_flight.iteration
            )
            manifest = Manifest(in_flight.save, in_flight.iteration, files, tensors, in_flight.values).json_bytes()
            if self.lock is not None:
                self.lock.check_ownership()
            step, note = checkpoint_folders.commit_save(
                self.folder,
                in_flight.iteration,
                save=in_flight.save,
                manifest=manifest,
                sizes={name: one.size for name, one in files.items()},
                description=in_flight.description,
                files=self.files,
            )
        except Exception:
            checkpoint_folders.abandon_save(self.folder, in_flight.iteration, in_flight.save, files=self.files)
            raise
        notes = [note] if note else []
        if in_flight.best is not None:
            notes += filter(
                None, [checkpoint_folders.link_best_checkpoint(self.folder, in_flight.best, files=self.files)]
            )
        try:
            doomed = checkpoint_folders.expired_checkpoints(
                self.folder,
                saved=in_flight.iteration,
                interval=self.rules.interval,
                keep_last=self.rules.keep_last,
                best=in_flight.best,
                files=self.files,
            )
            if doomed:
                open_native_checkpoint(step.folder, files=self.files)
                notes += filter(None, [checkpoint_folders.delete_checkpoints(doomed, files=self.files)])
        except CheckpointError as error:
            notes.append(f"no older checkpoint is deleted: {error}")
        return checkpoint_folders.folder_num_bytes(step.folder, files=self.files), notes

    def _end_save_in_flight(self, problems: list[str], notes: list[str], size: int) -> SaveOutcome:
        """End the save in progress and return its outcome."""
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None, "a save is on its way"
        return SaveOutcome(
            in_flight.iteration,
            checkpoint_folders.iteration_folder(self.folder, in_flight.iteration),
            tuple(problems),
            (*in_flight.notes, *notes),
            size,
            in_flight.blocked,
            time.perf_counter() - in_flight.started,
        )


def save(
    state: Tree,
    folder: str | Path,
    iteration: int,
    description: SavedRunConfig,
    axis: Axis = _ALONE,
    *,
    files: FileSystem = DISK,
) -> Path:
    """Save a tree into SAVE `folder` and wait for the commit; return the checkpoint's folder. Collective.

    Raises `CheckpointError` on all ranks if it fails.
    """
    saver = CheckpointSaver(folder, axis, files=files)
    saver.start(state, iteration, description)
    outcome = saver.finish()
    assert outcome is not None, "a save that began ends"
    if outcome.problems:
        raise CheckpointError(
            f"the checkpoint of iteration {iteration} cannot be written to {folder}", outcome.problems
        )
    return outcome.folder


def _available_host_memory() -> int | None:
    """Return the bytes of available memory of this machine; None if not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
