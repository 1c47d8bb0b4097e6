"""What a stage does with one microbatch, followed a few times and then counted again.

A step sends many microbatches through the same stages, and of all but a few of them a dry run learns nothing new. So it follows
them only until it has seen what there is to see:

    the first ones         op by op, until two forward passes of a stage in a row, and the two backward passes that belong to
                           them, made the same events and took and gave back the same memory at the same moments
    those between          counted again: the events and storages of the one before. A stage gives tensors like those that it
                           gave; one autograd node stands for its graph, and counts the backward pass again when its turn comes
    the last one           op by op again, as sums of gradients may begin in it

What goes on around stages (text, messages, losses, the schedule) runs as it always does. Where two passes differ, or one leaves
something behind where nobody would find it again, `TraceMismatch` is raised, and the dry run follows all of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function, Variable
from torch.utils._python_dispatch import _disable_current_modes

from megatron.core.transformer.passing import MicrobatchContext
from megatron.trust.simulate.fake_tensors import ROUNDS, FakeRecorder
from megatron.trust.simulate.memory import LifetimeDelta, StorageLifetime
from megatron.trust.simulate.trace import Event

_SILENT = MicrobatchContext(0.0, training=False)  # of stages whose layers say nothing


class TraceMismatch(Exception):
    """Passes that would have to be alike are not. The message says how; who follows all of a step needs no more."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor that others see. birth: which of its pass's births its storage is. asks: whether it has a gradient; plain: whose
    autograd node is none of Python's, which torch holds in another way.
    """

    birth: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    asks: bool
    plain: bool


@dataclass(frozen=True, slots=True)
class _RecordedPass:
    """One pass that was followed, told from its beginning but for its events. live: bytes alive before it.

    last: event under way at its end. given: what it gave: outputs, or gradients of its inputs. ended: who from before ended in it, in
    order: (note, its name), and of a backward pass (saved, which birth of the forward pass), (gradient, of which output) or (given,
    which tensor of what the stage was given). before: names of notes that were there; notes: what it noted. Of a forward pass, kept:
    births that serve until the step ends. Of a backward pass, flags: what became of its births: kind, travels, sent.
    """

    stretch: LifetimeDelta
    events: tuple[Event, ...]
    live: int
    last: int
    given: tuple[_Shape | None, ...]
    ended: tuple[Any, ...]
    before: tuple[str, ...] = ()
    notes: tuple[tuple[str, _Shape], ...] = ()
    kept: frozenset[int] = frozenset()
    flags: tuple[tuple[str, bool, bool], ...] = ()

    @property
    def visible(self) -> frozenset[int]:
        """Births of a forward pass that others see."""
        return frozenset(
            shape.birth for shape in (*self.given, *(shape for _, shape in self.notes)) if shape is not None
        )

    def held(self, gone: frozenset[int]) -> list[int]:
        """Births of a forward pass that end with its graph, if these do in its backward pass."""
        return sorted(set(range(len(self.stretch.births))) - gone - self.visible - self.kept)

    def like(self, other: _RecordedPass) -> bool:
        """Whether both did the same."""
        named = ("last", "given", "ended", "before", "notes", "kept", "flags")
        return (
            self.stretch.like(other.stretch)
            and all(getattr(self, name) == getattr(other, name) for name in named)
            and [_alike(event, self.live) for event in self.events]
            == [_alike(event, other.live) for event in other.events]
        )


@dataclass(slots=True)
class _Stage:
    """What is known of one stage. settled: number of the second of two followed passes that were alike, or -1. output: what its
    outputs come in. lasting: which tensors of what it was given were still there when the next pass began.
    """

    count: int = 0
    forward: _RecordedPass | None = None
    backward: _RecordedPass | None = None
    settled: int = -1
    output: Any = None
    lasting: frozenset[int] = frozenset()
    backwards: dict[int, _RecordedPass] = field(default_factory=dict)

    def add_backward(self, number: int, recorded: _RecordedPass) -> None:
        """Keep the backward pass of a microbatch that was followed, and compare the two that must be alike."""
        if number == self.settled:
            if (former := self.backwards.pop(number - 1, None)) is None or not former.like(recorded):
                raise TraceMismatch("two backward passes of a stage are not alike")
            self.backward = recorded
        elif self.settled < 0:
            self.backwards = {number: recorded}
        elif number == self.settled - 1:
            self.backwards[number] = recorded


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment."""

    event: int
    clock: int
    live: int
    num_questions: int


