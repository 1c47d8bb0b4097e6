"""The calls that differ between CPU and GPU. No other module uses `torch.cuda`."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.profiler

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


def pick_device() -> torch.device:
    """Return this process's device: the GPU of its local rank, or the CPU (also if MEGATRON_DEVICE=cpu)."""
    if torch.cuda.is_available() and os.environ.get("MEGATRON_DEVICE", "auto") != "cpu":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def set_current_device(device: torch.device) -> None:
    """Make `device` the current CUDA device of this thread; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def disable_malloc_trim(device: torch.device) -> None:
    """Stop the C library from returning the memory of freed CPU tensors to the operating system.

    By default glibc unmaps large blocks, and each later allocation costs a page fault per page: some hundredths of a
    step on a virtual machine. With this, a process holds on to its peak memory. Only glibc supports it, and malloc
    settings in the environment win.
    """
    tuned = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if device.type != "cpu" or sys.platform != "linux" or tuned:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def set_sched_batch_policy(device: torch.device) -> None:
    """Give a CPU run's process Linux's policy SCHED_BATCH: waking threads do not preempt others.

    Threads that start later inherit it. Gloo sends messages from a thread that busily retries while another thread
    holds the lock of a connection. With at least as many ranks as processors, the holder could be preempted by the
    retrying thread, and both would stall. Where the policy does not exist or is forbidden, nothing happens.
    """
    if device.type == "cpu" and hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def process_group_backend(device: torch.device, requested: str = "auto") -> str:
    """Return the process-group backend: nccl or gloo by the device, or that of --distributed-backend (requested)."""
    # Megatron's default, which is in every script; cli/preflight.py says so
    if requested == "nccl" and device.type == "cpu":
        return "gloo"
    return requested if requested != "auto" else ("nccl" if device.type == "cuda" else "gloo")


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Context manager: torch's attention does not choose cuDNN by itself inside, for lengths that change from
    pass to pass: it builds a plan of half a second for every new shape. A backend that was asked for by name is used
    all the same.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def supports_mixed_dtype_addmm(device: torch.device, input_dtype: torch.dtype, sum_dtype: torch.dtype) -> bool:
    """Return whether the device's matmul adds products of one dtype to a sum of another; found by trying it."""
    if device.type != "cuda" or input_dtype == sum_dtype:
        return False
    ones, total = (torch.ones((16, 16), dtype=dtype, device=device) for dtype in (input_dtype, sum_dtype))
    try:
        torch.addmm(total, ones, ones, sum_dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


class Stopwatch:
    """Accumulates seconds of work between `start` and `stop`; on a GPU by events on its stream, without a wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = self._since = 0.0
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Start an interval."""
        self._record_timestamp()

    def stop(self) -> None:
        """End the interval and add it."""
        before = self._since
        self._record_timestamp()
        self._seconds += self._since - before

    def take_seconds(self) -> float:
        """Return the seconds since the last call and reset; waits for the last event on a GPU."""
        events, self._events = self._events, []
        if events:
            events[-1].synchronize()
            self._seconds += sum(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)) / 1000.0
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _record_timestamp(self) -> None:
        """Record the present time: an event on the GPU's stream, or the clock on a CPU."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._since = time.perf_counter()


class CudaGraphPool:
    """Captures CUDA graphs that share one memory pool: the output of one graph is valid until another one is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch.cuda has no public type for a pool handle
        self._stream: torch.cuda.Stream | None = None

    def warm_up_and_capture(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Run `work` once for warm-up, then capture it.

        It must not synchronize. Returns the replay function and the captured output (any shape).
        """
        warmup_stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        warmup_stream.wait_stream(current)
        # libraries allocate buffers and choose plans in the first run, which must not be captured
        with torch.cuda.stream(warmup_stream):
            work()
        current.wait_stream(warmup_stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that watch collectives may go on using CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        self._pool = graph.pool()
        return graph.replay, output

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture `work`, which ran before, without running it. Returns the replay function, and the captured output.

        Nothing waits for the device or for other ranks, since messages may be in flight. Everything is captured on one
        stream, to which autograd returns for a backward pass.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        gc_was_enabled = gc.isenabled()
        gc.disable()  # a collection meanwhile could free device memory or a graph
        try:
            with torch.cuda.stream(self._stream):
                # thread_local: threads that load data or watch collectives may go on using CUDA meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    output = work()
                finally:
                    graph.capture_end()
        finally:
            if gc_was_enabled:
                gc.enable()
        current.wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay, output


class StreamEvent:
    """A point in the work of a side stream, to wait for."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = torch.cuda.Event() if stream is not None else None
        if self._event is not None:
            self._event.record(stream)

    def wait_on_stream(self) -> None:
        """Make the device's current stream wait for this point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait_on_host(self) -> None:
        """Block the calling thread until the side stream has reached this point."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """A CUDA stream for copies beside computation: inside `with side_stream:`, they start after all queued work.

    The copied tensors must not change until an event recorded afterwards was waited for. On a CPU, copies are
    synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inside: torch.cuda.StreamContext | None = None

    def __enter__(self) -> SideStream:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._inside is not None:
            self._inside.__exit__(*raised)

    def record_event(self) -> StreamEvent:
        """Record an event at the current end of the stream."""
        return StreamEvent(self._stream)

    def join(self) -> None:
        """Make the device's current stream wait for all work queued on this one; the host does not wait."""
        self.record_event().wait_on_stream()

    def record_use(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that this stream uses the tensor (any shape), which its owner may free earlier."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def has_separate_memory(device: torch.device) -> bool:
    """Return whether the device has memory separate from the CPU's."""
    return device.type != "cpu"


def empty_host_tensor(shape: int | tuple[int, ...], dtype: torch.dtype, *, pinned: bool = True) -> torch.Tensor:
    """Return an empty CPU tensor [shape]; pinned: page-locked if there is a GPU, so that it can copy asynchronously."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned and torch.cuda.is_available())


def copy_arrays_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays of any shape and one dtype to the device in one transfer from pinned memory, without waiting for it.

    Returns a tensor for each array; on a CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    pinned = empty_host_tensor(sum(array.size for array in arrays), torch.from_numpy(arrays[0]).dtype)
    np.concatenate([array.reshape(-1) for array in arrays], out=pinned.numpy())
    pieces = pinned.to(device, non_blocking=True).split([array.size for array in arrays])
    return [piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]


class DeviceToHostCopy:
    """An asynchronous copy of tensors of any shape to the CPU; `wait` returns them when it is done."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._tensors, self._event = list(tensors), None
        if device.type == "cuda":
            self._tensors = [
                empty_host_tensor(tuple(one.shape), one.dtype).copy_(one, non_blocking=True) for one in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """Block until the copies are done, and return them, in any shape; on a CPU nothing was copied."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def storage_id_and_offset(tensor: torch.Tensor) -> tuple[int, int]:
    """Return storage id and offset (in elements) of a tensor of any shape: equal for two with one first element.

    Unlike an address, it exists for tensors without data too. It is valid only while that storage is alive.
    """
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def device_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's default random generator: uint8 [bytes]."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_device_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state (uint8 [bytes]) of the device's default random generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def missing_compiler_reason(device: torch.device) -> str:
    """Return why torch.compile cannot generate kernels for this device here, or an empty string if it can."""
    if device.type == "cuda":
        missing = "kernels for a GPU are made by triton, which is not installed; pip install triton"
        return "" if find_spec("triton") else missing
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    missing = (
        f"kernels for a CPU are made by a C++ compiler, and there is no {name}; install it, or name another in CXX"
    )
    return "" if shutil.which(name) else missing


def device_memory_stats(device: torch.device) -> dict[str, int]:
    """Return bytes held on the device: allocated and reserved, now and at peak; on a CPU resident memory."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "allocated": stats["allocated_bytes.all.current"],
            "max allocated": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.current"],
            "max reserved": stats["reserved_bytes.all.peak"],
            "allocated count": stats["allocation.all.current"],
        }
    try:
        # Not ru_maxrss, which a process inherits from the one that started it.
        with open("/proc/self/status") as status:
            kilobytes = {
                name: value.split()[0] for name, value in (line.split(":", 1) for line in status) if name[:2] == "Vm"
            }
        now, peak = int(kilobytes["VmRSS"]) * 1024, int(kilobytes["VmHWM"]) * 1024
    except OSError:  # not Linux: only the peak is known
        now = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"allocated": now, "max allocated": peak, "reserved": now, "max reserved": peak, "allocated count": 0}


def free_and_total_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total bytes of the device; None on a CPU."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def empty_cache(device: torch.device) -> None:
    """Return cached device memory to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """Return the device's product name, such as `NVIDIA H200`; `cpu` on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def profiler_activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """Return what torch.profiler records for this device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return activities + [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else activities
