"""Ranks for which the layout has no place (`--elastic`): they stand by until the others have done, and then end well.

Their launcher watches them like the others. Were they to end at once, it would take part of the job for done and not start
it again with the rest when ranks are lost or found.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from megatron.training.launch.launch_info import LaunchInfo
from megatron.training.launch.rendezvous import RendezvousStore

_DONE = "done"
_LOOK_EVERY, _PATIENCE = 1.0, 10.0  # seconds


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
    board, deadline = _rendezvous_store(place), time.monotonic() + _PATIENCE
    if board is None:
        return
    board.write(_DONE, "yes")
    for rank in range(place.size, place.size + waiting):
        while board.read(f"left/{rank}") is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY / 10)


def _rendezvous_store(place: LaunchInfo) -> RendezvousStore | None:
    """Connect to the store where all ranks meet, with keys common to all attempts. None if it cannot be reached."""
    return RendezvousStore.connect(replace(place, size=2, attempt="all", store=place.meeting))
