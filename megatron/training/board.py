"""What ranks tell each other beside their collectives: short texts in the launcher's store.

The store lives as long as the launcher, so that ranks can be told of a failure while they sit in a collective that will
never complete. Each start of the ranks has keys of its own: a failure that was mended by a restart is not met again.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron.training.place import Place

FIRST_FAILURE = "first-failure"
_GONE = (RuntimeError, dist.DistError)  # the store is gone: so is the launcher, and with it the other ranks


class Board:
    """A connection of one thread to the store. A store that is gone holds nothing, and keeps nothing."""

    def __init__(self, store: dist.Store, attempt: str) -> None:
        self._store, self._prefix = store, f"megatron/{attempt}/"

    @staticmethod
    def connect(place: Place) -> Board | None:
        """A connection; None where there is one rank alone, or no launcher."""
        if place.size == 1 or not place.store:
            return None
        host, _, port = place.store.rpartition(":")
        try:
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        except _GONE:
            return None
        return Board(store, place.attempt)

    def read(self, key: str) -> str | None:
        """The text under a key, None if there is none. Does not wait for one."""
        try:
            return self._store.get(self._prefix + key).decode() if self._store.check([self._prefix + key]) else None
        except _GONE:
            return None

    def write(self, key: str, text: str) -> None:
        """Put a text there."""
        try:
            self._store.set(self._prefix + key, text)
        except _GONE:
            pass

    def claim(self, key: str, text: str) -> bool:
        """Put a text there if there is none yet; whether this was the first."""
        try:
            return self._store.compare_set(self._prefix + key, "", text).decode() == text
        except _GONE:
            return False


def lacks_board(place: Place) -> str:
    """What these ranks cannot do for want of a launcher's store, in words; "" if they have one."""
    if place.size == 1 or place.store:
        return ""
    return ("WARNING: the launcher gives these ranks no store of its own (torchrun does, but with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), so no "
            "rank can tell the others that it failed or where it stands: a failure or a hang ends when connections break, or after "
            "--distributed-timeout-minutes")


def join_ranks(backend: str, place: Place, timeout: timedelta) -> None:
    """Make the default process group.

    A launcher's store outlives the ranks, and torch asks it under the same keys at every start: a rank that is started anew would
    look for another where that listened before, if it is the faster of the two. So each start meets under keys of its own.
    """
    if not place.store or place.attempt == "0":
        dist.init_process_group(backend, timeout=timeout)
        return
    host, _, port = place.store.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group(backend, store=dist.PrefixStore(f"start {place.attempt}", store), rank=place.rank, world_size=place.size,
                            timeout=timeout)
