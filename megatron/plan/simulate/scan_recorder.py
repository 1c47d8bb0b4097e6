"""Scans over a state in a dry run: one event a pass, in the place of all operations of every chunk.

    forward     allocates the output, the states that are kept, and what a span of chunks needs meanwhile
    backward    allocates gradients, and what a span needs that is computed again

torch's scans do the same for every span of chunks (`kernels.scans`); those of one layer of 8,192 tokens are thousands of operations. Here the
scan runs on one span of each kind, on the meta device. Its operations are parts of the event, and the cost model computes the time by them.
The kernels that a GPU's run takes where it asks for them, Triton's or a package's, are one operation or a few for a span: their parts have the
products of torch's and the bytes of Triton's, and what they allocate is what Triton's do (state_space/triton_scans.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.kernels.state_space import scans
from megatron.core.kernels.triton import cdiv, round_up_to_power_of_2
from megatron.core.parallel.offload import disable_activation_offload
from megatron.plan.simulate.recorder import StepRecorder, dtype_name
from megatron.plan.simulate.torch_internals import storage_key, without_modes
from megatron.plan.simulate.trace import EventList, RecordedScanEvents, StepEvent

Scan = Callable[..., tuple[Tensor, Tensor]]
# Of Triton's kernels: tokens of a chunk, tokens between states that are kept, and channels of a program.
CHUNK, SPAN, COLUMNS = 64, 256, 32


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
    positions. solves: a triangular system in every chunk, of which Triton's kernels keep the inverse.
    """

    name: str
    kernel: Scan
    inputs: tuple[str, ...]
    values: str
    keys: str
    keys_first: bool
    fixed: tuple[str, ...] = ()
    solves: bool = False

    def state_shape(self, tensors: dict[str, Tensor]) -> tuple[int, ...]:
        """Return the shape of a state. tensors: the inputs by name, values [s, b, n, p] and keys [s, b, g, d]."""
        _, batch, heads, size = tensors[self.values].shape
        deep = tensors[self.keys].shape[3]
        return (batch, heads, deep, size) if self.keys_first else (batch, heads, size, deep)


KINDS = (
    ScanKind("selective_scan", scans.selective_scan, ("x", "dt", "a", "b", "c"), "x", "b", False, ("a",)),
    ScanKind("delta_rule_scan", scans.delta_rule_scan, ("q", "k", "v", "g", "beta"), "v", "k", True, solves=True),
)


@dataclass(frozen=True, slots=True)
class ScanRecorder:
    """Records scans as one event a pass. known: costs of torch's spans by their shapes,
    and operations of Triton's kernels by their costs; shared by the recorders of a dry run.
    """

    recorder: StepRecorder
    known: dict[Any, Any] = field(default_factory=dict)

    def replace_scans_with_recorded(self, kernels: Kernels, fused: Collection[str]) -> Kernels:
        """Return the kernels with torch's scans replaced by recorded ones. fused: names of those to record as Triton's."""
        torchs = [kind for kind in KINDS if getattr(kernels, kind.name) is kind.kernel]
        recorded: dict[str, Any] = {
            kind.name: self._make_recorded_scan(kind, _FusedScanFunction if kind.name in fused else _TorchScanFunction)
            for kind in torchs
        }
        return replace(kernels, **recorded)

    def _make_recorded_scan(self, kind: ScanKind, function: type[Function]) -> Scan:
        def recorded_scan(
            *inputs: Tensor, segments: Tensor | None, state: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            return function.apply(self, kind, segments, state, *inputs)

        return recorded_scan

    def fused_operations(self, dtype: torch.dtype, *kernels: tuple[int, int]) -> RecordedScanEvents:
        """Return the operations of Triton's kernels, each given by its FLOPs and its bytes. dtype: of what is scanned."""
        factors = "tf32" if dtype in (torch.float16, torch.bfloat16) else "float32"
        if (factors, kernels) not in self.known:
            self.known[factors, kernels] = RecordedScanEvents(
                tuple(
                    StepEvent("op", "triton", flops=flops, moved=moved, dtype="float32", factors=factors)
                    for flops, moved in kernels
                )
            )
        return self.known[factors, kernels]

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


class _TorchScanFunction(Function):
    """A scan that allocates what torch's allocates, and computes nothing."""

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
        parts = _parts_of_passes([span.forward for span in spans])
        ctx.where = _record_scan_event(scan.recorder, kind.name, values, parts, held)
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
        parts = _parts_of_passes([span.backward for span in reversed(spans)])
        _record_scan_event(ctx.scan.recorder, f"{ctx.kind.name}_backward", output, parts, held, ctx.where)
        made = [None if each is None else each.new_empty(each.shape) for each in asking]
        if len(spans) > 1:  # gradients of spans are joined, those of one input at a time
            largest = max((each for each in made if each is not None), key=Tensor.numel)
            largest.new_empty(largest.shape)
        return None, None, None, *made


@dataclass(frozen=True, slots=True)
class FusedScanSizes:
    """Sizes of a scan by Triton's kernels, in elements. state: of a state; inverse: of the inverses of all chunks' systems, 0 without;
    shares: of the shares of a span's gradients of keys and queries, which the programs of a head compute and sum; rates: of
    the shares of all gradients of rates. chunks, spans: of the sequence.
    """

    state: int
    inverse: int
    shares: int
    rates: int
    chunks: int
    spans: int

    @classmethod
    def of_scan(cls, kind: ScanKind, tensors: dict[str, Tensor]) -> FusedScanSizes:
        """Return the sizes of a scan. tensors: the inputs by name, values [s, b, n, p] and keys [s, b, g, d]."""
        length, batch, heads, size = tensors[kind.values].shape
        splits = cdiv(size, min(COLUMNS, round_up_to_power_of_2(max(16, size))))
        chunks, span = cdiv(length, CHUNK), min(SPAN, cdiv(length, CHUNK) * CHUNK)
        return cls(
            math.prod(kind.state_shape(tensors)),
            batch * heads * chunks * CHUNK**2 * kind.solves,
            2 * splits * span * batch * heads * tensors[kind.keys].shape[3],
            2 * splits * length * batch * heads,
            chunks,
            cdiv(length, SPAN),
        )

    @property
    def backward_workspace(self) -> int:
        """The most elements that a backward pass holds beside inputs and results. What it has of one span is there until that of the next is."""
        of_span = (self.shares, self.state * (cdiv(self.chunks, self.spans) + 1), cdiv(self.inverse, self.spans))
        return self.rates + self.state + sum(of_span) + max(of_span) * (self.spans > 1)


class _FusedScanFunction(Function):
    """A scan that allocates what Triton's kernels allocate, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, scan: ScanRecorder, kind: ScanKind, segments: Tensor | None, state: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Allocate what the kernel would, and record one event. Returns (output [s, b, n, p], final state)."""
        inputs = tuple(each.contiguous() for each in inputs)
        tensors = dict(zip(kind.inputs, inputs, strict=True))
        values, sizes = tensors[kind.values], FusedScanSizes.of_scan(kind, tensors)
        ctx.spans = scan.spans(kind, tensors, segments, state)
        inverse = values.new_empty(sizes.inverse, dtype=torch.float32)
        output = values.new_empty(values.shape)
        states = values.new_empty((sizes.spans + 1, *kind.state_shape(tensors)), dtype=torch.float32)
        moved = sum(each.nbytes for each in (*inputs, output, states)) + 2 * inverse.nbytes
        flops = sum(event.flops for span in ctx.spans for event in span.forward.operations.events)
        parts = ((1, scan.fused_operations(values.dtype, (flops, moved))),)
        ctx.where = _record_scan_event(scan.recorder, kind.name, values, parts, 0)
        del inverse
        ctx.scan, ctx.kind, ctx.sizes, ctx.forward_flops = scan, kind, sizes, flops
        ctx.save_for_backward(segments, state, states[:-1], *inputs)
        return output, states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Allocate what the kernel would, and record one event. output: the gradient of the output, [s, b, n, p].
        Returns gradients of the state and the inputs.
        """
        _, state, states, *inputs = ctx.saved_tensors
        sizes, output = ctx.sizes, output.contiguous()
        made = [each.new_empty(each.shape) for each in inputs]
        flops = sum(event.flops for span in ctx.spans for event in span.backward.operations.events)
        read = sum(each.nbytes for each in inputs)
        inside = 4 * (sizes.state * (sizes.chunks + sizes.spans) + sizes.inverse)
        shares = 4 * sizes.shares * sizes.spans
        # Of each span: the states before its chunks, the gradients, and two sums of those of keys and queries.
        again = (ctx.forward_flops, read + states.nbytes + inside)
        gradients = (flops - ctx.forward_flops, 2 * read + output.nbytes + inside + shares)
        sums = [(0, shares // 2)] * 2
        of_span = [(flops // sizes.spans, moved // sizes.spans) for flops, moved in (again, gradients, *sums)]
        parts = ((sizes.spans, ctx.scan.fused_operations(output.dtype, *of_span)),)
        name, held = f"{ctx.kind.name}_backward", 4 * sizes.backward_workspace
        _record_scan_event(ctx.scan.recorder, name, output, parts, held, ctx.where)
        return None, None, None, None if state is None else state.new_empty(state.shape), *made


def _parts_of_passes(passes: Sequence[ScanPassCost]) -> tuple[tuple[int, RecordedScanEvents], ...]:
    """Return the parts of an event from the costs of all spans."""
    counts = Counter(each.operations for each in passes)
    return tuple((times, operations) for operations, times in counts.items())


def _record_scan_event(
    recorder: StepRecorder,
    name: str,
    values: Tensor,
    parts: tuple[tuple[int, RecordedScanEvents], ...],
    held: int,
    where: str = "",
) -> str:
    """Record one event for a pass over all spans that holds `held` bytes. values: [s, b, n, p]. Return its line."""
    workspace = values.new_empty(held, dtype=torch.uint8)
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
