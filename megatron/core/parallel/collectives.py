"""Collectives over a mesh axis, and differentiable pairs of them.

The plain functions (`all_reduce`, `all_gather`, ...) work on tensors outside autograd. The pairs at the end are
differentiable and named by what they do in the forward and in the backward pass. Every function returns its input if
the axis has size 1: this is the only file that tests for it. Gathers and scatters work along dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron.core.parallel.device import storage_id_and_offset
from megatron.core.parallel.mesh import Axis

Work = dist.Work | None
Meanwhile = Callable[[], None] | None  # runs between the start of a collective and the wait for it

# torch 2.13 gave these two new names and warns about the old ones.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wait(work: Work) -> None:
    """Wait for a collective that a `start_...` function returned; None is already complete."""
    if work is not None:
        work.wait()


def wait_with_overlap(work: Work, axis: Axis, meanwhile: Meanwhile = None) -> None:
    """Compute delayed weight gradients, run `meanwhile`, then wait for a collective over the axis."""
    axis.overlap.compute_delayed_wgrad()
    if meanwhile is not None:
        meanwhile()
    axis.flight_recorder.pause_compute_timing()
    wait(work)
    axis.flight_recorder.resume_compute_timing()


def _record_collective(what: str, axis: Axis, tensor: Tensor | None = None) -> None:
    """Record in the flight recorder that the collective `what` begins. tensor: gives its size in bytes."""
    axis.flight_recorder.record_collective(what, axis.name, axis.ranks, 0 if tensor is None else tensor.nbytes)


def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce a tensor [...] over the axis in place and return it; op: sum, max, min or avg."""
    wait_with_overlap(start_all_reduce(tensor, axis, op), axis)
    return tensor


def all_reduce_together(tensors: Sequence[Tensor], *axes: Axis, op: str = "sum") -> None:
    """Reduce tensors (any shapes, one dtype) in place over the axes, with one all-reduce for each axis."""
    if tensors and any(axis.size > 1 for axis in axes):
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for axis in axes:
            all_reduce(flat, axis, op)
        for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))


def start_all_reduce(tensor: Tensor, axis: Axis, op: str = "sum") -> Work:
    """Start an in-place all-reduce of a tensor of any shape, which must not be touched until `wait`."""
    if axis.size == 1:
        return None
    _record_collective("all_reduce", axis, tensor)
    return dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=axis.group, async_op=True)


def start_reduce_scatter(output: Tensor, tensor: Tensor, axis: Axis, op: str = "sum") -> Work:
    """Start to sum `tensor` [axis.size * k, ...] over the axis, with this rank's chunk going to `output` [k, ...],
    which may be that slice of `tensor`. Neither may be touched until `wait`.
    """
    if axis.size == 1:
        if storage_id_and_offset(output) != storage_id_and_offset(tensor):
            output.copy_(tensor)
        return None
    _record_collective("reduce_scatter", axis, tensor)
    return _scatter_single(output, tensor, op=getattr(dist.ReduceOp, op.upper()), group=axis.group, async_op=True)


def start_all_gather(output: Tensor, piece: Tensor, axis: Axis) -> Work:
    """Start to gather pieces [k, ...] into `output` [axis.size * k, ...], untouched until `wait`; may hold `piece`."""
    if axis.size == 1:
        if storage_id_and_offset(output) != storage_id_and_offset(piece):
            output.copy_(piece)
        return None
    _record_collective("all_gather", axis, output)
    return _gather_single(output, piece, group=axis.group, async_op=True)


