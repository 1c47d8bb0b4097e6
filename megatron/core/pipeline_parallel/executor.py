"""Run one rank's script of a pipeline schedule.

The only file of this package that touches tensors, and the only executor: training with and without a pipeline,
evaluation and decoding differ in their plans alone. The computation of a stage is the caller's `PipelineWork`; this
file handles what passes between stages:

    F   received tensors -> leaves that require gradients -> work.forward -> outputs, sent to the next stage
    B   gradients of the outputs -> autograd -> gradients of the received tensors, sent to the previous stage
    W   weight gradients that a B has delayed

Between F and B only the received tensors and the graph edges of the outputs are stored. An output itself is released as
soon as it has been sent: the graph does not need its values unless an operation saved them.

Sender and receiver both know the shapes of a message beforehand. Activations have the shapes that the receiving stage
declares; gradients are those of the floating-point tensors among them, zeros where a stage did not use one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.parallel import collectives
from megatron.core.parallel.flight_recorder import FlightRecorder
from megatron.core.parallel.mesh import Axis
from megatron.core.pipeline_parallel.schedules import STAGE_STEP, Action
from megatron.core.pipeline_parallel.transfers import RankScript, Transfer

Shape = tuple[tuple[int, ...], torch.dtype]


class PipelineWork(Protocol):
    """The computation that the caller provides for the stages of this rank."""

    @property
    def device(self) -> torch.device:
        """Device of this rank's stages."""

    def input_specs(self, stage: int, microbatch: int) -> tuple[Shape, ...]:
        """Return shape and dtype of each tensor that the stage receives; called some actions ahead."""

    def forward(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run one stage on one microbatch and return the tensors that the next stage receives.

        The last stage of a plan with backward passes returns (loss,), a scalar [] scaled for backward. In a plan
        without them the outputs of the last stage are dropped, so the caller stores what it needs.
        """

    def before_backward(self, stage: int, microbatch: int, last: bool) -> None:
        """Called before a backward pass of the stage. last: after it the stage's gradients are complete: it is the
        stage's last one in this plan and delays no weight gradients.
        """

    def start_gradient_reduction(self, stage: int) -> None:
        """Start the data-parallel reduction of the stage's gradients, which are complete."""


def run_rank_script(
    script: RankScript, *, work: PipelineWork, axis: Axis, backward_axis: Axis, delays: bool = False
) -> None:
    """Run all actions and messages of a script; returns when this rank's messages are complete.

    axis: the pipeline ranks, for activations; backward_axis: the same ranks with a separate process group, for
    gradients. Layers delay weight gradients in `axis.overlap` until the schedule's "W"; or, with `delays`, until a
    backward pass would wait for other ranks (`--delay-wgrad-compute`).
    """
    assert (script.rank, script.size) == (axis.rank, axis.size), (
        f"the script is for rank {script.rank} of {script.size}, this is rank {axis.rank} of {axis.size}"
    )
    runner = _ScriptRunner(script, work, {"F": axis, "B": backward_axis}, delays)
    assert not (runner.splits and delays), "a plan with W actions says itself when weight gradients are computed"
    with torch.set_grad_enabled(bool(runner.last_backward)):
        for step in script.instructions():
            if isinstance(step, Transfer):
                runner.start_transfer(step)
            else:
                runner.run_action_or_pair(step)
        runner.wait_for_sends()


@dataclass(slots=True)
class _TensorMessage:
    """Tensors in transit: sent or received; complete once nothing is pending."""

    tensors: tuple[Tensor, ...]
    pending: tuple[collectives.Work, ...] = ()

    def wait(self, flight_recorder: FlightRecorder) -> tuple[Tensor, ...]:
        """Wait until the message is complete, and return its tensors."""
        if self.pending:
            flight_recorder.pause_compute_timing()
            for work in self.pending:
                collectives.wait(work)
            self.pending = ()
            flight_recorder.resume_compute_timing()
        return self.tensors


@dataclass(frozen=True, slots=True)
class _SavedForBackward:
    """State for a backward pass: the received tensors, and the shape and graph edge of each floating-point output."""

    received: tuple[Tensor, ...]
    shapes: tuple[Shape, ...]
    edges: tuple[GradientEdge | None, ...]


class _ScriptRunner:
    """The tensors of one rank while its script runs; each is released by the step that uses it last.

    inputs: received messages, by the action that consumes them. outputs: tensors to send, by the action that produced
    them. saved: state for backward passes, by stage and microbatch. last_backward: each stage's last backward action;
    empty in a script without any.
    """

    def __init__(self, script: RankScript, work: PipelineWork, axes: dict[str, Axis], delays: bool) -> None:
        self.script, self.work, self.axes, self.delays = script, work, axes, delays
        self.actions = frozenset(step for step in script.steps if isinstance(step, Action))
        self.last_backward = {step.stage: step for step in script.steps if isinstance(step, Action) and step.op == "B"}
        self.splits = any(action.op == "W" for action in self.actions)
        self.inputs: dict[Action, _TensorMessage] = {}
        self.outputs: dict[Action, tuple[Tensor, ...]] = {}
        self.sending: list[_TensorMessage] = []
        self.saved: dict[tuple[int, int], _SavedForBackward] = {}

    def start_transfer(self, transfer: Transfer) -> None:
        """Start this rank's end of a message; wait for it if messages are not to overlap with actions."""
        axis = self.axes[transfer.producer.op]
        sends, source, target = transfer.src == axis.rank, axis.ranks[transfer.src], axis.ranks[transfer.dst]
        tensors = self.outputs.pop(transfer.producer) if sends else self._receive_buffers(transfer.consumer)
        axis.flight_recorder.record_collective(
            transfer, axis.name, (source, target), sum(tensor.nbytes for tensor in tensors)
        )
        if sends:
            message = _TensorMessage(tensors, tuple(dist.isend(t, dst=target, group=axis.group) for t in tensors))
            self.sending.append(message)
        else:
            message = _TensorMessage(tensors, tuple(dist.irecv(t, src=source, group=axis.group) for t in tensors))
            self.inputs[transfer.consumer] = message
        if not self.script.overlap:
            message.wait(axis.flight_recorder)

    def run_action_or_pair(self, actions: tuple[Action, ...]) -> None:
        """Run one action, or a forward and a backward pass with dual-batch overlap.

        Messages that were being sent when it started have been sent when it ends, and are released.
        """
        earlier, self.sending = self.sending, []
        flight_recorder = self.axes["F"].flight_recorder
        flight_recorder.enter_phase(actions[0] if len(actions) == 1 else " and ".join(map(str, actions)))
        flight_recorder.start_compute_timing()
        if len(actions) == 1:
            self._run_action(actions[0])
        else:
            forward, backward = (partial(self._run_action, action) for action in actions)
            self.axes["F"].overlap.run_dual_batch(forward, backward, self.work.device)
        flight_recorder.stop_compute_timing()
        for message in earlier:
            message.wait(flight_recorder)

    def _run_action(self, action: Action) -> None:
        """Run one action, and store its result for the action that consumes it."""
        if action.op == "F":
            self._store_result(action, self._forward(action))
        elif action.op == "B":
            self._store_result(action, self._backward(action))
        elif action.op == "W":
            self.axes["F"].overlap.wgrad_store.pop((action.stage, action.microbatch))
        else:
            self.work.start_gradient_reduction(action.stage)

    def wait_for_sends(self) -> None:
        """Wait until everything has been sent."""
        for message in self.sending:
            message.wait(self.axes["F"].flight_recorder)
        unused = [*self.inputs, *self.outputs, *self.saved]
        assert not unused, f"the script ended with results that no action consumed: {unused}"

    def _forward(self, action: Action) -> Iterable[Tensor]:
        """Run a stage on its inputs; save what its backward pass needs, if there will be one."""
        received = self.inputs.pop(action).wait(self.axes["F"].flight_recorder) if action.stage > 0 else ()
        if self.last_backward:
            received = tuple(tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in received)
        outputs = self.work.forward(action.stage, action.microbatch, received)
        if self.last_backward:
            floating = [tensor for tensor in outputs if tensor.is_floating_point()]
            self.saved[action.stage, action.microbatch] = _SavedForBackward(
                received,
                tuple((tuple(tensor.shape), tensor.dtype) for tensor in floating),
                tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in floating),
            )
        return outputs

    def _backward(self, action: Action) -> Iterable[Tensor]:
        """Run autograd from a stage's outputs down to its inputs, and return the gradients of these."""
        saved = self.saved.pop((action.stage, action.microbatch))
        gradients: Sequence[Tensor | None] = (None,) * len(saved.edges)
        if action.stage < self.script.stages - 1:
            gradients = self.inputs.pop(action).wait(self.axes["B"].flight_recorder)
        last = action == self.last_backward[action.stage]
        # The last pass of a stage delays nothing: a weight could contribute twice, and its reduction start after the first.
        delayed = self.splits or (self.delays and not last)
        self.work.before_backward(action.stage, action.microbatch, last and not delayed)
        pairs = [(edge, gradient) for edge, gradient in zip(saved.edges, gradients, strict=True) if edge is not None]
        if pairs:
            overlap, key = self.axes["F"].overlap, (action.stage, action.microbatch)
            delay = overlap.delay_weight_gradients(key, fill_waits=self.delays) if delayed else nullcontext()
            with delay:
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        return [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in saved.received if leaf.requires_grad
        ]

    def _store_result(self, action: Action, tensors: Iterable[Tensor]) -> None:
        """Store an action's result for the message that sends it, or for the consuming action if that is on this rank."""
        consumer = Action(action.op, action.stage + STAGE_STEP[action.op], action.microbatch)
        if not 0 <= consumer.stage < self.script.stages:
            return
        detached = tuple(tensor.detach().contiguous() for tensor in tensors)
        if consumer in self.actions:
            self.inputs[consumer] = _TensorMessage(detached)
        else:
            self.outputs[action] = detached

    def _receive_buffers(self, consumer: Action) -> tuple[Tensor, ...]:
        """Return empty tensors for what the action `consumer` receives."""
        stage, microbatch = consumer.stage, consumer.microbatch
        shapes = (
            self.work.input_specs(stage, microbatch) if consumer.op == "F" else self.saved[stage, microbatch].shapes
        )
        return tuple(torch.empty(shape, dtype=dtype, device=self.work.device) for shape, dtype in shapes)
