"""The time of one call on a GPU: events of the device around many calls, one behind the other, and the host's time beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a call, the best of the rounds. device: by events on a GPU, by the clock on a CPU; host: until the call returns."""

    device: float
    host: float


def clock_of(device: torch.device) -> str:
    """By what `timed` measures."""
    return "events of the GPU" if device.type == "cuda" else "the clock of the CPU"


def timed(work: Callable[[], Any], device: torch.device, *, calls: int = 10, rounds: int = 5, warm: int = 3) -> Timed:
    """Time a call. calls: one behind the other, so that launches of the next run beside the kernels of this one."""
    for _ in range(warm):
        work()
    best = Timed(float("inf"), float("inf"))
    for _ in range(rounds):
        one = one_round(work, device, calls)
        best = Timed(min(best.device, one.device), min(best.host, one.host))
    return best


def one_round(work: Callable[[], Any], device: torch.device, calls: int) -> Timed:
    """Seconds of a call, as the mean of so many."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            work()
        took = (time.perf_counter() - began) / calls
        return Timed(took, took)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    host = (time.perf_counter() - began) / calls
    last.record()
    torch.cuda.synchronize(device)
    return Timed(first.elapsed_time(last) / 1e3 / calls, host)


def both_passes(call: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> Callable[[], Any]:
    """Return a function that does the forward and the backward pass of `call` on leaves like the inputs."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    gradients = [torch.ones_like(one) for one in several(call(*leaves))]
    return lambda: torch.autograd.grad(several(call(*leaves)), leaves, gradients)


def several(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One output or several as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)