@dataclass(slots=True)
class _Pass:
    """A pass whose backward pass is still to come. microbatch_context: of its microbatch. asking: what it was given that asks for gradients. lives:
    what it left, as its births.

    Of one that was followed, given: the lives of what it was given; gradients: id of the life of an output's gradient -> which output;
    before, mark: the notes that were there when its backward pass began, and when that was. Of one that was counted, held: what it was
    given that lasts; copied: its outputs, until they are given away.
    """

    stage: _Stage
    number: int
    microbatch_context: MicrobatchContext
    asking: tuple[weakref.ref[Tensor], ...]
    lives: Sequence[StorageLifetime]
    given: Sequence[StorageLifetime | None] = ()
    held: dict[int, Tensor] = field(default_factory=dict)
    copied: tuple[tuple[Tensor, bool], ...] = ()
    gradients: dict[int, int] = field(default_factory=dict)
    before: dict[int, tuple[str, str]] = field(default_factory=dict)
    mark: _Mark | None = None

    def names_of_lives(self) -> dict[int, Any]:
        """id of a storage's life -> what it is to this pass: saved by it, a metric, an output's gradient, or an input."""
        names: dict[int, Any] = {id(life): ("saved", birth) for birth, life in enumerate(self.lives)} | self.before
        for life, which in self.gradients.items():
            names.setdefault(life, ("gradient", which))
        for place, held in enumerate(self.given):
            if held is not None:
                names.setdefault(id(held), ("given", place))
        return names


class _ReplayedPass(Function):
    """Stands for the graph of a stage."""

    @staticmethod
    def forward(context: Any, copier: MicrobatchMemo, waiting: _Pass, *inputs: Tensor) -> tuple[Tensor, ...]:
        context.copier, context.waiting, context.number = copier, waiting, len(inputs)
        context.set_materialize_grads(False)
        context.mark_non_differentiable(*(tensor for tensor, asks in waiting.copied if not asks))
        outputs, waiting.copied = tuple(tensor for tensor, _ in waiting.copied), ()
        return outputs

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        context.held = context.copier.count_backward(context.waiting, gradients)
        return (None,) * (2 + context.number)


