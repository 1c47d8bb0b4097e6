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
    key-value store, if it has one; job: its id; attempt: how often the launcher has started the ranks anew. meeting: host:port
    where the ranks meet: the launcher's store, or one that the first rank opens when it joins the others. launch: what all starts of
    the same job have in common, and no other job has; "" where that is not known. is_launched: a torchrun has started this process.
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
    """What the launcher's environment says."""
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
    """Slurm's job and step, both of which a requeue has again; else the id of torchrun's rendezvous."""
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
    """Ranks of this job, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rendezvous_environment(rank: int, size: int) -> dict[str, str]:
    """What a process has to find in its environment to be a rank of this job: where its ranks meet, which one it is, and of how many."""
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


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with changes, for one that it starts."""
    return {**os.environ, **changes}


def limit_world_size(ranks: int) -> None:
    """Let only the first ranks of this job have a place in the layout of the training."""
    os.environ["WORLD_SIZE"] = str(ranks)


def install_interrupt_handler() -> None:
    """From now on, a Ctrl-C that nothing else catches is one line, from the first rank, instead of a traceback."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        elif read_launch_info().rank == 0:
            sys.stderr.write("interrupted (SIGINT)\n")

    sys.excepthook = hook


def recorded_environment() -> dict[str, str]:
    """The variables of the environment that a run notes down, with their values."""
    return {name: os.environ[name] for name in sorted(TOLD & os.environ.keys())}
