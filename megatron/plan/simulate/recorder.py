"""Record every operation of a training step as an event; works on fake tensors and on real ones.

A `StepRecorder` is a torch dispatch mode: it sees each operation between autograd and the kernels, in forward and backward passes, each
collective and message, and each storage that is allocated or freed. It does not change what is computed, with one exception: without
data nobody knows which experts tokens choose, so under a recorder they choose all experts equally often, in turn.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from megatron.core.parallel.overlap import DualBatchThreads
from megatron.plan.simulate.memory import StorageTracker
from megatron.plan.simulate.source_lines import ALLOCATES_IN_HOST_MEMORY, SourceLocator, called_by_fsdp2, role_of
from megatron.plan.simulate.torch_internals import (
    RecordingMode,
    finished_work,
    fsdp2_on_one_rank,
    operation_of,
    wait_for,
)
from megatron.plan.simulate.trace import TOGETHER, EventList, StepEvent

# c10d's operations: our name, place of the group among the arguments, of what is sent, and of what comes.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 1, 0, 0),
    "_allgather_base_": ("all_gather", 2, 1, 0),
    "_reduce_scatter_base_": ("reduce_scatter", 2, 1, 0),
    "alltoall_base_": ("all_to_all", 2, 1, 0),
    "broadcast_": ("broadcast", 1, 0, 0),
    "send": ("send", 1, 0, 0),
    "recv_": ("receive", 1, 0, 0),
    "barrier": ("barrier", 1, 0, 0),
    "allgather_": ("all_gather", 2, 1, 0),
}


@dataclass(frozen=True, slots=True)
class OpFacts:
    """The fields of a `StepEvent` that follow from the shapes of an operation."""

    name: str
    flops: int
    moved: int
    shape: tuple[int, ...]
    dtype: str
    factors: str


def op_cost_facts(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> OpFacts:
    """Compute FLOPs, bytes moved, shape and dtypes of an operation from its arguments and its result."""
    made = tuple(tensors_of((result,)))
    count = flop_registry.get(operation_of(func))
    # Torch's formulas know of no product into another format.
    shaped = [arg for arg in args if not isinstance(arg, torch.dtype)]
    flops = 0 if count is None else int(count(*shaped, **kwargs, out_val=result))
    moved = 0 if func.is_view else sum(tensor.numel() * tensor.itemsize for tensor in (*tensors_of(args), *made))
    first = made[0] if made else None
    return OpFacts(
        str(operation_of(func)),
        flops,
        moved,
        () if first is None else tuple(first.shape),
        "" if first is None else dtype_name(first.dtype),
        _multiplied_dtype(args) if flops else "",
    )


def _multiplied_dtype(args: tuple) -> str:
    """Return the dtype that a product multiplies: the narrowest of its arguments, since accumulators, biases and scales are as wide or wider."""
    formats = {tensor.dtype for tensor in tensors_of(args) if tensor.is_floating_point()}
    return dtype_name(min(formats, key=lambda dtype: dtype.itemsize)) if formats else ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its prefix: torch.float32 -> float32."""
    return str(dtype).removeprefix("torch.")


def balanced_expert_choice(tokens: int, each: int, experts: int) -> Tensor:
    """Return a choice of experts that loads all of them equally: int64 [t, k], of `tokens` tokens with `each` experts."""
    return (torch.arange(tokens * each) % experts).view(tokens, each)