class MicrobatchMemo:
    """Stands around the stages of one rank for one step. microbatches: of the step."""

    def __init__(self, recorder: FakeRecorder, microbatches: int) -> None:
        self.recorder, self.last = recorder, microbatches - 1
        self._left: list[StorageLifetime] = []  # what serves until the step ends, of passes that were not followed
        self._graph: list[StorageLifetime] = []  # what has to end with a graph, before the next pass
        self._former: _Pass | None = None  # the forward pass that was followed last, until the next pass begins

    @contextmanager
    def around(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Follow these stages, or count them again."""
        with ExitStack() as stack:
            for stage in stages:
                stage.forward = partial(self._forward, _Stage(), stage.forward)
                stack.callback(delattr, stage, "forward")
            yield
            self._check()
        self.recorder.heap.end(self._left)

    def _forward(self, stage: _Stage, plain: Any, **given: Any) -> Any:
        self._check()
        number, stage.count = stage.count, stage.count + 1
        if stage.settled < 0 or number == self.last:
            return self._follow(stage, number, plain, given)
        return self._count(stage, number, given)

    # Following.

    def _mark(self) -> _Mark:
        self._check()
        heap = self.recorder.heap
        return _Mark(len(self.recorder.events), heap.clock, heap.live, self.recorder.num_questions)

    def _check(self) -> None:
        """Another pass begins: what had to end with a graph has ended, and what a forward pass was given and still lasts will last."""
        if any(life.lasts for life in self._graph):
            raise TraceMismatch("something that a backward pass left does not end with its graph")
        self._graph.clear()
        if self._former is not None:
            self._former.stage.lasting = frozenset(
                place for place, life in enumerate(self._former.given) if life is not None and life.lasts
            )
            self._former = None

    def _follow(self, stage: _Stage, number: int, plain: Any, given: dict[str, Any]) -> Any:
        heap, mark, microbatch_context = self.recorder.heap, self._mark(), given.get("microbatch_context") or _SILENT
        before = self._notes(microbatch_context)
        output = plain(**given)
        stretch, births, deaths = heap.stretch(mark.clock, mark.event, mark.live)
        place = {id(life): birth for birth, life in enumerate(births)}
        outputs = tuple(_tensors(output))
        shapes = tuple(self._shape(tensor, place) for tensor in outputs)
        retained = {id(heap.known(tensor)) for tensor in _tensors(microbatch_context.retained)}
        seen = replace(
            self._seen(mark, stretch, shapes, tuple(_known(before, life, "a forward pass") for life in deaths)),
            before=_names(before),
            notes=self._noted(microbatch_context, place),
            kept=frozenset(birth for life, birth in place.items() if life in retained),
        )
        waiting = _Pass(
            stage,
            number,
            microbatch_context,
            _asking(given),
            births,
            [heap.known(tensor) for tensor in _tensors(tuple(given.values()))],
        )
        self._former = waiting
        for which, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._comes_back, waiting, seen, which))
        if stage.settled >= 0 and (stage.forward is None or not seen.like(stage.forward)):
            raise TraceMismatch("the last forward pass of a stage is another than those before")
        if stage.forward is not None and seen.like(stage.forward) and stage.settled < 0:
            stage.settled, stage.output = number, _without_tensors(output)
        stage.forward = seen
        return output

    def _comes_back(self, waiting: _Pass, forward: _RecordedPass, which: int, gradient: Tensor) -> None:
        """The backward pass of a stage that was followed begins, or one more of its gradients is there."""
        life = self.recorder.heap.known(gradient)
        if life is not None:
            waiting.gradients[id(life)] = which
        if waiting.mark is None:
            waiting.mark, waiting.before = self._mark(), self._notes(waiting.microbatch_context)
            Variable._execution_engine.queue_callback(partial(self._came_back, waiting, forward))

    def _came_back(self, waiting: _Pass, forward: _RecordedPass) -> None:
        """The backward pass of a stage that was followed has ended."""
        heap, mark = self.recorder.heap, waiting.mark
        assert mark is not None, "the beginning of a backward pass was marked"
        stretch, births, deaths = heap.stretch(mark.clock, mark.event, mark.live)
        place = {id(life): birth for birth, life in enumerate(births)}
        gradients = tuple(
            None if (tensor := reference()) is None or tensor.grad is None else self._shape(tensor.grad, place)
            for reference in waiting.asking
        )
        noted = self._noted(waiting.microbatch_context, place)
        accounted = {shape.birth for shape in (*gradients, *(shape for _, shape in noted)) if shape is not None}
        if len(births) != len(accounted):
            raise TraceMismatch("a backward pass leaves something behind")
        names = waiting.names_of_lives()
        ended = tuple(_known(names, life, "a backward pass") for life in deaths)
        if not _gone(ended).isdisjoint(forward.visible):
            raise TraceMismatch("a backward pass ends what others see")
        rest = [waiting.lives[birth] for birth in forward.held(_gone(ended))]
        if not all(life.lasts for life in rest):
            raise TraceMismatch("what a forward pass left ends before its backward pass")
        self._graph += rest
        seen = replace(
            self._seen(mark, stretch, gradients, ended),
            before=_names(waiting.before),
            notes=noted,
            flags=tuple((life.kind, life.travels, life.sent) for life in waiting.lives),
        )
        waiting.stage.add_backward(waiting.number, seen)

    def _seen(
        self, mark: _Mark, stretch: LifetimeDelta, given: tuple[_Shape | None, ...], ended: tuple[Any, ...]
    ) -> _RecordedPass:
        recorder, events = self.recorder, self.recorder.events[mark.event :]
        if (recorder.num_questions - mark.num_questions) % ROUNDS:
            raise TraceMismatch("a pass asks for numbers whose answers change")
        if any(event.action != recorder.action or event.kind == "action" for event in events):
            raise TraceMismatch("another action begins in a pass")
        return _RecordedPass(stretch, events, mark.live, recorder.heap.event - mark.event, given, ended)

    def _shape(self, tensor: Tensor, place: dict[int, int]) -> _Shape:
        life = self.recorder.heap.known(tensor)
        if life is None or id(life) not in place:
            raise TraceMismatch("a stage gives what it was given")
        return _Shape(
            place[id(life)],
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
            not isinstance(tensor.grad_fn, torch._C._FunctionBase),
        )

    def _notes(self, microbatch_context: MicrobatchContext) -> dict[int, tuple[str, str]]:
        """Who the lives of the notes are."""
        return {id(self.recorder.heap.known(note)): ("note", name) for name, note in microbatch_context.metrics.items()}

    def _noted(self, microbatch_context: MicrobatchContext, place: dict[int, int]) -> tuple[tuple[str, _Shape], ...]:
        """The notes that were made in a pass."""
        return tuple(
            (name, self._shape(note, place))
            for name, note in microbatch_context.metrics.items()
            if id(self.recorder.heap.known(note)) in place
        )

    # Counting again.

    def _same_notes(self, microbatch_context: MicrobatchContext, seen: _RecordedPass) -> None:
        if tuple(microbatch_context.metrics) != seen.before:
            raise TraceMismatch("other notes were made before a pass")

    def _count(self, stage: _Stage, number: int, given: dict[str, Any]) -> Any:
        heap, seen, microbatch_context = self.recorder.heap, stage.forward, given.get("microbatch_context") or _SILENT
        assert seen is not None, "a pass is counted once two alike were followed"
        self._same_notes(microbatch_context, seen)
        lives = self._again(seen, [heap.release(microbatch_context.metrics[name]) for _, name in seen.ended])
        shapes = [shape for shape in seen.given if shape is not None]  # all outputs of a forward pass have one
        made = tuple((self._made(shape, lives), shape.asks) for shape in shapes)
        microbatch_context.metrics |= {name: self._made(shape, lives) for name, shape in seen.notes}
        asking = _asking(given)
        held = {place: tensor for place, tensor in enumerate(_tensors(tuple(given.values()))) if place in stage.lasting}
        waiting = _Pass(stage, number, microbatch_context, asking, lives, held=held, copied=made)
        del made
        outputs = _ReplayedPass.apply(self, waiting, self._anchor(), *(reference() for reference in asking))
        with _disable_current_modes():
            forwarded = [
                torch.ops.aten.alias(tensor) if shape.asks and shape.plain else tensor
                for tensor, shape in zip(outputs, shapes)
            ]
        return _filled(stage.output, iter(forwarded))

    def count_backward(self, waiting: _Pass, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The turn of a pass that was counted has come. Returns what ends with its graph."""
        heap, seen, forward = self.recorder.heap, waiting.stage.backward, waiting.stage.forward
        if seen is None or forward is None:
            raise TraceMismatch("a pass comes back before one that was followed")
        for life, flags in zip(waiting.lives, seen.flags, strict=True):
            life.kind, life.travels, life.sent = flags
        if not all(kind != "given" or place in waiting.held for kind, place in seen.ended):
            raise TraceMismatch("a graph keeps what it was given, which did not last before")
        self._same_notes(waiting.microbatch_context, seen)
        held: dict[str, Any] = {
            "gradient": gradients,
            "given": waiting.held,
            "note": waiting.microbatch_context.metrics,
        }
        ending = [
            waiting.lives[place] if kind == "saved" else heap.release(held[kind][place]) for kind, place in seen.ended
        ]
        lives = self._again(seen, ending)
        waiting.microbatch_context.metrics |= {name: self._made(shape, lives) for name, shape in seen.notes}
        for reference, shape in zip(waiting.asking, seen.given, strict=True):
            if shape is not None and (tensor := reference()) is not None:
                tensor.grad = self._made(shape, lives)
        self._left += [waiting.lives[birth] for birth in forward.kept]
        return [
            self._in(waiting.lives[birth], (waiting.lives[birth].size,), (1,), 0, torch.uint8)
            for birth in forward.held(_gone(seen.ended))
        ]

    def _again(self, seen: _RecordedPass, ending: Sequence[StorageLifetime]) -> list[StorageLifetime]:
        recorder, begin = self.recorder, len(self.recorder.events)
        recorder.events.repeat(seen.events, recorder.action, recorder.heap.live - seen.live)
        recorder.heap.event = begin + seen.last
        return recorder.heap.again(seen.stretch, begin, ending)

    def _made(self, shape: _Shape, lives: Sequence[StorageLifetime]) -> Tensor:
        """A tensor like one that was seen, in the storage of one of these lives."""
        return self._in(lives[shape.birth], shape.size, shape.stride, shape.offset, shape.dtype)

    def _in(
        self, life: StorageLifetime, size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
    ) -> Tensor:
        """A tensor in the storage of a life, which ends with it."""
        with torch._C._DisableTorchDispatch():
            memory = torch.empty(life.size, dtype=torch.uint8, device="meta").untyped_storage()
            tensor = torch.empty(0, dtype=dtype, device="meta").set_(memory, offset, size, stride)
        made = FakeTensor(self.recorder.world.mode, tensor, torch.device("cpu"))
        self.recorder.heap.embody(life, made)
        return made

    def _anchor(self) -> Tensor:
        """What makes the graph of a first stage ask for gradients, though nothing that it is given does."""
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty((), device="meta")
        return FakeTensor(self.recorder.world.mode, tensor, torch.device("cpu")).requires_grad_()


def _alike(event: Event, live: int) -> tuple[Any, ...]:
    """What is to be the same of an event in two passes. live: bytes alive before the pass."""
    return (
        event.kind,
        event.name,
        event.where,
        event.module,
        event.flops,
        event.moved,
        event.axis,
        event.ranks,
        event.peer,
        event.shape,
        event.received,
        event.dtype,
        event.factors,
        event.live - live,
    )


def _gone(ended: tuple[Any, ...]) -> frozenset[int]:
    """Births of a forward pass that end in its backward pass."""
    return frozenset(birth for kind, birth in ended if kind == "saved")


def _names(notes: dict[int, tuple[str, str]]) -> tuple[str, ...]:
    return tuple(name for _, name in notes.values())


def _known(who: dict[int, Any], life: StorageLifetime, where: str) -> Any:
    """Who a life that ended is."""
    if id(life) not in who:
        raise TraceMismatch(f"something from before ends in {where}")
    return who[id(life)]


def _asking(given: dict[str, Any]) -> tuple[weakref.ref[Tensor], ...]:
    """The tensors among arguments that ask for gradients."""
    return tuple(weakref.ref(tensor) for tensor in _tensors(tuple(given.values())) if tensor.requires_grad)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value: in sequences, and in records."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))


def _without_tensors(value: Any) -> Any:
    """What tensors come in, with dots in their places."""
    return ... if isinstance(value, Tensor) else _each(value, _without_tensors)


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with tensors in the places of dots."""
    return next(tensors) if value is ... else _each(value, lambda one: _filled(one, tensors))


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple, named or not, of what was made of its parts; anything else as it is."""
    if not isinstance(value, tuple):
        return value
    return type(value)(*map(change, value)) if hasattr(value, "_fields") else tuple(map(change, value))
