"""Walk one rank's script. The only file of this package that touches tensors, and the only executor there is: training
with and without a pipeline, evaluation and decoding differ in their plans alone.

What a stage is and what a microbatch holds is the caller's `Work`. What lies between stages is handled here:

    F   received tensors -> leaves that want gradients -> work.forward -> outputs, sent on
    B   gradients of the outputs -> autograd -> gradients of the received tensors, sent back
    W   gradients of weights that a B left for later

Between F and B only the received tensors and the *places* of the outputs in the autograd graph are kept. The output
itself is let go as soon as it has been sent: the graph does not need its values unless an operation saved them.

Both ends of a message know its tensors beforehand. Activations have the shapes that the taking stage declares;
gradients are those of the floating-point tensors among them, zeros where a stage made no use of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.parallel.flight_recorder import FlightRecorder
from megatron.core.parallel.mesh import Axis
from megatron.core.pipeline_parallel.schedules import TOWARDS, Action
from megatron.core.pipeline_parallel.transfers import Script, Transfer

Shape = tuple[tuple[int, ...], torch.dtype]


class Work(Protocol):
    """What the caller does for the executor, on the stages of this rank."""

    device: torch.device

    def receives(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """Shape and dtype of each tensor that the stage takes from the one before; asked some actions ahead."""

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one stage on one microbatch and return what the next stage takes.

        The last stage of a plan with backward passes returns (loss,), a scalar scaled for backward. Without them,
        what the last stage returns is dropped: keep what is wanted.
        """

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """A backward pass of the stage is about to run; `last`: its last one in this plan, which leaves nothing for later."""

    def reduce(self, stage: int) -> None:
        """All gradients of the stage are there: begin their reduction over data parallelism."""


def run(script: Script, *, work: Work, axis: Axis, backward_axis: Axis, delays: bool = False) -> None:
    """Do everything the script says; returns when this rank's messages are through.

    axis: the pipeline, for activations; backward_axis: the same ranks with a group of their own, for gradients.
    Layers delay weight gradients in `axis.overlap` until the schedule's "W"; or, with `delays`, until a backward pass would wait
    for other ranks.
    """
    assert (script.rank, script.size) == (axis.rank, axis.size), (
        f"the script is for rank {script.rank} of {script.size}, this is rank {axis.rank} of {axis.size}"
    )
    final = {step.stage: step for step in script.steps if isinstance(step, Action) and step.op == "B"}
    splits = any(isinstance(step, Action) and step.op == "W" for step in script.steps)
    assert not (splits and delays), "a plan says when its weights' gradients are computed"
    own = frozenset(step for step in script.steps if isinstance(step, Action))
    walk = _Walk(script, work, {"F": axis, "B": backward_axis}, final, own, splits, delays)
    with torch.set_grad_enabled(bool(final)):
        for part in script.parts():
            if isinstance(part[0], Transfer):
                walk.begin(part[0])
            elif len(part) == 1:
                walk.perform(part[0])
            else:
                walk.perform_together(*part)
        walk.finish()


