"""Collectives over an axis, and their gradients.

The plain functions (`all_reduce`, `all_gather`, ...) work on tensors outside autograd. The pairs at the end are
differentiable and named by what they do forward and backward. Every one of them returns its input when the axis has
size 1: this is the only file that asks. Gathers and scatters go along dimension 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron.core.parallel.device import memory_of
from megatron.core.parallel.mesh import Axis

Work = dist.Work | None

# torch 2.13 gave these two new names and warns about the old ones.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wait(work: Work) -> None:
    """Wait for a collective started with `start_...`; None is already done."""
    if work is not None:
        work.wait()


def wait_for_axis(work: Work, axis: Axis, *, alone: bool = True) -> None:
    """Wait for work over an axis, and do delayed work meanwhile: delayed weight gradients, or the other microbatch of dual-batch
    overlap while tokens travel over the expert axis.

    alone: it is not part of a larger communication.
    """
    axis.flight_recorder.idle()
    if alone and axis.name == "ep":
        axis.flight_recorder.travels()
    axis.flight_recorder.pause()
    wait(work)
    axis.flight_recorder.resume()


def _note(what: str, axis: Axis, tensor: Tensor | None = None) -> None:
    axis.flight_recorder.note(what, axis.name, axis.ranks, 0 if tensor is None else tensor.nbytes)


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce over the axis, in place; op is sum, max, min or avg. Returns the tensor."""
    wait_for_axis(start_all_reduce(tensor, axis, op), axis)
    return tensor


def start_all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Work:
    """Begin an in-place reduction; the tensor must be left alone until `wait`."""
    if axis.size == 1:
        return None
    _note("all_reduce", axis, tensor)
    return dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=axis.group, async_op=True)


def start_reduce_scatter(output: Tensor, tensor: Tensor, axis: Axis, op: str = "sum") -> Work:
    """Begin to sum `tensor` over the axis into this rank's piece `output`; output may be that slice of tensor."""
    if axis.size == 1:
        if memory_of(output) != memory_of(tensor):
            output.copy_(tensor)
        return None
    _note("reduce_scatter", axis, tensor)
    return _scatter_single(output, tensor, op=getattr(dist.ReduceOp, op.upper()), group=axis.group, async_op=True)


def start_all_gather(output: Tensor, piece: Tensor, axis: Axis) -> Work:
    """Begin to gather every rank's piece into `output`; piece may be this rank's slice of output."""
    if axis.size == 1:
        if memory_of(output) != memory_of(piece):
            output.copy_(piece)
        return None
    _note("all_gather", axis, output)
    return _gather_single(output, piece, group=axis.group, async_op=True)


def all_gather(piece: Tensor, axis: Axis, *, alone: bool = True) -> Tensor:
    """Every rank's piece, laid end to end along dimension 0. piece: [k, ...]; returns [axis.size * k, ...]. alone: as above."""
    if axis.size == 1:
        return piece
    output = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    wait_for_axis(start_all_gather(output, piece.contiguous(), axis), axis, alone=alone)
    return output


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, cut along dimension 0. tensor: [axis.size * k, ...]; returns this rank's [k, ...]."""
    if axis.size == 1:
        return tensor
    output = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
    wait_for_axis(start_reduce_scatter(output, tensor.contiguous(), axis), axis)
    return output


def cut(tensor: Tensor, axis: Axis) -> Tensor:
    """This rank's piece of a tensor that all ranks of the axis hold, along dimension 0."""
    if axis.size == 1:
        return tensor
    return tensor.chunk(axis.size)[axis.rank].contiguous()


def start_shift(arriving: Tensor, tensor: Tensor, axis: Axis) -> list[dist.Work]:
    """Begin to send a tensor to the next rank of the axis, and to take `arriving` from the one before; the first follows the
    last. Both must be left alone until every work is waited for.
    """
    if axis.size == 1:
        arriving.copy_(tensor)
        return []
    _note("shift", axis, tensor)
    after, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, after, axis.group), dist.P2POp(dist.irecv, arriving, before, axis.group)]
    )


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Copy from the rank at place `source` of the axis to all, in place. Returns the tensor."""
    if axis.size > 1:
        _note("broadcast", axis, tensor)
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """A picklable value of the rank at place `source`, on all ranks of the axis."""
    if axis.size == 1:
        return value
    _note("broadcast of a value", axis)
    box = [value]
    dist.broadcast_object_list(box, axis.ranks[source], group=axis.group)
    return box[0]


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable value, in the order of the axis, on all ranks."""
    if axis.size == 1:
        return [value]
    _note("gathering of values", axis)
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, value, group=axis.group)
    return found


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis are here."""
    if axis.size > 1:
        _note("barrier", axis)
        dist.barrier(group=axis.group)


class _IdentityThenReduce(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone(), context.axis), None


class _ReduceThenIdentity(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return all_reduce(tensor.clone(), axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherThenScatter(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return all_gather(tensor, axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, context.axis), None


class _ScatterThenGather(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return reduce_scatter(tensor, axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, context.axis), None


class _CutThenGather(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return cut(tensor, axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, context.axis), None


class _GatherColumnsThenCut(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return torch.cat(all_gather(tensor, axis).chunk(axis.size), dim=-1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(context.axis.size, dim=-1)[context.axis.rank].contiguous(), None


def identity_then_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: nothing. Backward: sum the gradient over the axis."""
    return tensor if axis.size == 1 else _IdentityThenReduce.apply(tensor, axis)


