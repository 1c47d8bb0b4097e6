"""Saving, beside training: copy, go on, and commit when every rank has written.

    start              all ranks: agree on who writes what; copy that to host memory; let a thread write and hash it
    wait_for_staging   a rank whose copy is made beside its work waits for it here, before it changes what is copied
    poll               all ranks, after every step while a save is in flight: has every rank written? then rank 0 commits,
                       in its thread too; is that done? then all ranks learn of it
    finish             the same, waiting

Collectives come from the calling thread only, and every rank calls these functions at the same points, so that nothing
can wait for what never comes. At most one save is in flight, and host memory holds one copy of what this rank writes.
A save that fails leaves the run and all older checkpoints as they were, and says why.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import plan, shard, store
from megatron.core.dist_checkpointing.files import DISK, Files
from megatron.core.dist_checkpointing.lock import FolderLock
from megatron.core.dist_checkpointing.manifest import Manifest, file_name
from megatron.core.dist_checkpointing.memory import bytes_of, copy_all, fresh
from megatron.core.dist_checkpointing.plan import Offer
from megatron.core.dist_checkpointing.saved import open_saved
from megatron.core.dist_checkpointing.store import CheckpointError, Description
from megatron.core.dist_checkpointing.tree import Placed, Tree
from megatron.core.parallel import collectives
from megatron.core.parallel.device import synchronize
from megatron.core.parallel.mesh import Axis

_ALONE = Axis("world")
_MOST_OF_MEMORY = 0.8  # of what is free on this machine: more is not taken for a copy


@dataclass(frozen=True, slots=True)
class SaveRules:
    """How saves go. asynchronous: training goes on while they are written. interval, keep_last: see `store.doomed`."""

    asynchronous: bool = False
    interval: int | None = None
    keep_last: int | None = None

    @property
    def deletes(self) -> bool:
        """Whether older checkpoints may go."""
        return self.interval is not None or self.keep_last is not None


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How a save ended. problems: why it failed, else empty. notes: what else went wrong. size: bytes on disk.

    blocked, seconds: while training waited for `start` and `wait_for_staging`, and until the commit.
    """

    iteration: int
    folder: Path
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    size: int
    blocked: float
    seconds: float


class BackgroundJob:
    """Something that runs in a thread, or at once, and its result or the words of its failure."""

    def __init__(self, action: Callable[[], Any], *, aside: bool) -> None:
        self.result: Any = None
        self.failure = ""
        self._action = action
        # A daemon: a run that dies of something else does not stay for it, and what it leaves behind is inert.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if aside else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        """Whether there is a result, or a failure."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when it is done."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.result = self._action()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.failure = (
                str(error) if isinstance(error, (CheckpointError, OSError)) else f"{type(error).__name__}: {error}"
            )


class Snapshot:
    """Host memory for what this rank writes, kept from save to save: fresh memory costs ten times as much as the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, device: torch.device) -> None:
        """Have room for `size` bytes, page-locked where they come from a GPU."""
        if len(self._memory) >= size:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)
        if device.type == "cuda":
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = fresh(size)

    def take(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        """Copies of the tensors' bytes, one after the other, of which changes to the tensors know nothing."""
        places, end = [], 0
        for tensor in tensors:
            places.append(self._memory[end : end + tensor.nbytes])
            end += tensor.nbytes
        copy_all(
            (place.view(tensor.dtype).view(tensor.shape), tensor) for place, tensor in zip(places, tensors, strict=True)
        )
        for device in {tensor.device for tensor in tensors}:
            synchronize(device)
        return [memoryview(place.numpy()) for place in places]


@dataclass(slots=True)
class _InFlightSave:
    """A save on its way. shares: what each rank writes."""

    iteration: int
    save: str
    shares: list[list[Offer]]
    job: BackgroundJob
    values: dict[str, Any]
    description: Description
    started: float
    copied: threading.Event
    blocked: float = 0.0
    commits: bool = False
    notes: list[str] = field(default_factory=list)