@dataclass(slots=True)
class _Payload:
    """Tensors on their way, or arrived if nothing is pending."""

    tensors: tuple[Tensor, ...]
    pending: tuple[dist.Work, ...] = ()

    def wait(self, flight_recorder: FlightRecorder) -> tuple[Tensor, ...]:
        if self.pending:
            flight_recorder.pause()
            for handle in self.pending:
                handle.wait()
            self.pending = ()
            flight_recorder.resume()
        return self.tensors


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a backward pass needs: the received tensors, and the shape and graph edge of each floating-point output."""

    received: tuple[Tensor, ...]
    shapes: tuple[Shape, ...]
    edges: tuple[GradientEdge | None, ...]


@dataclass(slots=True)
class _Walk:
    """The tensors of one rank while it walks; each is let go by the step that uses it last."""

    script: Script
    work: Work
    axes: dict[str, Axis]
    final: dict[int, Action]
    own: frozenset[Action]
    splits: bool
    delays: bool
    arrived: dict[Action, _Payload] = field(default_factory=dict)  # by the action that takes it
    made: dict[Action, tuple[Tensor, ...]] = field(default_factory=dict)  # by the action that made it
    sending: list[_Payload] = field(default_factory=list)
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)

    def begin(self, transfer: Transfer) -> None:
        """Begin this rank's end of a message; see it through if messages are not to overlap with actions."""
        axis = self.axes[transfer.kind]
        sends, source, target = transfer.src == axis.rank, axis.ranks[transfer.src], axis.ranks[transfer.dst]
        tensors = self.made.pop(transfer.made_by) if sends else self._buffers(transfer.taken_by)
        axis.flight_recorder.note(transfer, axis.name, (source, target), sum(tensor.nbytes for tensor in tensors))
        if sends:
            payload = _Payload(tensors, tuple(dist.isend(t, dst=target, group=axis.group) for t in tensors))
            self.sending.append(payload)
        else:
            payload = _Payload(tensors, tuple(dist.irecv(t, src=source, group=axis.group) for t in tensors))
            self.arrived[transfer.taken_by] = payload
        if not self.script.overlap:
            payload.wait(axis.flight_recorder)

    def perform(self, action: Action) -> None:
        """Do one action; what was being sent when it began is through when it ends, and is let go."""
        earlier, self.sending = self.sending, []
        flight_recorder = self.axes["F"].flight_recorder
        flight_recorder.enter(action)
        flight_recorder.start()
        if action.op == "F":
            self._pass_on(action, self._forward(action))
        elif action.op == "B":
            self._pass_on(action, self._backward(action))
        elif action.op == "W":
            self.axes["F"].overlap.wgrad_store.pop((action.stage, action.microbatch))
        else:
            self.work.reduce(action.stage)
        flight_recorder.stop()
        for payload in earlier:
            payload.wait(flight_recorder)

    def perform_together(self, forward: Action, backward: Action) -> None:
        """Dual-batch overlap: run two passes that take turns while the other communicates."""
        earlier, self.sending = self.sending, []
        flight_recorder = self.axes["F"].flight_recorder
        flight_recorder.enter(f"{forward} and {backward}")
        flight_recorder.start()
        self.axes["F"].overlap.run_both(
            lambda: self._pass_on(forward, self._forward(forward)),
            lambda: self._pass_on(backward, self._backward(backward)),
            self.work.device,
        )
        flight_recorder.stop()
        for payload in earlier:
            payload.wait(flight_recorder)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for payload in self.sending:
            payload.wait(self.axes["F"].flight_recorder)
        left = [*self.arrived, *self.made, *self.kept]
        assert not left, f"the script ended with results that nobody took: {left}"

    def _forward(self, action: Action) -> Iterable[Tensor]:
        """Run a stage on what it received; keep what its backward pass needs, if there will be one."""
        received = self.arrived.pop(action).wait(self.axes["F"].flight_recorder) if action.stage > 0 else ()
        if self.final:
            received = tuple(_leaf(tensor) for tensor in received)
        outputs = self.work.forward(action.stage, action.microbatch, received)
        if self.final:
            floating = [tensor for tensor in outputs if tensor.is_floating_point()]
            self.kept[action.stage, action.microbatch] = _Kept(
                received,
                tuple((tuple(tensor.shape), tensor.dtype) for tensor in floating),
                tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in floating),
            )
        return outputs

    def _backward(self, action: Action) -> Iterable[Tensor]:
        """Run autograd from a stage's outputs down to what it received, and return the gradients of that."""
        kept = self.kept.pop((action.stage, action.microbatch))
        is_last_stage = action.stage == self.script.stages - 1
        gradients = (
            (None,) * len(kept.edges)
            if is_last_stage
            else self.arrived.pop(action).wait(self.axes["B"].flight_recorder)
        )
        last = action == self.final[action.stage]
        # With delays, the last pass of a stage leaves nothing: some weights would come twice, and their sum set out after the first.
        leaves = self.splits or (self.delays and not last)
        self.work.before_backward(action.stage, action.microbatch, last and not leaves)
        pairs = [pair for pair in zip(kept.edges, gradients, strict=True) if pair[0] is not None]
        if pairs:
            with self._delayed(action) if leaves else nullcontext():
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        return [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.received if leaf.requires_grad
        ]

    def _delayed(self, action: Action) -> AbstractContextManager[None]:
        """Around autograd, where weight gradients are delayed."""
        overlap = self.axes["F"].overlap
        return overlap.delayed_weight_gradients((action.stage, action.microbatch), fill_waits=self.delays)

    def _pass_on(self, action: Action, tensors: Iterable[Tensor]) -> None:
        """Leave an action's result for the message that takes it, or for the action itself where that is on this rank."""
        taker = Action(action.op, action.stage + TOWARDS[action.op], action.microbatch)
        if not 0 <= taker.stage < self.script.stages:
            return
        detached = tuple(tensor.detach().contiguous() for tensor in tensors)
        if taker in self.own:
            self.arrived[taker] = _Payload(detached)
        else:
            self.made[action] = detached

    def _buffers(self, taker: Action) -> tuple[Tensor, ...]:
        """Room for what an action takes."""
        stage, microbatch = taker.stage, taker.microbatch
        shapes = self.work.receives(stage, microbatch) if taker.op == "F" else self.kept[stage, microbatch].shapes
        return tuple(torch.empty(shape, dtype=dtype, device=self.work.device) for shape, dtype in shapes)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor
