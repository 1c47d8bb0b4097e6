"""What ranks tell each other beside their collectives: short texts in the launcher's store.

The store lives as long as the launcher, so that ranks can be told of a failure while they sit in a collective that will
never complete, and a store that stays silent means that nobody looks after them any more (entry.py). Each start of the ranks has
keys of its own: a failure that was mended by a restart is not met again.

Spare ranks, for which an elastic layout has no place, stand by until the others have done, and then end well: their launcher would
take one that ends at once for a part of the job that is done, and not start it again when ranks are lost or found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.parallel.device import process_group_backend
from megatron.training.launch.launch_info import LaunchInfo

FIRST_FAILURE = "first-failure"
_GONE = (RuntimeError, dist.DistError)  # the store does not answer: its launcher has ended, or the network between
_PATIENCE = 60.0  # seconds until a connection stands
_DONE = "done"
_LOOK_EVERY, _RELEASE_PATIENCE = 1.0, 10.0  # seconds
_LONGEST = 1 << 16  # characters of a text
Result = TypeVar("Result")


class RendezvousStore:
    """A thread's connection to the launcher's store. If that is gone, reads give None and writes are ignored."""

    def __init__(self, store: dist.Store, attempt: str, address: str = "") -> None:
        self._store, self._prefix, self._address = store, f"megatron/{attempt}/", address
        self._silent_since: float | None = None

    @staticmethod
    def connect(place: LaunchInfo) -> RendezvousStore | None:
        """Return a connection; None for a single rank, without a launcher's store, or if it cannot be reached."""
        if place.size == 1 or not place.store:
            return None
        try:
            return RendezvousStore(_connect_tcp_store(place.store, _PATIENCE), place.attempt, place.store)
        except _GONE:
            return None

    @property
    def seconds_without_answer(self) -> float:
        """Seconds since the first of the queries that the store has left unanswered; 0.0 while it answers."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    def reconnect(self, patience: float) -> None:
        """Try to make a new connection for up to `patience` seconds; a broken one stays broken."""
        try:
            self._store = _connect_tcp_store(self._address, patience)
        except _GONE:
            pass

    def read(self, key: str) -> str | None:
        """Return the text under a key, None if there is none (without waiting). The store is open to everyone who
        reaches its port: unprintable characters are replaced, and long texts cut.
        """
        name = self._prefix + key
        content = self._query_store(lambda store: store.get(name) if store.check([name]) else None, None)
        return None if content is None else printable_text(content)

    def write(self, key: str, text: str) -> None:
        """Set the text under a key."""
        self._query_store(lambda store: store.set(self._prefix + key, text), None)

    def write_if_absent(self, key: str, text: str) -> bool:
        """Set the text under a key if there is none yet; return whether it was set."""
        return self._query_store(lambda store: store.compare_set(self._prefix + key, "", text) == text.encode(), False)

    def _query_store(self, question: Callable[[dist.Store], Result], otherwise: Result) -> Result:
        """Call `question` with the store and return its answer; `otherwise` if the store does not answer."""
        try:
            answer = question(self._store)
        except _GONE:
            self._silent_since = self._silent_since or time.monotonic()
            return otherwise
        self._silent_since = None
        return answer


def printable_text(content: bytes) -> str:
    """Decode bytes of unknown origin, cut, with unprintable characters replaced, safe to print on a terminal."""
    text = content[:_LONGEST].decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)


def _connect_tcp_store(address: str, patience: float) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=patience))


def missing_launcher_store_warning(place: LaunchInfo) -> str:
    """Return a warning that without a launcher's store ranks cannot report failures or hangs; "" if they have one."""
    if place.size == 1 or place.store:
        return ""
    return (
        "WARNING: the launcher gives these ranks no store of its own (torchrun does, but with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), so no "
        "rank can tell the others that it failed or where it stands: a failure or a hang ends when connections break, or after "
        "--distributed-timeout-minutes"
    )


def init_default_process_group(parallel: ParallelConfig, place: LaunchInfo, device: torch.device) -> None:
    """Initialize the default process group; NCCL binds to this rank's GPU at once. A launcher's store outlives the
    ranks, and torch uses the same keys at every start: a restarted rank could find another's old address. So each
    restart uses keys of its own.
    """
    timeout, store = timedelta(minutes=parallel.distributed_timeout_minutes), None
    if place.store and place.attempt != "0":
        store = dist.PrefixStore(f"start {place.attempt}", _connect_tcp_store(place.store, timeout.total_seconds()))
    dist.init_process_group(
        process_group_backend(device, parallel.distributed_backend),
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def wait_as_spare_rank(place: LaunchInfo) -> None:
    """Wait until the training ranks have finished or the launcher is gone, which ends this rank if they fail."""
    board, launcher = _rendezvous_store(place), os.getppid()
    while os.getppid() == launcher:
        if board is not None and board.read(_DONE) is not None:
            board.write(f"left/{place.rank}", "yes")
            return
        time.sleep(_LOOK_EVERY)


def release_spare_ranks(place: LaunchInfo, waiting: int) -> None:
    """Tell `waiting` spare ranks that training is over; wait till they know, as the store may end with this rank."""
    board, deadline = _rendezvous_store(place), time.monotonic() + _RELEASE_PATIENCE
    if board is None:
        return
    board.write(_DONE, "yes")
    for rank in range(place.size, place.size + waiting):
        while board.read(f"left/{rank}") is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY / 10)


def _rendezvous_store(place: LaunchInfo) -> RendezvousStore | None:
    """Connect to the store where all ranks meet, with keys common to all attempts. None if it cannot be reached."""
    return RendezvousStore.connect(replace(place, size=2, attempt="all", store=place.meeting))