class StepRecorder(RecordingMode):
    """Torch dispatch mode that records the operations of a step; used as a context manager.
    ranks: name of a process group -> its global ranks. choices: (experts, experts chosen by a token) of a network with
    routers. axis: mesh axis of the next collective; consumer: the action that the next message is for. memory: tracks
    storages. events: what was recorded. until: no action begins later than this, by time.monotonic().
    """

    def __init__(self, ranks: Mapping[str, tuple[int, ...]], choices: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.ranks, self.choices, self.axis, self.consumer = ranks, choices, "", ""
        self.memory, self.events = StorageTracker(), EventList()
        self.action, self._entered, self.module = "setup", "setup", ""
        self.until = math.inf
        self._offloads = False  # something lies in the host's memory
        # Name of a process group -> its axis, of those over which FSDP2 cuts weights.
        self.shared: Mapping[str, str] = {}
        self.begins: dict[str, int] = {}  # action -> when it began, by the memory's clock
        self._locator = SourceLocator()

    @property
    def modes(self) -> tuple[AbstractContextManager[Any], ...]:
        """The modes of a recorded step, the outermost first."""
        return (self,)

    def begin_action(self, action: str) -> None:
        """Start another action of the schedule, or another phase."""
        if time.monotonic() > self.until:
            raise TimeoutError(f"the time of a dry run was up before {action}")
        if action != self._entered:  # and not back in it, after data was read
            self.action = self._entered = action
            self.begins[action] = self.memory.clock
            self.memory.begin_action(action)
            self.memory.event = len(self.events)
            self.events.append(StepEvent("action", action, action=action, live=self.memory.live))

    def resume_action(self, action: str, module: str = "") -> None:
        """Continue one of the two actions of a dual-batch overlap."""
        self.action, self.module = action, module
        self.memory.begin_action(action)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if DTensor in types:  # its local tensor comes by itself
            return NotImplemented
        if func is torch.ops.prim.device.default:  # a question, which only a tensor without data asks here
            return args[0].fake_device
        memory, kwargs = self.memory, kwargs or {}
        memory.event = len(self.events)
        if func.namespace == "c10d":
            return self._record_communication(func, args, kwargs)
        where, module = self._locator.location(sys._getframe(1), self.module)
        result, facts = self.run_operation(func, args, kwargs, where)
        elsewhere = self._is_in_host_memory(func, args, kwargs, where)
        for tensor in tensors_of((result,)):
            memory.track(tensor, elsewhere=elsewhere)
        self.events.append(
            StepEvent(
                "op",
                facts.name,
                where,
                self.action,
                module,
                facts.flops,
                facts.moved,
                shape=facts.shape,
                dtype=facts.dtype,
                live=memory.live,
                factors=facts.factors,
                role=role_of(where),
            )
        )
        return result

    def append_hidden_operation(self, event: StepEvent) -> str:
        """Record an operation that the dispatch does not show, where the step is. Return its source line."""
        where, module = self._locator.location(sys._getframe(1), self.module)
        self.memory.event = len(self.events)
        self.events.append(
            replace(event, where=event.where or where, action=self.action, module=module, live=self.memory.live)
        )
        return event.where or where

    def run_operation(self, func: Any, args: tuple, kwargs: dict[str, Any], where: str) -> tuple[Any, OpFacts]:
        """Run an operation; return its result and the facts of its event."""
        result = func(*args, **kwargs)
        if self._is_router_choice(func, args):
            result[1].copy_(self._fake_routing(result[1]))
        return result, op_cost_facts(func, args, kwargs, result)

    def _is_in_host_memory(self, func: Any, args: tuple, kwargs: dict[str, Any], where: str) -> bool:
        """Whether the result of an operation is in host memory: allocated there, or computed only from tensors there."""
        if func is torch.ops.aten.empty.memory_format and ALLOCATES_IN_HOST_MEMORY.includes(where):
            self._offloads = True
        elif not self._offloads or "device" in kwargs:
            return False
        else:
            lives = [self.memory.find_lifetime(tensor) for tensor in tensors_of(args)]
            return bool(lives) and all(life is not None and life.elsewhere for life in lives)
        return True

    def run_communication(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a collective or message and return its result.

        The backend gets copies and is waited for at once, since it keeps temporary buffers, and threads that hold tensors for some time after the
        work is done, which are not part of the step. Point-to-point messages have no such threads.
        """
        if operation_of(func).__name__ in ("send", "recv_"):
            return func(*args, **kwargs)
        copies = [_copy_tensors(value) for value in args]
        result = func(*copies, **kwargs)
        works = result[1] if isinstance(result, tuple) else result
        wait_for(works)
        for tensor, copy in zip(tensors_of((args[0],)), tensors_of((copies[0],)), strict=True):
            tensor.copy_(copy)
        done = finished_work()
        return (args[0], done) if isinstance(result, tuple) else done

    def _fake_routing(self, chosen: Tensor) -> Tensor:
        """Return a router's choice, shaped [t, k] as `chosen`."""
        assert self.choices is not None, "only a router chooses"
        tokens, each = chosen.shape
        return balanced_expert_choice(tokens, each, self.choices[0])

    def _is_router_choice(self, func: Any, args: tuple) -> bool:
        """Whether the operation is the top-k of a router."""
        return (
            self.choices is not None
            and func is torch.ops.aten.topk.default
            and args[0].dim() == 2
            and (args[0].shape[-1], args[1]) == self.choices
        )

    def _record_communication(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record a collective or message."""
        where, module = self._locator.location(sys._getframe(1), self.module)
        name, group_at, input_at, output_at = _COLLECTIVES[operation_of(func).__name__]
        group = dist.ProcessGroup.unbox(args[group_at])
        axis, ranks = self.axis, self.ranks.get(group.group_name) or tuple(range(group.size()))
        if group.group_name in self.shared and called_by_fsdp2(sys._getframe(2)):  # of which no trail is told
            axis = self.shared[group.group_name]
        given, got = tuple(tensors_of((args[input_at],))), tuple(tensors_of((args[output_at],)))
        self._mark_communicated_storages((*given, *got), name, axis)
        result = self.run_communication(func, args, kwargs)
        larger = got if name == "all_gather" else given
        peer = ranks[args[2]] if name in ("send", "receive", "broadcast") else -1
        kind: Literal["send", "receive", "collective"] = (
            "send" if name == "send" else "receive" if name == "receive" else "collective"
        )
        self.events.append(
            StepEvent(
                kind,
                name,
                where,
                self.consumer if name == "receive" and self.consumer else self.action,
                module,
                moved=sum(t.numel() * t.itemsize for t in (*given, *got)),
                axis=axis,
                ranks=ranks,
                peer=peer,
                shape=tuple(larger[0].shape),
                received=tuple((got if name == "all_to_all" else larger)[0].shape),
                dtype=dtype_name(larger[0].dtype),
                live=self.memory.live,
                role=role_of(where),
            )
        )
        return result

    def _mark_communicated_storages(self, tensors: Sequence[Tensor], name: str, axis: str) -> None:
        """Mark storages that are sent or received; the backward pass needs what a pipeline stage received."""
        for tensor in tensors:
            life = self.memory.lifetime_of(tensor)
            life.travels = True
            life.sent = life.sent or name == "send"
            if name == "receive" and axis.startswith("pp"):
                life.kind = "activations" if axis == "pp" else "communication"

    @contextmanager
    def following_fsdp2(self) -> Iterator[None]:
        """Within: what FSDP2 does to storages is tracked, of which operations do not show all."""

        def track_resized(storage: torch.UntypedStorage) -> None:
            if self.shared:
                self.memory.track_resize(storage)

        with fsdp2_on_one_rank(track_resized):
            yield

    @contextmanager
    def track_current_module(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Within: keep `module` set to the innermost module of these stages that is running."""

        def set_current_module(name: str, outside: list[str], *_: Any) -> None:
            outside.append(self.module)
            self.module = name

        def restore_current_module(outside: list[str], *_: Any) -> None:
            self.module = outside.pop()

        with ExitStack() as stack:
            for name, module in chain.from_iterable(stage.named_modules() for stage in stages):
                outside: list[str] = []
                before, after = partial(set_current_module, name, outside), partial(restore_current_module, outside)
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after, always_call=True).remove)
            yield


class RecordedDualBatchThreads(DualBatchThreads):
    """The two threads of a dual-batch overlap, of which a recorder is told which action runs."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def run(self, main: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
        """See the base class. Modes of torch are those of a thread, so the second one enters them too."""
        recorder = self._recorder
        first_action, _, second_action = recorder.action.partition(TOGETHER)

        def run_first_action() -> None:
            recorder.resume_action(first_action)
            main()

        def run_second_action() -> None:
            with ExitStack() as stack:
                for mode in recorder.modes:
                    stack.enter_context(mode)
                recorder.resume_action(second_action)
                second()

        super().run(run_first_action, run_second_action, device)

    def switch(self) -> None:
        """See the base class."""
        action, module = self._recorder.action, self._recorder.module
        super().switch()
        self._recorder.resume_action(action, module)


def _copy_tensors(value: Any) -> Any:
    """Return a value with copies of its tensors."""
    return (
        value.clone()
        if isinstance(value, Tensor)
        else [_copy_tensors(each) for each in value]
        if isinstance(value, list)
        else value
    )


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield all tensors (any shape) among values, and in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)
