"""Every operation of a step as an event, on tensors with or without data.

A `Recorder` stands between torch's autograd and its kernels (a dispatch mode), and so sees what a rank computes in the
forward and in the backward pass, what it sends, and every storage that comes and goes. It only looks on, with one
exception: which experts tokens choose is not known without data, so under a recorder they choose evenly, in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from megatron.core.optimizer import optimizer
from megatron.core.parallel.overlap import DualBatch
from megatron.trust.simulate.memory import Heap
from megatron.trust.simulate.trace import TOGETHER, Event, Events

_ROOT = Path(__file__).parents[3]  # as the frames of this package name it: not resolved
_OURS = ("megatron/", "tasks/", "tools/", "examples/", "tests/", "pretrain_")
_LOOKS_ON = ("megatron/trust/", "megatron/core/parallel/collectives.py", "megatron/core/parallel/flight_recorder.py")
_HOST = "megatron/core/parallel/device.py:"  # where room in the host's memory is asked for
_FSDP = "/torch/distributed/fsdp/"
# Where a backward pass is started: what runs then belongs to the line of the forward pass that it goes back to.
_STARTS_BACKWARD = ("megatron/core/pipeline_parallel/executor.py", "megatron/core/parallel/recompute.py")

# c10d's operations: our name, place of the group among the arguments, of what is sent, and of what comes.
_TALK = {
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
Place = tuple[str, str]  # (file and line, module)


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What an event says of an operation; `Event` explains."""

    name: str
    flops: int
    moved: int
    shape: tuple[int, ...]
    dtype: str
    factors: str


