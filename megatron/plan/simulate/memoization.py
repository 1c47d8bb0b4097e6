"""Simulate the first microbatches of each pipeline stage, and replay them for the others.

A training step sends many microbatches through the same stages; after a few of them a dry run learns nothing new. So:

    the first ones    are simulated op by op, until two consecutive forward passes of a stage, and their two backward passes, have produced the
                      same events, with the same allocations and releases at the same moments
    those between     are replayed: their events and storages are those of the recorded pass. The stage returns fake tensors of the recorded
                      layouts; one autograd node stands for its graph and replays the backward pass in its turn
    the last one      is simulated op by op again, since gradient reduction can begin in it

Everything around the stages (batches, messages, losses, the schedule) runs as usual. If two passes differ, or one leaves something allocated
that the replay could not account for, `TraceMismatch` is raised, and the dry run simulates the whole step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megatron.core.transformer.context.forward_context import MicrobatchContext
from megatron.plan.simulate.fake_tensors import ROUNDS, FakeTensorRecorder
from megatron.plan.simulate.memory import AllocationTrace, StorageLifetime
from megatron.plan.simulate.torch_internals import (
    FakeTensor,
    call_after_backward,
    is_python_node,
    tree_map,
    tree_map_only,
    without_dispatch,
    without_modes,
)
from megatron.plan.simulate.trace import StepEvent

_SAME_IN_TWO_PASSES = attrgetter(
    *(field.name for field in fields(StepEvent) if field.name not in ("action", "live", "parts"))
)
_SILENT = MicrobatchContext(0.0, training=False)  # of stages whose layers say nothing


class TraceMismatch(Exception):
    """Two passes of a stage that should be equal are not. The caller simulates the whole step instead."""


@dataclass(frozen=True, slots=True)
class _PassOutputTensorLayout:
    """The layout of a tensor that a pass hands to its caller. birth: index of its storage among those that the pass
    leaves allocated. plain: its autograd node is a C++ one; torch holds Python nodes differently.
    """

    birth: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    plain: bool


@dataclass(frozen=True, slots=True)
class _RecordedPass:
    """One simulated forward or backward pass of a stage. All numbers count from its start. live: bytes allocated before
    it. last: the event under way at its end. given: layouts of the outputs, or of the gradients of the inputs. ended:
    which earlier storages it released, in order: ("note", name of a metric), and for a backward pass ("saved", index
    among the forward pass's births), ("gradient", index of an output) or ("given", index of an input). before: names of
    the metrics that existed; notes: the metrics that it added. kept, of a forward pass: births that stay allocated
    until the step ends. flags, of a backward pass: final (kind, travels, sent) of the forward pass's births.
    """

    trace: AllocationTrace
    events: tuple[StepEvent, ...]
    live: int
    last: int
    given: tuple[_PassOutputTensorLayout | None, ...]
    ended: tuple[Any, ...]
    before: tuple[str, ...] = ()
    notes: tuple[tuple[str, _PassOutputTensorLayout], ...] = ()
    kept: frozenset[int] = frozenset()
    flags: tuple[tuple[str, bool, bool], ...] = ()

    @property
    def births_seen_by_caller(self) -> frozenset[int]:
        """Births of a forward pass that its caller can see: outputs and metrics."""
        return frozenset(
            shape.birth for shape in (*self.given, *(shape for _, shape in self.notes)) if shape is not None
        )

    def births_freed_with_graph(self, gone: frozenset[int]) -> list[int]:
        """Return the births of a forward pass that are freed with its graph. gone: those that the backward pass itself frees."""
        return sorted(set(range(len(self.trace.births))) - gone - self.births_seen_by_caller - self.kept)

    def same_as(self, other: _RecordedPass) -> bool:
        """Whether both passes produced the same events and allocations."""
        named = ("last", "given", "ended", "before", "notes", "kept", "flags")
        return (
            self.trace.same_as(other.trace)
            and all(getattr(self, name) == getattr(other, name) for name in named)
            and [_comparable_event(event, self.live) for event in self.events]
            == [_comparable_event(event, other.live) for event in other.events]
        )


@dataclass(slots=True)
class _RecordedStagePasses:
    """The recorded passes of one stage.

    settled: number of the second of two equal passes, or -1. output: the structure of its outputs, with `...` for tensors. lasting:
    indices of the inputs that were still allocated when the next pass began.
    """

    count: int = 0
    forward: _RecordedPass | None = None
    backward: _RecordedPass | None = None
    settled: int = -1
    output: Any = None
    lasting: frozenset[int] = frozenset()
    backwards: dict[int, _RecordedPass] = field(default_factory=dict)

    def record_backward(self, number: int, recorded: _RecordedPass) -> None:
        """Record the backward pass of a microbatch, and compare the two that must be equal. Raises `TraceMismatch`."""
        if number == self.settled:
            if (former := self.backwards.pop(number - 1, None)) is None or not former.same_as(recorded):
                raise TraceMismatch("two backward passes of a stage are not alike")
            self.backward = recorded
        elif self.settled < 0:
            self.backwards = {number: recorded}
        elif number == self.settled - 1:
            self.backwards[number] = recorded


@dataclass(frozen=True, slots=True)
class _RecordingStartCounters:
    """Counters at the start of a pass: events, clock, allocated bytes, and numbers read from tensors."""

    event: int
    clock: int
    live: int
    num_questions: int


@dataclass(slots=True)
class _PendingBackward:
    """A forward pass whose backward pass is still to come.

    microbatch_context: of its microbatch. asking: inputs that require gradients. lives: storages that it left, in the order of its births.

    If it was simulated: given: lifetimes of its inputs. gradients: id of the lifetime of an output's gradient -> index of the output. before, start: metrics
    and counters when its backward pass began. If it was replayed: held: inputs that stay allocated. copied: its outputs, until they are
    returned.
    """

    stage: _RecordedStagePasses
    number: int
    microbatch_context: MicrobatchContext
    asking: tuple[weakref.ref[Tensor], ...]
    lives: Sequence[StorageLifetime]
    given: Sequence[StorageLifetime | None] = ()
    held: dict[int, Tensor] = field(default_factory=dict)
    copied: tuple[tuple[Tensor, bool], ...] = ()
    gradients: dict[int, int] = field(default_factory=dict)
    before: dict[int, tuple[str, str]] = field(default_factory=dict)
    start: _RecordingStartCounters | None = None

    def lifetime_roles(self) -> dict[int, Any]:
        """Map the id of a lifetime to its role in this pass: saved by it, a metric, an output's gradient, or an input."""
        names: dict[int, Any] = {id(life): ("saved", birth) for birth, life in enumerate(self.lives)} | self.before
        for life, which in self.gradients.items():
            names.setdefault(life, ("gradient", which))
        for place, held in enumerate(self.given):
            if held is not None:
                names.setdefault(id(held), ("given", place))
        return names


class _ReplayedPass(Function):
    """The autograd node of a replayed forward pass."""

    @staticmethod
    def forward(context: Any, copier: MicrobatchMemo, waiting: _PendingBackward, *inputs: Tensor) -> tuple[Tensor, ...]:
        context.copier, context.waiting, context.number = copier, waiting, len(inputs)
        context.set_materialize_grads(False)
        context.mark_non_differentiable(*(tensor for tensor, asks in waiting.copied if not asks))
        outputs, waiting.copied = tuple(tensor for tensor, _ in waiting.copied), ()
        return outputs

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        context.held = context.copier.replay_backward(context.waiting, gradients)
        return (None,) * (2 + context.number)


class MicrobatchMemo:
    """Records and replays the stages of one rank in one step. microbatches: of the step."""

    def __init__(self, recorder: FakeTensorRecorder, microbatches: int) -> None:
        self.recorder, self.last = recorder, microbatches - 1
        # What serves until the step ends, of passes that were not followed.
        self._until_step_end: list[StorageLifetime] = []
        self._graph: list[StorageLifetime] = []  # what has to end with a graph, before the next pass
        self._former: _PendingBackward | None = (
            None  # the forward pass that was followed last, until the next pass begins
        )

    @contextmanager
    def installed_on(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Replace the forward methods of these stages by ones that record or replay."""
        with ExitStack() as stack:
            for stage in stages:
                stage.forward = partial(self._record_or_replay_forward, _RecordedStagePasses(), stage.forward)
                stack.callback(delattr, stage, "forward")
            yield
            self._require_graph_freed()
        self.recorder.memory.end_lifetimes(self._until_step_end)

    def _record_or_replay_forward(self, stage: _RecordedStagePasses, plain: Any, **given: Any) -> Any:
        """Replaces a stage's forward method `plain`: record, or replay once two equal passes are recorded."""
        self._require_graph_freed()
        number, stage.count = stage.count, stage.count + 1
        if stage.settled < 0 or number == self.last:
            return self._record_forward(stage, number, plain, given)
        return self._replay_forward(stage, number, given)

    # Following.

    def _counters_at_start(self) -> _RecordingStartCounters:
        """Return the counters at the start of a pass, after checking that the last pass has freed what it must."""
        self._require_graph_freed()
        memory = self.recorder.memory
        return _RecordingStartCounters(
            len(self.recorder.events), memory.clock, memory.live, self.recorder.num_questions
        )

    def _require_graph_freed(self) -> None:
        """At the start of a pass: raise `TraceMismatch` unless what had to be freed with a graph has been, and note
        which inputs of the last pass are still allocated.
        """
        if any(life.is_allocated for life in self._graph):
            raise TraceMismatch("something that a backward pass left does not end with its graph")
        self._graph.clear()
        if self._former is not None:
            self._former.stage.lasting = frozenset(
                place for place, life in enumerate(self._former.given) if life is not None and life.is_allocated
            )
            self._former = None

    def _record_forward(self, stage: _RecordedStagePasses, number: int, plain: Any, given: dict[str, Any]) -> Any:
        """Run a forward pass, record it, and compare it with the recorded one. Raises `TraceMismatch`."""
        memory, mark, microbatch_context = (
            self.recorder.memory,
            self._counters_at_start(),
            given.get("microbatch_context") or _SILENT,
        )
        before = self._metric_lives(microbatch_context)
        output = plain(**given)
        trace, births, deaths = memory.trace_since(mark.clock, mark.event, mark.live)
        place = {id(life): birth for birth, life in enumerate(births)}
        outputs = tuple(_tensors_in(output))
        shapes = tuple(self._tensor_layout(tensor, place) for tensor in outputs)
        retained = {id(memory.find_lifetime(tensor)) for tensor in _tensors_in(microbatch_context.compute_once_results)}
        seen = replace(
            self._finish_recording(
                mark, trace, shapes, tuple(_lifetime_role(before, life, "a forward pass") for life in deaths)
            ),
            before=_metric_names(before),
            notes=self._new_metrics(microbatch_context, place),
            kept=frozenset(birth for life, birth in place.items() if life in retained),
        )
        waiting = _PendingBackward(
            stage,
            number,
            microbatch_context,
            _requiring_gradients(given),
            births,
            [memory.find_lifetime(tensor) for tensor in _tensors_in(tuple(given.values()))],
        )
        self._former = waiting
        for which, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_output_gradient, waiting, seen, which))
        if stage.settled >= 0 and (stage.forward is None or not seen.same_as(stage.forward)):
            raise TraceMismatch("the last forward pass of a stage is another than those before")
        if stage.forward is not None and seen.same_as(stage.forward) and stage.settled < 0:
            stage.settled, stage.output = number, tree_map_only(Tensor, lambda _: ..., output)
        stage.forward = seen
        return output

    def _on_output_gradient(
        self, waiting: _PendingBackward, forward: _RecordedPass, which: int, gradient: Tensor
    ) -> None:
        """Autograd hook: runs when a recorded stage's backward pass starts, and once for each output gradient that arrives."""
        life = self.recorder.memory.find_lifetime(gradient)
        if life is not None:
            waiting.gradients[id(life)] = which
        if waiting.start is None:
            waiting.start, waiting.before = self._counters_at_start(), self._metric_lives(waiting.microbatch_context)
            call_after_backward(partial(self._on_backward_end, waiting, forward))

    def _on_backward_end(self, waiting: _PendingBackward, forward: _RecordedPass) -> None:
        """Autograd callback at the end of a stage's backward pass: record it. Raises `TraceMismatch`."""
        memory, mark = self.recorder.memory, waiting.start
        assert mark is not None, "the beginning of a backward pass was marked"
        trace, births, deaths = memory.trace_since(mark.clock, mark.event, mark.live)
        place = {id(life): birth for birth, life in enumerate(births)}
        gradients = tuple(
            None if (tensor := reference()) is None or tensor.grad is None else self._tensor_layout(tensor.grad, place)
            for reference in waiting.asking
        )
        noted = self._new_metrics(waiting.microbatch_context, place)
        accounted = {shape.birth for shape in (*gradients, *(shape for _, shape in noted)) if shape is not None}
        if len(births) != len(accounted):
            raise TraceMismatch("a backward pass leaves something behind")
        names = waiting.lifetime_roles()
        ended = tuple(_lifetime_role(names, life, "a backward pass") for life in deaths)
        if not _births_freed_in_backward(ended).isdisjoint(forward.births_seen_by_caller):
            raise TraceMismatch("a backward pass ends what others see")
        rest = [waiting.lives[birth] for birth in forward.births_freed_with_graph(_births_freed_in_backward(ended))]
        if not all(life.is_allocated for life in rest):
            raise TraceMismatch("what a forward pass left ends before its backward pass")
        self._graph += rest
        seen = replace(
            self._finish_recording(mark, trace, gradients, ended),
            before=_metric_names(waiting.before),
            notes=noted,
            flags=tuple((life.kind, life.travels, life.sent) for life in waiting.lives),
        )
        waiting.stage.record_backward(waiting.number, seen)

    def _finish_recording(
        self,
        mark: _RecordingStartCounters,
        trace: AllocationTrace,
        given: tuple[_PassOutputTensorLayout | None, ...],
        ended: tuple[Any, ...],
    ) -> _RecordedPass:
        """Return the recorded pass since its start. Raises `TraceMismatch` if it cannot be replayed."""
        recorder, events = self.recorder, self.recorder.events[mark.event :]
        if (recorder.num_questions - mark.num_questions) % ROUNDS:
            raise TraceMismatch("a pass asks for numbers whose answers change")
        if any(event.action != recorder.action or event.kind == "action" for event in events):
            raise TraceMismatch("another action begins in a pass")
        return _RecordedPass(trace, events, mark.live, recorder.memory.event - mark.event, given, ended)

    def _tensor_layout(self, tensor: Tensor, place: dict[int, int]) -> _PassOutputTensorLayout:
        """Return a tensor's layout. place: id of a lifetime -> birth in this pass; `TraceMismatch` if it has none."""
        life = self.recorder.memory.find_lifetime(tensor)
        if life is None or id(life) not in place:
            raise TraceMismatch("a stage gives what it was given")
        return _PassOutputTensorLayout(
            place[id(life)],
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
            not is_python_node(tensor.grad_fn),
        )

    def _metric_lives(self, microbatch_context: MicrobatchContext) -> dict[int, tuple[str, str]]:
        """Map the ids of the metrics' lifetimes to ("note", name)."""
        return {
            id(self.recorder.memory.find_lifetime(note)): ("note", name)
            for name, note in microbatch_context.metrics.items()
        }

    def _new_metrics(
        self, microbatch_context: MicrobatchContext, place: dict[int, int]
    ) -> tuple[tuple[str, _PassOutputTensorLayout], ...]:
        """Return the metrics that a pass added, with their layouts."""
        return tuple(
            (name, self._tensor_layout(note, place))
            for name, note in microbatch_context.metrics.items()
            if id(self.recorder.memory.find_lifetime(note)) in place
        )

    # Counting again.

    def _require_same_metrics(self, microbatch_context: MicrobatchContext, seen: _RecordedPass) -> None:
        """Raise `TraceMismatch` unless the microbatch has the metrics that it had before the recorded pass."""
        if tuple(microbatch_context.metrics) != seen.before:
            raise TraceMismatch("other notes were made before a pass")

    def _replay_forward(self, stage: _RecordedStagePasses, number: int, given: dict[str, Any]) -> Any:
        """Replay the recorded forward pass: its events and allocations, and fake outputs of the recorded layouts."""
        memory, seen, microbatch_context = (
            self.recorder.memory,
            stage.forward,
            given.get("microbatch_context") or _SILENT,
        )
        assert seen is not None, "a pass is counted once two alike were followed"
        self._require_same_metrics(microbatch_context, seen)
        lives = self._replay_allocations(
            seen, [memory.detach_lifetime(microbatch_context.metrics[name]) for _, name in seen.ended]
        )
        shapes = [shape for shape in seen.given if shape is not None]  # all outputs of a forward pass have one
        made = tuple((self._fake_tensor_of_layout(shape, lives), shape.requires_grad) for shape in shapes)
        microbatch_context.metrics |= {name: self._fake_tensor_of_layout(shape, lives) for name, shape in seen.notes}
        asking = _requiring_gradients(given)
        held = {
            place: tensor for place, tensor in enumerate(_tensors_in(tuple(given.values()))) if place in stage.lasting
        }
        waiting = _PendingBackward(stage, number, microbatch_context, asking, lives, held=held, copied=made)
        del made
        outputs = _ReplayedPass.apply(self, waiting, self._grad_anchor(), *(reference() for reference in asking))
        with without_modes():
            forwarded = [
                torch.ops.aten.alias(tensor) if shape.requires_grad and shape.plain else tensor
                for tensor, shape in zip(outputs, shapes)
            ]
        following = iter(forwarded)
        return tree_map(lambda one: next(following) if one is ... else one, stage.output)

    def replay_backward(self, waiting: _PendingBackward, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Replay the backward pass of a replayed forward pass.

        Returns tensors (any shape) that are freed with its graph.
        """
        memory, seen, forward = self.recorder.memory, waiting.stage.backward, waiting.stage.forward
        if seen is None or forward is None:
            raise TraceMismatch("a pass comes back before one that was followed")
        for life, flags in zip(waiting.lives, seen.flags, strict=True):
            life.kind, life.travels, life.sent = flags
        if not all(kind != "given" or place in waiting.held for kind, place in seen.ended):
            raise TraceMismatch("a graph keeps what it was given, which did not last before")
        self._require_same_metrics(waiting.microbatch_context, seen)
        held: dict[str, Any] = {
            "gradient": gradients,
            "given": waiting.held,
            "note": waiting.microbatch_context.metrics,
        }
        ending = [
            waiting.lives[place] if kind == "saved" else memory.detach_lifetime(held[kind][place])
            for kind, place in seen.ended
        ]
        lives = self._replay_allocations(seen, ending)
        waiting.microbatch_context.metrics |= {
            name: self._fake_tensor_of_layout(shape, lives) for name, shape in seen.notes
        }
        for reference, shape in zip(waiting.asking, seen.given, strict=True):
            if shape is not None and (tensor := reference()) is not None:
                tensor.grad = self._fake_tensor_of_layout(shape, lives)
        self._until_step_end += [waiting.lives[birth] for birth in forward.kept]
        return [
            self._fake_tensor_in_lifetime(waiting.lives[birth], (waiting.lives[birth].size,), (1,), 0, torch.uint8)
            for birth in forward.births_freed_with_graph(_births_freed_in_backward(seen.ended))
        ]

    def _replay_allocations(self, seen: _RecordedPass, ending: Sequence[StorageLifetime]) -> list[StorageLifetime]:
        """Repeat a pass's events and allocations, ending `ending`; return the lifetimes of storages that stay."""
        recorder, begin = self.recorder, len(self.recorder.events)
        recorder.events.append_repeated(seen.events, recorder.action, recorder.memory.live - seen.live)
        recorder.memory.event = begin + seen.last
        return recorder.memory.replay(seen.trace, begin, ending)

    def _fake_tensor_of_layout(self, shape: _PassOutputTensorLayout, lives: Sequence[StorageLifetime]) -> Tensor:
        """Return a fake tensor of a recorded layout, in the storage of one of these lifetimes."""
        return self._fake_tensor_in_lifetime(lives[shape.birth], shape.size, shape.stride, shape.offset, shape.dtype)

    def _fake_tensor_in_lifetime(
        self, life: StorageLifetime, size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
    ) -> Tensor:
        """Return a fake tensor in the storage of a lifetime, which ends when the tensor is freed."""
        with without_dispatch():
            memory = torch.empty(life.size, dtype=torch.uint8, device="meta").untyped_storage()
            tensor = torch.empty(0, dtype=dtype, device="meta").set_(memory, offset, size, stride)
        made = FakeTensor(self.recorder.world.mode, tensor, torch.device("cpu"))
        self.recorder.memory.attach_lifetime(life, made)
        return made

    def _grad_anchor(self) -> Tensor:
        """Return a tensor that makes the graph of a first stage require gradients although none of its inputs does."""
        with without_dispatch():
            tensor = torch.empty((), device="meta")
        return FakeTensor(self.recorder.world.mode, tensor, torch.device("cpu")).requires_grad_()


def _comparable_event(event: StepEvent, live: int) -> tuple[Any, ...]:
    """Return what must be equal of an event in two passes. live: bytes allocated before the pass."""
    return (*_SAME_IN_TWO_PASSES(event), event.live - live)


def _births_freed_in_backward(ended: tuple[Any, ...]) -> frozenset[int]:
    """Return the births of a forward pass among the (role, index) of what a backward pass freed."""
    return frozenset(birth for kind, birth in ended if kind == "saved")


def _metric_names(notes: dict[int, tuple[str, str]]) -> tuple[str, ...]:
    return tuple(name for _, name in notes.values())


def _lifetime_role(who: dict[int, Any], life: StorageLifetime, where: str) -> Any:
    """Return the role of a lifetime that ended. Raises `TraceMismatch` for an unknown one."""
    if id(life) not in who:
        raise TraceMismatch(f"something from before ends in {where}")
    return who[id(life)]


def _requiring_gradients(given: dict[str, Any]) -> tuple[weakref.ref[Tensor], ...]:
    """Return weak references to the tensors among the arguments that require gradients."""
    return tuple(weakref.ref(tensor) for tensor in _tensors_in(tuple(given.values())) if tensor.requires_grad)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a value, through sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors_in(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _tensors_in(getattr(value, one.name))
