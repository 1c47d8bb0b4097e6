"""Where the launcher put this process. Needs no torch, so that a command line can be answered before it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from megatron.training.launch.environment import TOLD


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """Where the launcher put this process. local_rank: its number on its machine; store: host:port of the launcher's
    key-value store, or ""; job: its id; attempt: how often the launcher has restarted the ranks. meeting: host:port
    where the ranks rendezvous: the launcher's store, or one that the first rank opens. launch: an id common to all
    starts of the same job, or "". is_launched: torchrun has started this process.
    """

    rank: int
    local_rank: int
    size: int
    store: str
    job: str
    attempt: str = "0"
    meeting: str = ""
    launch: str = ""
    is_launched: bool = False


def read_launch_info() -> LaunchInfo:
    """Return what the launcher's environment variables say."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    meeting = f"{host}:{port}" if host and port else ""
    return LaunchInfo(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        size=world_size(),
        store=meeting if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "",
        job=os.environ.get("SLURM_JOB_ID", ""),
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        meeting=meeting,
        launch=_launch_id(),
        is_launched="TORCHELASTIC_RUN_ID" in os.environ,
    )


def _launch_id() -> str:
    """Return an id that restarts of a job share: Slurm's job and step, else torchrun's rendezvous id, else ""."""
    job, rendezvous = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job:
        return f"Slurm {job}.{os.environ.get('SLURM_STEP_ID', '')}"
    return "" if rendezvous == "none" else f"torchrun {rendezvous}"


def has_desktop() -> bool:
    """Return whether this machine has a desktop whose browser can be opened; in a terminal, Python would open a text browser."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    )


def world_size() -> int:
    """Return the number of ranks of this job (WORLD_SIZE, else 1)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rendezvous_environment(rank: int, size: int) -> dict[str, str]:
    """Return the environment variables that make a process rank `rank` of `size` at this job's rendezvous."""
    shared = {name: os.environ[name] for name in _RENDEZVOUS if name in os.environ}
    return {**shared, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(size)}


_RENDEZVOUS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MEGATRON_DEVICE",
)


def environment_with_changes(changes: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment with changes, for a child process."""
    return {**os.environ, **changes}


def set_world_size_variable(ranks: int) -> None:
    """Set WORLD_SIZE, so that only the first `ranks` ranks take part in the training layout."""
    os.environ["WORLD_SIZE"] = str(ranks)


def install_interrupt_excepthook() -> None:
    """Install an excepthook: an uncaught Ctrl-C prints one line on the first rank instead of a traceback."""

    def interrupt_excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        elif read_launch_info().rank == 0:
            sys.stderr.write("interrupted (SIGINT)\n")

    sys.excepthook = interrupt_excepthook


def recorded_environment_variables() -> dict[str, str]:
    """Return the environment variables that the run log records, with their values."""
    return {name: os.environ[name] for name in sorted(TOLD & os.environ.keys())}