def facts_of(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> OpFacts:
    """What follows from the shapes of what an operation took and gave."""
    made = tuple(tensors_of((result,)))
    count = flop_registry.get(func._overloadpacket)
    shaped = [
        arg for arg in args if not isinstance(arg, torch.dtype)
    ]  # torch's formulas know of no product into another format
    flops = 0 if count is None else int(count(*shaped, **kwargs, out_val=result))
    moved = 0 if func.is_view else sum(tensor.numel() * tensor.itemsize for tensor in (*tensors_of(args), *made))
    first = made[0] if made else None
    return OpFacts(
        str(func._overloadpacket),
        flops,
        moved,
        () if first is None else tuple(first.shape),
        "" if first is None else _word(first.dtype),
        _factors(args) if flops else "",
    )


def _factors(args: tuple) -> str:
    """The format of what a product multiplies: the narrowest that it takes, as what it adds to, biases and scales are as wide or wider."""
    formats = {tensor.dtype for tensor in tensors_of(args) if tensor.is_floating_point()}
    return _word(min(formats, key=lambda dtype: dtype.itemsize)) if formats else ""


def _word(dtype: torch.dtype) -> str:
    """torch.float32 -> float32."""
    return str(dtype).removeprefix("torch.")


def chosen_in_turn(tokens: int, each: int, experts: int) -> Tensor:
    """The choice of so many tokens, each of so many experts, that gives all experts alike to do: int64 [t, k]."""
    return (torch.arange(tokens * each) % experts).view(tokens, each)


class Recorder(TorchDispatchMode):
    """Writes down what passes. ranks: name of a process group -> its global ranks. axis: of the mesh, of the next collective; taker:
    the action that the next message is for.

    choices: (experts, how many a token chooses), if there are routers. heap: where storages are counted.
    """

    def __init__(self, ranks: Mapping[str, tuple[int, ...]], choices: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.ranks, self.choices, self.axis, self.taker = ranks, choices, "", ""
        self.heap, self.events = Heap(), Events()
        self.action, self._entered, self.module = "setup", "setup", ""
        self._offloads = False  # something lies in the host's memory
        self.shared: Mapping[
            str, str
        ] = {}  # name of a process group -> its axis, of those over which FSDP2 cuts weights
        self.begins: dict[str, int] = {}  # action -> when it began, by the heap's clock
        self._seen: dict[CodeType, str] = {}
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._makers: dict[int, Place] = {}  # number of an autograd node -> where the forward pass made it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that torch would put around costs more than the rest

    def enter(self, action: str) -> None:
        """Another action or phase begins."""
        if action != self._entered:  # and not back in it, after data was read
            self.action = self._entered = action
            self.begins[action] = self.heap.clock
            self.heap.enter(action)
            self.heap.event = len(self.events)
            self.events.append(Event("action", action, action=action, live=self.heap.live))

    def resume(self, action: str, module: str = "") -> None:
        """Go on with one of the two actions that are done in turns."""
        self.action, self.module = action, module
        self.heap.enter(action)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if DTensor in types:  # its local tensor comes by itself
            return NotImplemented
        if func is torch.ops.prim.device.default:  # a question, which only a tensor without data asks here
            return args[0].fake_device
        heap, kwargs = self.heap, kwargs or {}
        heap.event = len(self.events)
        if func.namespace == "c10d":
            return self._talk(func, args, kwargs)
        where, module = self._place()
        result, facts = self.perform(func, args, kwargs, where)
        elsewhere = self._elsewhere(func, args, kwargs, where)
        for tensor in tensors_of((result,)):
            heap.see(tensor, elsewhere=elsewhere)
        self.events.append(
            Event(
                "op",
                facts.name,
                where,
                self.action,
                module,
                facts.flops,
                facts.moved,
                shape=facts.shape,
                dtype=facts.dtype,
                live=heap.live,
                factors=facts.factors,
            )
        )
        return result

    def perform(self, func: Any, args: tuple, kwargs: dict[str, Any], where: str) -> tuple[Any, OpFacts]:
        """What an operation gives, and what is to be said of it."""
        result = func(*args, **kwargs)
        if self._chooses(func, args):
            result[1].copy_(self._choice(result[1]))
        return result, facts_of(func, args, kwargs, result)

    def _elsewhere(self, func: Any, args: tuple, kwargs: dict[str, Any], where: str) -> bool:
        """Whether what an operation makes lies in the host's memory: room that was asked for there, and what is computed of that alone."""
        if where.startswith(_HOST) and func is torch.ops.aten.empty.memory_format:
            self._offloads = True
        elif not self._offloads or "device" in kwargs:
            return False
        else:
            lives = [self.heap.known(tensor) for tensor in tensors_of(args)]
            return bool(lives) and all(life is not None and life.elsewhere for life in lives)
        return True

    def communicate(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a collective or message gives.

        A transport has copies of its own, and threads that hold tensors for some time after the work is done. Neither is the
        step's; so it is given copies, and its work is waited for at once. Messages have no threads, and no time to wait.
        """
        if func._overloadpacket.__name__ in ("send", "recv_"):
            return func(*args, **kwargs)
        copies = [_copied(value) for value in args]
        result = func(*copies, **kwargs)
        works = result[1] if isinstance(result, tuple) else result
        dist.Work.unbox(works).wait()
        for tensor, copy in zip(tensors_of((args[0],)), tensors_of((copies[0],)), strict=True):
            tensor.copy_(copy)
        done = FakeWork().boxed()
        return (args[0], done) if isinstance(result, tuple) else done

    def _choice(self, chosen: Tensor) -> Tensor:
        """What a router chooses: [t, k] like `chosen`."""
        assert self.choices is not None, "only a router chooses"
        tokens, each = chosen.shape
        return chosen_in_turn(tokens, each, self.choices[0])

    def _chooses(self, func: Any, args: tuple) -> bool:
        """Whether the operation is a router's choice of experts."""
        return (
            self.choices is not None
            and func is torch.ops.aten.topk.default
            and args[0].dim() == 2
            and (args[0].shape[-1], args[1]) == self.choices
        )

    def _talk(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A collective or a message."""
        where, module = self._place()
        name, group_at, input_at, output_at = _TALK[func._overloadpacket.__name__]
        group = dist.ProcessGroup.unbox(args[group_at])
        axis, ranks = self.axis, self.ranks.get(group.group_name) or tuple(range(group.size()))
        if group.group_name in self.shared and _asked_by_fsdp(sys._getframe(2)):  # of which no trail is told
            axis = self.shared[group.group_name]
        given, got = tuple(tensors_of((args[input_at],))), tuple(tensors_of((args[output_at],)))
        for tensor in (*given, *got):
            life = self.heap.of(tensor)
            life.travels = True
            life.sent = life.sent or name == "send"
            if name == "receive" and axis.startswith("pp"):
                life.kind = (
                    "activations" if axis == "pp" else "communication"
                )  # the backward pass needs what a stage took
        result = self.communicate(func, args, kwargs)
        larger = got if name == "all_gather" else given
        peer = ranks[args[2]] if name in ("send", "receive", "broadcast") else -1
        kind: Literal["send", "receive", "collective"] = (
            "send" if name == "send" else "receive" if name == "receive" else "collective"
        )
        self.events.append(
            Event(
                kind,
                name,
                where,
                self.taker if name == "receive" and self.taker else self.action,
                module,
                moved=sum(t.numel() * t.itemsize for t in (*given, *got)),
                axis=axis,
                ranks=ranks,
                peer=peer,
                shape=tuple(larger[0].shape),
                received=tuple((got if name == "all_to_all" else larger)[0].shape),
                dtype=_word(larger[0].dtype),
                live=self.heap.live,
            )
        )
        return result

    def _place(self) -> Place:
        """The innermost line of ours, and the module at work. Of an operation of autograd, those of the forward pass."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = self._file(frame.f_code)
            if file:
                break
            frame = frame.f_back
        else:
            return "", self.module
        if file.endswith(_STARTS_BACKWARD):
            node = torch._C._current_autograd_node()
            if node is not None and (made := self._makers.get(node._sequence_nr())) is not None:
                return made
        key = frame.f_code, frame.f_lineno
        if key not in self._lines:
            self._lines[key] = f"{file}:{frame.f_lineno}"
        place = self._lines[key], self.module
        if torch.is_grad_enabled():
            self._makers[torch.autograd._get_sequence_nr() - 1] = place
        return place

    def _file(self, code: CodeType) -> str:
        """The file of a line of ours, or nothing."""
        if code not in self._seen:
            path = Path(code.co_filename)
            file = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else ""
            self._seen[code] = file if file.startswith(_OURS) and not file.startswith(_LOOKS_ON) else ""
        return self._seen[code]

    @contextmanager
    def following(self, below: Sequence[AbstractContextManager[Any]] = ()) -> Iterator[None]:
        """Go along with the second of two passes in turns, on its own thread; below: the modes under this one. And know what FSDP2
        does beside operations: it takes room for whole layers, and lets go of it.

        It also asks for numbers: for its ranks, which are true ones; and whether a share still lies where it did, as it does. And an
        optimizer that keeps its state in the host's memory is told that there is one, though the step runs on a CPU.
        """
        resize, from_group = torch.UntypedStorage.resize_, DeviceMesh.from_group
        run, switch = DualBatch.run, DualBatch.switch

        def run_both(
            turns: DualBatch, main: Callable[[], None], beside: Callable[[], None], device: torch.device
        ) -> None:
            first, _, second = self.action.partition(TOGETHER)

            def forward() -> None:
                self.resume(first)
                main()

            def backward() -> None:
                with ExitStack() as stack:
                    for mode in (*below, self):
                        stack.enter_context(mode)
                    self.resume(second)
                    beside()

            run(turns, forward, backward, device)

        def pass_on_and_resume(turns: DualBatch) -> None:
            action, module = self.action, self.module
            switch(turns)
            self.resume(action, module)

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if self.shared:
                self.heap.resized(storage)

        def unseen(*args: Any, **options: Any) -> DeviceMesh:
            with _disable_current_modes():
                return from_group(*args, **options)

        with (
            _replaced(torch.UntypedStorage, "resize_", resized),
            _replaced(DeviceMesh, "from_group", staticmethod(unseen)),
            _replaced(FSDPParam, "reset_sharded_param", lambda param: None),
            _replaced(DualBatch, "run", run_both),
            _replaced(DualBatch, "switch", pass_on_and_resume),
            _replaced(optimizer, "has_separate_memory", lambda device: True),
        ):
            yield

    @contextmanager
    def naming(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Know inside which module of these stages an operation runs."""
        with ExitStack() as stack:
            for stage in stages:
                for name, module in stage.named_modules():
                    outside: list[str] = []
                    before = module.register_forward_pre_hook(self._entering(name, outside))
                    after = module.register_forward_hook(self._leaving(outside), always_call=True)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield

    def _entering(self, name: str, outside: list[str]) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            outside.append(self.module)
            self.module = name

        return enter

    def _leaving(self, outside: list[str]) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            self.module = outside.pop()

        return leave


@contextmanager
def _replaced(owner: type | ModuleType, name: str, value: Any) -> Iterator[None]:
    """A method of a class, or a function that a module uses, replaced for a while."""
    plain, is_own = owner.__dict__.get(name), name in owner.__dict__
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)


def _asked_by_fsdp(frame: FrameType | None) -> bool:
    """Whether FSDP2 stands between this frame and the first of ours."""
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(_ROOT / "megatron"):
        if _FSDP in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _copied(value: Any) -> Any:
    """A value with copies of its tensors."""
    return (
        value.clone()
        if isinstance(value, Tensor)
        else [_copied(each) for each in value]
        if isinstance(value, list)
        else value
    )


def tensors_of(values: Any) -> Iterator[Tensor]:
    """All tensors among values, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)