def reduce_then_identity(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: sum over the axis. Backward: nothing, since every rank's gradient is already whole."""
    return tensor if axis.size == 1 else _ReduceThenIdentity.apply(tensor, axis)


def gather_then_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: gather along dimension 0. Backward: sum the gradient and keep this rank's piece."""
    return tensor if axis.size == 1 else _GatherThenScatter.apply(tensor, axis)


def scatter_then_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: sum over the axis and keep this rank's piece. Backward: gather the gradient."""
    return tensor if axis.size == 1 else _ScatterThenGather.apply(tensor, axis)


def cut_then_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: keep this rank's piece of a replicated tensor. Backward: gather the gradient."""
    return tensor if axis.size == 1 else _CutThenGather.apply(tensor, axis)


class _GatherThenCut(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return all_gather(tensor, axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cut(gradient, context.axis), None


def gather_then_cut(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: gather along dimension 0. Backward: keep this rank's piece of a gradient that all ranks hold alike."""
    return tensor if axis.size == 1 else _GatherThenCut.apply(tensor, axis)


# Exchanges of uneven pieces, along dimension 0. Sizes are lists with a number of rows for every rank of the axis.


def start_exchange(tensor: Tensor, send: list[int], receive: list[int], axis: Axis) -> tuple[Tensor, Work]:
    """Begin to send the i-th piece of `tensor` to rank i. Returns what comes, laid end to end by sender, and the work."""
    if axis.size == 1:
        return tensor, None
    _note("exchange", axis, tensor)
    coming = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    work = dist.all_to_all_single(coming, tensor.contiguous(), receive, send, group=axis.group, async_op=True)
    return coming, work


@dataclass(slots=True)
class Journey:
    """An exchange between its departure and its arrival, in the forward and in the backward pass.

    send, receive: rows to and from every rank of the axis. alone: it is not in the company of a larger one. work: what is on its
    way now. home: the gradient that comes back.
    """

    send: list[int]
    receive: list[int]
    axis: Axis
    alone: bool = True
    work: Work = None
    home: Tensor | None = None

    def wait(self) -> None:
        """Wait for what is on its way, and let the work go, which would hold its tensors until the backward pass."""
        wait_for_axis(self.work, self.axis, alone=self.alone)
        self.work = None


class _Depart(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, journey: Journey) -> Tensor:
        context.journey = journey
        coming, journey.work = start_exchange(tensor, journey.send, journey.receive, journey.axis)
        return coming

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        journey = context.journey
        journey.wait()
        home, journey.home = journey.home, None
        return home, None


class _Arrive(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, journey: Journey) -> Tensor:
        context.journey = journey
        journey.wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        journey = context.journey
        journey.home, journey.work = start_exchange(gradient, journey.receive, journey.send, journey.axis)
        return gradient, None  # only for autograd, which wants a gradient of the input's shape: `home` has the true one


def depart(tensor: Tensor, journey: Journey) -> Tensor:
    """Start an exchange. What is returned has no values yet: it is for `arrive` only. Backward: wait for the gradient."""
    return tensor if journey.axis.size == 1 else _Depart.apply(tensor, journey)


def arrive(coming: Tensor, journey: Journey) -> Tensor:
    """Wait for what `depart` started. Backward: start to send the gradient home."""
    return coming if journey.axis.size == 1 else _Arrive.apply(coming, journey)


def exchange(tensor: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    """Forward: the i-th piece goes to rank i. Backward: gradients go home."""
    journey = Journey(send, receive, axis)
    return arrive(depart(tensor, journey), journey)


def _gather_uneven(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    whole = all_gather(_filled(tensor, max(sizes)), axis)
    return torch.cat([piece[:size] for piece, size in zip(whole.chunk(axis.size), sizes, strict=True)])


def _scatter_uneven(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    pieces = torch.cat([_filled(piece, max(sizes)) for piece in tensor.split(sizes)])
    return reduce_scatter(pieces, axis)[: sizes[axis.rank]]


def _filled(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros((rows - len(tensor), *tensor.shape[1:]))))


class _UnevenGather(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
        context.sizes, context.axis = sizes, axis
        return _gather_uneven(tensor, sizes, axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_uneven(gradient, context.sizes, context.axis), None, None


class _UnevenScatter(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
        context.sizes, context.axis = sizes, axis
        return _scatter_uneven(tensor, sizes, axis)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather_uneven(gradient, context.sizes, context.axis), None, None


def uneven_gather_then_scatter(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """`gather_then_scatter` of pieces with these numbers of rows; tensor has sizes[axis.rank] of them."""
    return tensor if axis.size == 1 else _UnevenGather.apply(tensor, sizes, axis)


def uneven_scatter_then_gather(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """`scatter_then_gather` into pieces with these numbers of rows; tensor has sum(sizes) of them."""
    return tensor if axis.size == 1 else _UnevenScatter.apply(tensor, sizes, axis)


def gather_columns_then_cut(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: gather along the last dimension. Backward: keep this rank's columns, since every rank's gradient is whole."""
    return tensor if axis.size == 1 else _GatherColumnsThenCut.apply(tensor, axis)