class Saver:
    """Writes the checkpoints of a run into a folder. Every method is called by all ranks of the axis together."""

    def __init__(
        self,
        folder: str | Path,
        axis: Axis = _ALONE,
        *,
        rules: SaveRules = SaveRules(),
        device: torch.device = torch.device("cpu"),
        files: Files = DISK,
        lock: FolderLock | None = None,
    ) -> None:
        """lock: has been acquired; the first rank looks whether it still holds. Left out: nobody else can know the folder."""
        self.lock = lock if axis.is_first else None
        self.folder, self.axis, self.rules, self.device, self.files = Path(folder), axis, rules, device, files
        self._snapshot = Snapshot()
        self._plan: tuple[list[Offer], list[list[Offer]]] | None = None
        self._copies = rules.asynchronous
        self._in_flight: _InFlightSave | None = None
        self._notes: list[str] = []

    @property
    def is_busy(self) -> bool:
        """Whether a save is on its way."""
        return self._in_flight is not None

    def prepare(self, state: Tree) -> None:
        """Do what the first save would take its time for: agree on who writes what, and take the memory for a copy."""
        self._shares(plan.placed(state))

    def start(self, state: Tree, iteration: int, description: Description, *, until_staged: bool = False) -> None:
        """Begin to save the tree that the ranks hold together. When this returns, the tree may change.

        until_staged: only when `wait_for_staging` has returned: the copy is made beside whatever this rank does until then. No save
        may be on its way. Raises `CheckpointError` on all ranks when another job owns the folder now.
        """
        assert self._in_flight is None, "one save at a time; finish() the other first"
        started = time.perf_counter()
        tensors = plan.placed(state)
        shares = self._shares(tensors)
        save, lost = collectives.broadcast_object((uuid.uuid4().hex, self._lost()), self.axis)
        if lost is not None:
            raise lost
        share = shares[self.axis.rank]
        sources = [plan.tensor_of(offer, tensors).detach() for offer in share]
        # Values that change later must not leak in either.
        values = json.loads(json.dumps(plan.values_of(state))) if self.axis.is_first else {}
        copied = threading.Event()
        contents = self._contents(sources, copied, aside=until_staged)
        job = BackgroundJob(lambda: self._write(iteration, save, share, contents), aside=self._copies)
        self._in_flight = _InFlightSave(
            iteration, save, shares, job, values, description, started, notes=self._notes, copied=copied
        )
        self._notes = []
        self._in_flight.blocked = time.perf_counter() - started

    def wait_for_staging(self) -> None:
        """Wait until the copy of the save on its way is made: from now on the tree may change. No other rank is needed."""
        if self._in_flight is not None and not self._in_flight.copied.is_set():
            started = time.perf_counter()
            self._in_flight.copied.wait()
            self._in_flight.blocked += time.perf_counter() - started

    def _contents(
        self, sources: Sequence[Tensor], copied: threading.Event, *, aside: bool
    ) -> Callable[[], Iterable[memoryview]]:
        """What gives the bytes to write. aside: the copy is made by whoever asks for them, else before this returns."""
        if not self._copies:
            copied.set()
            return lambda: _in_place(sources)
        if not aside:
            taken = self._snapshot.take(sources)
            copied.set()
            return lambda: taken

        def take() -> Iterable[memoryview]:
            try:
                return self._snapshot.take(sources)
            finally:
                copied.set()

        return take

    def poll(self) -> SaveOutcome | None:
        """Bring the save on its way forward, without waiting. Returns how it ended, once."""
        if self._in_flight is None:
            return None
        done = torch.tensor(int(self._in_flight.job.done), device=self.device)
        return self._forward() if bool(collectives.all_reduce(done, self.axis, "min")) else None

    def finish(self) -> SaveOutcome | None:
        """Wait for the save on its way. Returns how it ended; None when there was none."""
        outcome = None
        while self._in_flight is not None:
            self._in_flight.job.wait()
            outcome = self._forward()
        return outcome

    def _lost(self) -> CheckpointError | None:
        """Why this job may not write any more."""
        try:
            if self.lock is not None:
                self.lock.demand()
        except CheckpointError as error:
            return error
        except OSError:
            pass  # if the folder cannot be read, the save will tell
        return None

    def _shares(self, tensors: dict[str, Placed]) -> list[list[Offer]]:
        """Who writes what. The ranks' boxes are compared once, and again only when those of any rank have changed."""
        mine = plan.offers(tensors)
        same = self._plan is not None and self._plan[0] == mine
        if not all(collectives.gather_objects(same, self.axis)):
            self._plan = mine, plan.share_out(collectives.gather_objects(mine, self.axis))
            self._copies = self.rules.asynchronous and self._has_room()
        assert self._plan is not None, "the first time, no rank has a plan"
        return self._plan[1]

    def _has_room(self) -> bool:
        """Whether this machine has the memory for its ranks' copies; has it reserved then."""
        size = sum(offer.length for offer in self._plan[1][self.axis.rank]) if self._plan else 0
        machine = socket.gethostname()
        needed = sum(
            theirs for other, theirs in collectives.gather_objects((machine, size), self.axis) if other == machine
        )
        free = _free_memory()
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

    def _write(
        self, iteration: int, save: str, share: Sequence[Offer], contents: Callable[[], Iterable[memoryview]]
    ) -> list[str]:
        """Write this rank's file, if it has anything to write; the hashes of all that is in it."""
        taken = contents()
        if self.axis.is_first:  # first of all, since what died may have left no room
            store.collect(self.folder, save=save, files=self.files)
        made, name = store.begin(self.folder, iteration, save, files=self.files), file_name(self.axis.rank)
        if not share:
            return []
        header = plan.file_header(self.axis.rank, share, save=save, iteration=iteration)
        hashes = shard.write_shard(self.files, made / name, header, taken)
        if self.rules.deletes:  # nothing older goes before this is known to be readable
            ranges = plan.ranges_of(self.axis.rank, share, header, hashes)
            problems = shard.check(self.files, made, ranges, save=save, threads=1)
            if problems:
                raise CheckpointError("what was written does not read back", problems)
        return hashes

    def _forward(self) -> SaveOutcome | None:
        """All ranks' jobs are done: take the next step."""
        in_flight = self._in_flight
        assert in_flight is not None, "a save is on its way"
        if in_flight.commits:
            failure, result = collectives.broadcast_object((in_flight.job.failure, in_flight.job.result), self.axis)
            size, notes = result or (0, [])
            return self._end([failure] if failure else [], notes, size)
        results = collectives.gather_objects((in_flight.job.failure, in_flight.job.result), self.axis)
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(results) if failure]
        if failures:
            if self.axis.is_first:
                store.abandon(self.folder, in_flight.iteration, in_flight.save, files=self.files)
            return self._end(failures, [], 0)
        in_flight.commits = True
        hashes = [written for _, written in results]
        action = (lambda: self._commit(in_flight, hashes)) if self.axis.is_first else (lambda: None)
        in_flight.job = BackgroundJob(action, aside=self._copies and self.axis.is_first)
        return None

    def _commit(self, in_flight: _InFlightSave, hashes: list[list[str]]) -> tuple[int, list[str]]:
        """On the first rank: commit what all have written, and delete what may go. Returns its size, and what went wrong beside."""
        try:
            files, tensors = plan.described(
                in_flight.shares, hashes, save=in_flight.save, iteration=in_flight.iteration
            )
            manifest = Manifest(in_flight.save, in_flight.iteration, files, tensors, in_flight.values).text()
            if self.lock is not None:
                self.lock.demand()
            step, note = store.commit(
                self.folder,
                in_flight.iteration,
                save=in_flight.save,
                manifest=manifest,
                sizes={name: one.size for name, one in files.items()},
                description=in_flight.description,
                files=self.files,
            )
        except Exception:
            store.abandon(self.folder, in_flight.iteration, in_flight.save, files=self.files)
            raise
        notes = [note] if note else []
        try:
            doomed = store.doomed(
                self.folder,
                saved=in_flight.iteration,
                interval=self.rules.interval,
                keep_last=self.rules.keep_last,
                files=self.files,
            )
            if doomed:
                open_saved(step.folder, files=self.files)
                notes += filter(None, [store.retain(self.folder, doomed, files=self.files)])
        except CheckpointError as error:
            notes.append(f"no older checkpoint is deleted: {error}")
        return store.bytes_in(step.folder, files=self.files), notes

    def _end(self, problems: list[str], notes: list[str], size: int) -> SaveOutcome:
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None, "a save is on its way"
        return SaveOutcome(
            in_flight.iteration,
            store.iteration_folder(self.folder, in_flight.iteration),
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
    description: Description,
    axis: Axis = _ALONE,
    *,
    files: Files = DISK,
) -> Path:
    """Save a tree into SAVE `folder` at once; returns the checkpoint's own folder. Raises `CheckpointError` on all ranks."""
    saver = Saver(folder, axis, files=files)
    saver.start(state, iteration, description)
    outcome = saver.finish()
    assert outcome is not None, "a save that began ends"
    if outcome.problems:
        raise CheckpointError(
            f"the checkpoint of iteration {iteration} cannot be written to {folder}", outcome.problems
        )
    return outcome.folder


def _in_place(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The tensors' bytes where they are, as far as they lie together in host memory; one copy at a time of the others."""
    for tensor in tensors:
        yield memoryview(bytes_of(tensor.cpu().contiguous()))


def _free_memory() -> int | None:
    """Bytes of memory that this machine could still give; None where that is not told."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
