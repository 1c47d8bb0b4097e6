"""NCCL's place taken by gloo: a group of NCCL takes tensors of the device only, one after the other in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gpu_stand_in as device
import torch
import torch.distributed as dist
import torch.multiprocessing.reductions as reductions
from torch import Tensor

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
    "all_gather",
    "isend",
    "irecv",
    "send",
    "recv",
)


class Work:
    """What is under way, and the tensors that must not go meanwhile."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self._work, self._tensors = work, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Done:
    """What a graph has recorded: nobody waits for it."""

    def wait(self, *_: Any) -> bool:
        """It has come."""
        return True


def through(done: Any) -> None:
    """Wait for a collective."""
    if isinstance(done, dist.Work):
        done.wait()


def install() -> None:
    """Let torch.distributed have a backend `nccl`."""
    ours: set[Any] = set()
    make, begin, together, Message = dist.new_group, dist.init_process_group, dist.batch_isend_irecv, dist.P2POp

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **others: Any) -> Any:
        group = make(ranks, timeout=timeout, backend="gloo" if backend == "nccl" else backend, **others)
        if backend == "nccl":
            ours.add(group)
        return group

    def init_process_group(backend: str | None = None, *others: Any, **named: Any) -> None:
        begin(
            "gloo" if backend == "nccl" else backend,
            *others,
            **{name: value for name, value in named.items() if name != "device_id"},
        )
        if backend == "nccl":
            ours.add(dist.group.WORLD)

    def here(value: Any, group: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(here(one, group) for one in value)
        if not isinstance(value, Tensor):
            return value
        if (group or dist.group.WORLD) in ours:
            assert value.is_cuda, "No backend type associated with device type cpu"
            assert value.is_contiguous(), "Tensors must be contiguous"
        return device.here(value.detach())

    def over_gloo(collective: Callable) -> Callable:
        @functools.wraps(collective)
        def call(*given: Any, **named: Any) -> Any:
            group = named.get("group") or next((one for one in given if isinstance(one, dist.ProcessGroup)), None)
            nearby, others = here(given, group), {name: here(value, group) for name, value in named.items()}
            if device.is_recording():
                # What lies nearby is the memory of the given tensors, which the graph must keep.
                device.do_and_record(lambda: (given, named) and through(collective(*nearby, **others)))
                return Done()
            done = collective(*nearby, **others)
            return Work(done, (given, named)) if isinstance(done, dist.Work) else done

        call.plain = collective  # type: ignore[attr-defined]
        return call

    class Sending(Message):  # type: ignore[misc,valid-type]
        """A message, of a tensor of the device."""

        def __new__(cls, op: Any, *others: Any) -> Any:
            return super().__new__(cls, getattr(op, "plain", op), *others)

        def __init__(self, op: Any, *others: Any) -> None:
            super().__init__(getattr(op, "plain", op), *others)

    def batch_isend_irecv(messages: list[Any]) -> list[Work]:
        return [
            Work(work, messages)
            for work in together(
                [Message(one.op, here(one.tensor, one.group), one.peer, one.group) for one in messages]
            )
        ]

    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, over_gloo(getattr(dist, name)))
    dist.new_group, dist.init_process_group, dist.P2POp, dist.batch_isend_irecv = (
        new_group,
        init_process_group,
        Sending,
        batch_isend_irecv,
    )
    dist.distributed_c10d.new_group = new_group

    plain = reductions.reduce_tensor  # tensors go from process to process by way of the CPU
    for kind in (Tensor, torch.nn.Parameter):
        ForkingPickler.register(
            kind, lambda one: (torch.Tensor.detach, (one.detach().cpu(),)) if one.is_cuda else plain(one)
        )
