"""Where the launcher put this process. Needs no torch, so that a command line can be answered before it is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where the launcher put this process. local_rank: its number on its machine; store: host:port of the launcher's
    key-value store, if it has one; job: its id.
    """

    rank: int
    local_rank: int
    size: int
    store: str
    job: str


def launcher_place() -> Place:
    """What the launcher's environment says."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return Place(int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0")), world_size(), f"{host}:{port}" if host and port else "",
                 os.environ.get("SLURM_JOB_ID", ""))


def world_size() -> int:
    """Ranks of this job, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))
