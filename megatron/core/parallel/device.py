"""The few calls that differ between CPU and GPU. Nobody else says `torch.cuda`."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
import torch.profiler

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def pick_device() -> torch.device:
    """The device of this process: its own GPU where there is one, else the CPU."""
    if torch.cuda.is_available() and os.environ.get("MEGATRON_DEVICE", "auto") != "cpu":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def claim(device: torch.device) -> None:
    """Make `device` this process's current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def keep_freed_memory(device: torch.device) -> None:
    """Let the C library keep what tensors on a CPU let go of, for those to come.

    It gives large pieces back to the system, which hands out zeroed pages anew, one page fault each: some hundredths of a step on a
    virtual machine. Processes then hold what they held at their peak. Only glibc can be told, and who has told it something by
    variables of the environment is not contradicted.
    """
    tuned = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    mallopt = (
        getattr(ctypes.CDLL(None), "mallopt", None)
        if device.type == "cpu" and sys.platform == "linux" and not tuned
        else None
    )
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def compute_in_batches(device: torch.device) -> None:
    """Tell Linux that this process of a run on CPUs computes: a thread of it that wakes up does not push another off a processor.

    It is said of threads that start later, too. Gloo carries messages in a thread of its own, which asks again and again, without a
    pause, as long as another holds the lock of a connection. Where ranks are as many as processors or more, that other one would be
    the one that was pushed off, and both would stand still. Systems without such a policy, or that forbid it, go on as they are.
    """
    if device.type == "cpu" and hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def backend_of(device: torch.device, wish: str = "auto") -> str:
    """The process-group backend for tensors on `device`."""
    if (
        wish == "nccl" and device.type == "cpu"
    ):  # Megatron's default, which is in every script; training/cli/preflight.py says so
        return "gloo"
    return wish if wish != "auto" else ("nccl" if device.type == "cuda" else "gloo")


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def widens_products(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether this device's matmul adds products of one format to sums of another. There is no list of them: one tries it."""
    if device.type != "cuda" or narrow == wide:
        return False
    one, total = (torch.ones((16, 16), dtype=dtype, device=device) for dtype in (narrow, wide))
    try:
        torch.addmm(total, one, one, wide, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


class Stopwatch:
    """Seconds of work between `start` and `stop`, added up: of the device's stream on a GPU, which nobody has to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = self._since = 0.0
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Begin to count."""
        self._read()

    def stop(self) -> None:
        """Count no further."""
        before = self._since
        self._read()
        self._seconds += self._since - before

    def take(self) -> float:
        """What was counted since the last time. Waits for the last event on a GPU."""
        events, self._events = self._events, []
        if events:
            events[-1].synchronize()
            self._seconds += sum(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)) / 1000.0
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _read(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._since = time.perf_counter()


class Graphs:
    """CUDA graphs of one device, which share one pool of memory: what one returns is good until another is repeated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # of torch.cuda, which has no public type for it
        self._stream: torch.cuda.Stream | None = None

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Run `work`, which must not wait for the device, and record it. Returns what repeats it, and what it returned."""
        aside, here = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        aside.wait_stream(here)
        with torch.cuda.stream(
            aside
        ):  # libraries make their plans and buffers in a first run, which must not be recorded
            work()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        self._pool = graph.pool()
        return graph.replay, output

    def record_only(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record `work`, which ran before, and do not run it: no tensor changes. Returns what does it, and what it returned.

        Nothing waits for the device or for other ranks, as messages may be on their way. All is recorded on one stream, which
        autograd goes back to for a backward pass.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        here, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(here)
        collects = gc.isenabled()
        gc.disable()  # what is let go of meanwhile might be memory of the device, or a graph
        try:
            with torch.cuda.stream(self._stream):
                # Threads that load data or watch over collectives go on: only what this one does is recorded, and judged.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    output = work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        here.wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay, output


class Mark:
    """A point in a lane's work."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = torch.cuda.Event() if stream is not None else None
        if self._event is not None:
            self._event.record(stream)

    def wait(self) -> None:
        """Let the device do what it is given next when the lane has come so far."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait_on_host(self) -> None:
        """Wait until the lane has come so far."""
        if self._event is not None:
            self._event.synchronize()


class Lane:
    """Copies beside the work of a device: `with lane:` they begin when all work so far is done, and other work goes on meanwhile.

    What is copied must be left alone until a mark is waited for. On a CPU, everything is done at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inside: torch.cuda.StreamContext | None = None

    def __enter__(self) -> Lane:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._inside is not None:
            self._inside.__exit__(*raised)

    def mark(self) -> Mark:
        """Where the lane is now."""
        return Mark(self._stream)

    def join(self) -> None:
        """Let the device do what it is given next when the lane is through."""
        self.mark().wait()

    def uses(self, tensor: torch.Tensor) -> None:
        """The lane reads or writes this tensor, which others may let go of earlier."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def has_own_memory(device: torch.device) -> bool:
    """Whether the device's memory is another than the CPU's."""
    return device.type != "cpu"


def host_memory(shape: int | tuple[int, ...], dtype: torch.dtype, *, pinned: bool = True) -> torch.Tensor:
    """Room in the CPU's memory. pinned: from which a GPU can copy beside its work; a run without one has no use for it."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned and torch.cuda.is_available())


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Which memory a tensor lies in, and at which of its elements it begins: equal for two that begin at the same place.

    Unlike an address, it is known of tensors without data too. It means something only while that memory is alive.
    """
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def random_state(device: torch.device) -> torch.Tensor:
    """State of the device's default random generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Put the device's default random generator into `state`."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def lacks_compiler(device: torch.device) -> str:
    """Why torch's compiler can make no kernels for this device here, or an empty string."""
    if device.type == "cuda":
        return (
            ""
            if find_spec("triton")
            else "kernels for a GPU are made by triton, which is not installed; pip install triton"
        )
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return (
        ""
        if shutil.which(name)
        else f"kernels for a CPU are made by a C++ compiler, and there is no {name}; install it, or name another in CXX"
    )


def memory_report(device: torch.device) -> dict[str, int]:
    """Bytes held on the device: allocated, max allocated, reserved, max reserved. On a CPU: the process's own memory."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "allocated": stats["allocated_bytes.all.current"],
            "max allocated": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.current"],
            "max reserved": stats["reserved_bytes.all.peak"],
            "allocated count": stats["allocation.all.current"],
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: only the peak is known
        now = peak
    return {"allocated": now, "max allocated": peak, "reserved": now, "max reserved": peak, "allocated count": 0}


def free_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes of the device that nobody has taken, and that it has in all; None on a CPU."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def empty_cache(device: torch.device) -> None:
    """Give cached device memory back to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def name_of(device: torch.device) -> str:
    """The device's product name, e.g. `NVIDIA H200`; `cpu` on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def profiler_activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """What a profile of this device records."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return activities + [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else activities
