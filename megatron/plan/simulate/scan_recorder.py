"""Scans over a state in a dry run: one event a pass, in the place of all operations of every chunk.

    forward     allocates the output, the states that are kept, and what a span of chunks needs meanwhile
    backward    allocates gradients, and what a span needs that is computed again

A scan does the same for every span of chunks (`kernels.scans`); those of one layer of 8,192 tokens are thousands of operations. Here the
kernel runs on one span of each kind, on the meta device. Its operations are parts of the event, and the cost model computes the time by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.kernels.state_space import scans
from megatron.core.parallel.offload import disable_activation_offload
from megatron.plan.simulate.recorder import StepRecorder, dtype_name
from megatron.plan.simulate.torch_internals import storage_key, without_modes
from megatron.plan.simulate.trace import EventList, RecordedScanEvents, StepEvent

Scan = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ScanPassCost:
    """What a pass over one span does. workspace: most bytes allocated beside its inputs and results."""

    operations: RecordedScanEvents
    workspace: int


@dataclass(frozen=True, slots=True)
class ScanSpan:
    """A span of chunks of a scan: positions [start, stop), and the costs of its passes."""

    start: int
    stop: int
    forward: ScanPassCost
    backward: ScanPassCost


@dataclass(frozen=True, slots=True)
class ScanKind:
    """A kind of scan. inputs: their names; values: the one shaped like the output, [s, b, n, p]; keys: one that gives a
    state rows or columns, [s, b, g, d]. keys_first: a state is [b, n, d, p], not [b, n, p, d]. fixed: inputs without
    positions.
    """

    name: str
    kernel: Scan
    inputs: tuple[str, ...]
    values: str
    keys: str
    keys_first: bool
    fixed: tuple[str, ...] = ()

    def state_shape(self, tensors: dict[str, Tensor]) -> tuple[int, ...]:
        """Return the shape of a state. tensors: the inputs by name, values [s, b, n, p] and keys [s, b, g, d]."""
        _, batch, heads, size = tensors[self.values].shape
        deep = tensors[self.keys].shape[3]
        return (batch, heads, deep, size) if self.keys_first else (batch, heads, size, deep)


KINDS = (
    ScanKind("selective_scan", scans.selective_scan, ("x", "dt", "a", "b", "c"), "x", "b", False, ("a",)),
    ScanKind("delta_rule_scan", scans.delta_rule_scan, ("q", "k", "v", "g", "beta"), "v", "k", True),
)


@dataclass(frozen=True, slots=True)
class ScanRecorder:
    """Records torch's scans as one event a pass. known: costs of spans by their shapes, shared by the recorders of a dry run."""

    recorder: StepRecorder
    known: dict[Any, tuple[ScanPassCost, ScanPassCost]] = field(default_factory=dict)

    def replace_scans_with_recorded(self, kernels: Kernels) -> Kernels:
        """Return the kernels with torch's scans replaced by recorded ones."""
        torchs = [kind for kind in KINDS if getattr(kernels, kind.name) is kind.kernel]
        recorded: dict[str, Any] = {kind.name: self._make_recorded_scan(kind) for kind in torchs}
        return replace(kernels, **recorded)

    def _make_recorded_scan(self, kind: ScanKind) -> Scan:
        def recorded_scan(
            *inputs: Tensor, segments: Tensor | None, state: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            return _RecordedScanFunction.apply(self, kind, segments, state, *inputs)

        return recorded_scan

    def spans(
        self, kind: ScanKind, tensors: dict[str, Tensor], segments: Tensor | None, state: Tensor | None
    ) -> list[ScanSpan]:
        """Return the spans of a scan with values [s, b, n, p], with costs. The first may have no state before it; the
        last one's final state has no gradient.
        """
        length, size = len(tensors[kind.values]), scans.checkpoint_span_tokens()
        ends = [(start, min(start + size, length)) for start in range(0, length, size)]
        return [
            ScanSpan(
                start,
                stop,
                *self._span_cost(
                    kind,
                    tensors,
                    stop - start,
                    documents=segments is not None,
                    given=start > 0 or state is not None,
                    last=stop == length,
                ),
            )
            for start, stop in ends
        ]

    def _span_cost(
        self, kind: ScanKind, tensors: dict[str, Tensor], length: int, *, documents: bool, given: bool, last: bool
    ) -> tuple[ScanPassCost, ScanPassCost]:
        """Return the costs of (forward, backward) over a span, measured once. documents: it has segments; given: it
        begins with a state; last: its final state has no gradient.
        """
        shapes = {
            name: (tuple(each.shape) if name in kind.fixed else (length, *each.shape[1:]), each.dtype)
            for name, each in tensors.items()
        }
        key = kind.name, *shapes.values(), documents, given, last
        if key not in self.known:
            with without_modes(), disable_activation_offload(), torch.enable_grad():
                made = {
                    name: torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
                    for name, (shape, dtype) in shapes.items()
                }
                self.known[key] = _measure_scan_span_cost(kind, made, documents=documents, given=given, last=last)
        return self.known[key]


def _measure_scan_span_cost(
    kind: ScanKind, tensors: dict[str, Tensor], *, documents: bool, given: bool, last: bool
) -> tuple[ScanPassCost, ScanPassCost]:
    """Run the kernel forward and backward over one span of tensors on the meta device, and record both passes; see `_span_cost`."""
    values, shape = tensors[kind.values], kind.state_shape(tensors)
    wide = accumulation_dtype_of(values.dtype)
    segments = torch.empty(values.shape[1], len(values), dtype=torch.int64, device="meta") if documents else None
    state = torch.empty(shape, dtype=wide, device="meta", requires_grad=True) if given else None
    behind = [] if last else [torch.empty(shape, dtype=wide, device="meta")]
    gradients = [torch.empty_like(values, requires_grad=False), *behind]
    asking = [each for each in (*tensors.values(), state) if each is not None]
    recorder = StepRecorder({})
    for tensor in (*asking, *gradients, *([] if segments is None else [segments])):
        recorder.memory.track(tensor)
    with recorder:
        results, forward = _run_and_measure_scan_pass(
            recorder, lambda: kind.kernel(*tensors.values(), segments=segments, state=state)
        )
        _, backward = _run_and_measure_scan_pass(
            recorder, lambda: torch.autograd.grad(results[: len(gradients)], asking, gradients)
        )
    return forward, backward


def _run_and_measure_scan_pass(
    recorder: StepRecorder, run: Callable[[], tuple[Tensor, ...]]
) -> tuple[tuple[Tensor, ...], ScanPassCost]:
    """Run a pass under the recorder. Return (its results, its cost)."""
    memory, recorder.events = recorder.memory, EventList()
    before = memory.live
    memory.begin_peak_measurement()
    results = run()
    made = sum({storage_key(each.untyped_storage()): each.untyped_storage().nbytes() for each in results}.values())
    return results, ScanPassCost(RecordedScanEvents(tuple(recorder.events)), max(0, memory.peak - before - made))


class _RecordedScanFunction(Function):
    """A scan that allocates what the kernel allocates, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, scan: ScanRecorder, kind: ScanKind, segments: Tensor | None, state: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Allocate what the kernel would, and record one event. Returns (output [s, b, n, p], final state)."""
        tensors = dict(zip(kind.inputs, inputs, strict=True))
        values, shape = tensors[kind.values], kind.state_shape(tensors)
        spans, wide = scan.spans(kind, tensors, segments, state), accumulation_dtype_of(values.dtype)
        states = values.new_empty((len(spans) - 1, *shape), dtype=wide)
        # The outputs of spans are there until they are joined.
        held = max(values.nbytes * span.stop // len(values) + span.forward.workspace for span in spans)
        ctx.where = _record_scan_event(scan.recorder, kind.name, values, [span.forward for span in spans], held)
        pieces = values.new_empty(values.shape) if len(spans) > 1 else None
        output, last = values.new_empty(values.shape), values.new_empty(shape, dtype=wide)
        del pieces
        ctx.scan, ctx.kind, ctx.spans = scan, kind, spans
        ctx.save_for_backward(segments, states, state, *inputs)
        return output, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Allocate what the kernel would, and record one event. output: the gradient of the output, [s, b, n, p].
        Returns gradients of the state and the inputs.
        """
        given, spans, length = ctx.saved_tensors[2:], ctx.spans, len(output)
        asking = [each if needed else None for each, needed in zip(given, ctx.needs_input_grad[3:], strict=True)]
        size = sum(each.nbytes for each in asking if each is not None)
        # The span that comes last, the first of the sequence, copies what it needs of the output's gradient, which is then released.
        held = max(
            size * (length - span.start) // length + span.backward.workspace - (0 if span.start else output.nbytes)
            for span in spans
        )
        passes = [span.backward for span in reversed(spans)]
        _record_scan_event(ctx.scan.recorder, f"{ctx.kind.name}_backward", output, passes, held, ctx.where)
        made = [None if each is None else each.new_empty(each.shape) for each in asking]
        if len(spans) > 1:  # gradients of spans are joined, those of one input at a time
            largest = max((each for each in made if each is not None), key=Tensor.numel)
            largest.new_empty(largest.shape)
        return None, None, None, *made


def _record_scan_event(
    recorder: StepRecorder, name: str, values: Tensor, passes: list[ScanPassCost], held: int, where: str = ""
) -> str:
    """Record one event for a pass over all spans that holds `held` bytes. values: [s, b, n, p]. Return its line."""
    workspace = values.new_empty(held, dtype=torch.uint8)
    parts = tuple((times, operations) for operations, times in Counter(each.operations for each in passes).items())
    every = [(times, event) for times, operations in parts for event in operations.events]
    event = StepEvent(
        "op",
        f"scan.{name}",
        where,
        flops=sum(times * event.flops for times, event in every),
        moved=sum(times * event.moved for times, event in every),
        shape=tuple(values.shape),
        dtype=dtype_name(values.dtype),
        factors=dtype_name(accumulation_dtype_of(values.dtype)),
        parts=parts,
    )
    where = recorder.append_hidden_operation(event)
    del workspace
    return where