def all_gather(piece: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Concatenate every rank's piece along dimension 0. piece: [k, ...]; returns [axis.size * k, ...]."""
    if axis.size == 1:
        return piece
    output = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    wait_with_overlap(start_all_gather(output, piece.contiguous(), axis), axis, meanwhile)
    return output


def reduce_scatter(tensor: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Sum over the axis and return this rank's chunk. tensor: [axis.size * k, ...]; returns [k, ...]."""
    if axis.size == 1:
        return tensor
    output = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
    wait_with_overlap(start_reduce_scatter(output, tensor.contiguous(), axis), axis, meanwhile)
    return output


def local_chunk(tensor: Tensor, axis: Axis) -> Tensor:
    """Return this rank's chunk of a replicated tensor along dimension 0: [axis.size * k, ...] to [k, ...]."""
    if axis.size == 1:
        return tensor
    return tensor.chunk(axis.size)[axis.rank].contiguous()


def start_ring_shift(received: Tensor, tensor: Tensor, axis: Axis) -> list[dist.Work]:
    """Start to send `tensor` to the next rank of the axis and to receive `received` from the previous one, as a ring.

    Both have the same shape (any shape) and must not be touched until every returned work was waited for.
    """
    if axis.size == 1:
        received.copy_(tensor)
        return []
    _record_collective("shift", axis, tensor)
    next_rank, previous_rank = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, next_rank, axis.group),
            dist.P2POp(dist.irecv, received, previous_rank, axis.group),
        ]
    )


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Copy a tensor [...] in place from the rank at coordinate `source` of the axis to all; returns it."""
    if axis.size > 1:
        _record_collective("broadcast", axis, tensor)
        dist.broadcast(tensor, axis.ranks[source], group=axis.group)
    return tensor


def broadcast_object(value: Any, axis: Axis, source: int = 0) -> Any:
    """Return the picklable value of the rank at coordinate `source` on all ranks of the axis."""
    if axis.size == 1:
        return value
    _record_collective("broadcast of a value", axis)
    values = [value]
    dist.broadcast_object_list(values, axis.ranks[source], group=axis.group)
    return values[0]


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's picklable value, in the order of the axis, on all ranks."""
    if axis.size == 1:
        return [value]
    _record_collective("gathering of values", axis)
    result: list[Any] = [None] * axis.size
    dist.all_gather_object(result, value, group=axis.group)
    return result


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis have reached this call."""
    if axis.size > 1:
        _record_collective("barrier", axis)
        dist.barrier(group=axis.group)


class _CustomBackwardFunction(Function):
    """Autograd function that applies `forward` to the tensor, and `backward` to its gradient."""

    @staticmethod
    def forward(
        context: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        context.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.of_gradient(gradient), None, None


def _apply_with_custom_backward(
    tensor: Tensor, axis: Axis, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Tensor:
    """`forward` of the tensor and `backward` of its gradient, over the axis; the tensor as it is where that has one rank."""
    if axis.size == 1:
        return tensor
    return _CustomBackwardFunction.apply(tensor, partial(forward, axis=axis), partial(backward, axis=axis))


def _identity_view(tensor: Tensor, axis: Axis) -> Tensor:
    return tensor.view_as(tensor)


def _all_reduce_copy(tensor: Tensor, axis: Axis) -> Tensor:
    return all_reduce(tensor.clone(), axis)


def _gather_columns(tensor: Tensor, axis: Axis) -> Tensor:
    """All-gather along the last dimension: [..., k] -> [..., axis.size * k]."""
    return torch.cat(all_gather(tensor, axis).chunk(axis.size), dim=-1)


def _local_columns(tensor: Tensor, axis: Axis) -> Tensor:
    """Return this rank's chunk along the last dimension: [..., axis.size * k] -> [..., k]."""
    return tensor.chunk(axis.size, dim=-1)[axis.rank].contiguous()


def identity_with_reduce_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: identity. Backward: sum the gradient over the axis. tensor, result: [...]."""
    return _apply_with_custom_backward(tensor, axis, _identity_view, _all_reduce_copy)


def reduce_with_identity_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: sum over the axis. Backward: identity, since every rank's gradient is complete. tensor, result: [...]."""
    return _apply_with_custom_backward(tensor, axis, _all_reduce_copy, _identity_view)


def gather_with_scatter_backward(tensor: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Forward: all-gather along dimension 0. Backward: reduce-scatter the gradient.

    tensor: [k, ...]; returns [axis.size * k, ...]. meanwhile: runs while either collective is in flight.
    """
    gather, scatter = partial(all_gather, meanwhile=meanwhile), partial(reduce_scatter, meanwhile=meanwhile)
    return _apply_with_custom_backward(tensor, axis, gather, scatter)


def scatter_with_gather_backward(tensor: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Forward: reduce-scatter along dimension 0. Backward: all-gather the gradient.

    tensor: [axis.size * k, ...]; returns [k, ...]. meanwhile: runs while either collective is in flight.
    """
    gather, scatter = partial(all_gather, meanwhile=meanwhile), partial(reduce_scatter, meanwhile=meanwhile)
    return _apply_with_custom_backward(tensor, axis, scatter, gather)


def split_with_gather_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: this rank's chunk, [axis.size * k, ...] to [k, ...]. Backward: all-gather the gradient."""
    return _apply_with_custom_backward(tensor, axis, local_chunk, all_gather)


def gather_with_split_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: all-gather, [k, ...] to [axis.size * k, ...]. Backward: this rank's chunk of equal gradients."""
    return _apply_with_custom_backward(tensor, axis, all_gather, local_chunk)


def gather_columns_with_split_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: all-gather columns, [..., k] to [..., axis.size * k]. Backward: this rank's of equal gradients."""
    return _apply_with_custom_backward(tensor, axis, _gather_columns, _local_columns)


# All-to-all of uneven chunks along dimension 0. Sizes are lists with a number of rows for every rank of the axis.


def start_all_to_all(tensor: Tensor, send: list[int], receive: list[int], axis: Axis) -> tuple[Tensor, Work]:
    """Start to send the i-th chunk of `tensor` [sum(send), ...] to rank i.

    Returns the tensor that receives the chunks [sum(receive), ...], in the order of their senders, and the work to wait
    for.
    """
    if axis.size == 1:
        return tensor, None
    _record_collective("exchange", axis, tensor)
    received = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    work = dist.all_to_all_single(received, tensor.contiguous(), receive, send, group=axis.group, async_op=True)
    return received, work


@dataclass(slots=True)
class AsyncAllToAll:
    """The state of an asynchronous all-to-all between start and wait, in the forward and in the backward pass.

    send, receive: rows to and from every rank of the axis. meanwhile: runs before each wait. work: the collective in
    flight. gradient: tensor that the backward pass receives.
    """

    send: list[int]
    receive: list[int]
    axis: Axis
    meanwhile: Meanwhile = None
    work: Work = None
    gradient: Tensor | None = None

    def wait(self) -> None:
        """Wait for the collective with overlap, and release it: it would hold its tensors until the backward pass."""
        wait_with_overlap(self.work, self.axis, self.meanwhile)
        self.work = None


class _StartAllToAll(Function):
    """Autograd function of `start_autograd_all_to_all`."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, exchange: AsyncAllToAll) -> Tensor:
        context.exchange = exchange
        received, exchange.work = start_all_to_all(tensor, exchange.send, exchange.receive, exchange.axis)
        return received

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor | None, None]:
        exchange = context.exchange
        exchange.wait()
        gradient, exchange.gradient = exchange.gradient, None
        return gradient, None


class _FinishAllToAll(Function):
    """Autograd function of `finish_autograd_all_to_all`."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, exchange: AsyncAllToAll) -> Tensor:
        context.exchange = exchange
        exchange.wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = context.exchange
        exchange.gradient, exchange.work = start_all_to_all(gradient, exchange.receive, exchange.send, exchange.axis)
        return gradient, None  # only for autograd, which wants the input's shape: `exchange.gradient` has the true one


def start_autograd_all_to_all(tensor: Tensor, exchange: AsyncAllToAll) -> Tensor:
    """Start a differentiable all-to-all. tensor: [sum(send), ...].

    Returns [sum(receive), ...], whose values are there after `finish_autograd_all_to_all`. Backward: wait for the
    gradient.
    """
    return tensor if exchange.axis.size == 1 else _StartAllToAll.apply(tensor, exchange)


def finish_autograd_all_to_all(received: Tensor, exchange: AsyncAllToAll) -> Tensor:
    """Wait for received [sum(receive), ...] and return it. Backward: start the all-to-all of the gradient."""
    return received if exchange.axis.size == 1 else _FinishAllToAll.apply(received, exchange)


def all_to_all(tensor: Tensor, send: list[int], receive: list[int], axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """All-to-all along dimension 0: the i-th chunk goes to rank i. Backward: the reverse all-to-all of the gradient.

    send, receive: rows to and from every rank. tensor: [sum(send), ...]; returns [sum(receive), ...].
    """
    state = AsyncAllToAll(send, receive, axis, meanwhile)
    return finish_autograd_all_to_all(start_autograd_all_to_all(tensor, state), state)


def _gather_uneven(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """All-gather chunks with these numbers of rows: [sizes[axis.rank], ...] -> [sum(sizes), ...]."""
    gathered = all_gather(_append_zero_rows(tensor, max(sizes)), axis)
    return torch.cat([piece[:size] for piece, size in zip(gathered.chunk(axis.size), sizes, strict=True)])


def _reduce_scatter_uneven(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """Reduce-scatter into chunks with these numbers of rows: [sum(sizes), ...] -> [sizes[axis.rank], ...]."""
    pieces = torch.cat([_append_zero_rows(piece, max(sizes)) for piece in tensor.split(sizes)])
    return reduce_scatter(pieces, axis)[: sizes[axis.rank]]


def _append_zero_rows(tensor: Tensor, rows: int) -> Tensor:
    """Pad a tensor with zero rows to `rows` rows."""
    return torch.cat((tensor, tensor.new_zeros((rows - len(tensor), *tensor.shape[1:]))))


def uneven_gather_with_scatter_backward(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """Forward: all-gather chunks of `sizes` rows, to [sum(sizes), ...]. Backward: reduce-scatter the gradient."""
    gather, scatter = partial(_gather_uneven, sizes=sizes), partial(_reduce_scatter_uneven, sizes=sizes)
    return _apply_with_custom_backward(tensor, axis, gather, scatter)


def uneven_scatter_with_gather_backward(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """Forward: reduce-scatter [sum(sizes), ...] into chunks of `sizes` rows. Backward: all-gather the gradient."""
    gather, scatter = partial(_gather_uneven, sizes=sizes), partial(_reduce_scatter_uneven, sizes=sizes)
    return _apply_with_custom_backward(tensor, axis, scatter, gather)
