"""Collectives over an axis, and their gradients.

The plain functions (`all_reduce`, `all_gather`, ...) work on tensors outside autograd. The pairs at the end are
differentiable and named by what they do forward and backward. Every one of them returns its input when the axis has
size 1: this is the only file that asks. Gathers and scatters go along dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron.core.parallel.device import memory_of
from megatron.core.parallel.mesh import Axis

Work = dist.Work | None
Meanwhile = Callable[[], None] | None  # runs between the start of a collective and the wait for it

# torch 2.13 gave these two new names and warns about the old ones.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wait(work: Work) -> None:
    """Wait for a collective started with `start_...`; None is already done."""
    if work is not None:
        work.wait()


def wait_for_axis(work: Work, axis: Axis, meanwhile: Meanwhile = None) -> None:
    """Wait for work over an axis; before, compute delayed weight gradients and run `meanwhile`."""
    axis.overlap.fill_wait()
    if meanwhile is not None:
        meanwhile()
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


def all_gather(piece: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Concatenate every rank's piece along dimension 0. piece: [k, ...]; returns [axis.size * k, ...]."""
    if axis.size == 1:
        return piece
    output = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    wait_for_axis(start_all_gather(output, piece.contiguous(), axis), axis, meanwhile)
    return output


def reduce_scatter(tensor: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Sum over the axis and keep this rank's piece. tensor: [axis.size * k, ...]; returns [k, ...]."""
    if axis.size == 1:
        return tensor
    output = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
    wait_for_axis(start_reduce_scatter(output, tensor.contiguous(), axis), axis, meanwhile)
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
    result: list[Any] = [None] * axis.size
    dist.all_gather_object(result, value, group=axis.group)
    return result


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis are here."""
    if axis.size > 1:
        _note("barrier", axis)
        dist.barrier(group=axis.group)


class _Pair(Function):
    """`forward` on the tensor, `backward` on its gradient."""

    @staticmethod
    def forward(
        context: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        context.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.of_gradient(gradient), None, None


def _identity(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, axis: Axis) -> Tensor:
    return all_reduce(tensor.clone(), axis)


def _gather_columns(tensor: Tensor, axis: Axis) -> Tensor:
    return torch.cat(all_gather(tensor, axis).chunk(axis.size), dim=-1)


def _cut_columns(tensor: Tensor, axis: Axis) -> Tensor:
    return tensor.chunk(axis.size, dim=-1)[axis.rank].contiguous()


def identity_then_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: nothing. Backward: sum the gradient over the axis. tensor, result: [...]."""
    return tensor if axis.size == 1 else _Pair.apply(tensor, _identity, partial(_sum, axis=axis))


def reduce_then_identity(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: sum over the axis. Backward: nothing, since every rank's gradient is already whole. tensor, result: [...]."""
    return tensor if axis.size == 1 else _Pair.apply(tensor, partial(_sum, axis=axis), _identity)


def gather_then_scatter(tensor: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Forward: gather along dimension 0. Backward: sum the gradient and keep this rank's piece.

    tensor: [k, ...]; returns [axis.size * k, ...].
    """
    if axis.size == 1:
        return tensor
    gather, scatter = (partial(move, axis=axis, meanwhile=meanwhile) for move in (all_gather, reduce_scatter))
    return _Pair.apply(tensor, gather, scatter)


def scatter_then_gather(tensor: Tensor, axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """Forward: sum over the axis and keep this rank's piece. Backward: gather the gradient.

    tensor: [axis.size * k, ...]; returns [k, ...].
    """
    if axis.size == 1:
        return tensor
    gather, scatter = (partial(move, axis=axis, meanwhile=meanwhile) for move in (all_gather, reduce_scatter))
    return _Pair.apply(tensor, scatter, gather)


def cut_then_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: keep this rank's piece of a replicated tensor. Backward: gather the gradient.

    tensor: [axis.size * k, ...]; returns [k, ...].
    """
    return tensor if axis.size == 1 else _Pair.apply(tensor, partial(cut, axis=axis), partial(all_gather, axis=axis))


def gather_then_cut(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: gather along dimension 0. Backward: keep this rank's piece of a gradient that all ranks hold alike.

    tensor: [k, ...]; returns [axis.size * k, ...].
    """
    return tensor if axis.size == 1 else _Pair.apply(tensor, partial(all_gather, axis=axis), partial(cut, axis=axis))


def gather_columns_then_cut(tensor: Tensor, axis: Axis) -> Tensor:
    """Forward: gather along the last dimension. Backward: keep this rank's columns, since every rank's gradient is whole.

    tensor: [..., k]; returns [..., axis.size * k].
    """
    if axis.size == 1:
        return tensor
    return _Pair.apply(tensor, partial(_gather_columns, axis=axis), partial(_cut_columns, axis=axis))


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
class AsyncExchange:
    """An asynchronous exchange: its state between start and wait, in the forward and in the backward pass.

    send, receive: rows to and from every rank of the axis. meanwhile: runs before each wait. work: the collective under way.
    gradient: what the backward pass receives.
    """

    send: list[int]
    receive: list[int]
    axis: Axis
    meanwhile: Meanwhile = None
    work: Work = None
    gradient: Tensor | None = None

    def wait(self) -> None:
        """Wait for the collective and release it, which would hold its tensors until the backward pass."""
        wait_for_axis(self.work, self.axis, self.meanwhile)
        self.work = None


class _Start(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, exchange: AsyncExchange) -> Tensor:
        context.exchange = exchange
        received, exchange.work = start_exchange(tensor, exchange.send, exchange.receive, exchange.axis)
        return received

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor | None, None]:
        exchange = context.exchange
        exchange.wait()
        gradient, exchange.gradient = exchange.gradient, None
        return gradient, None


class _Finish(Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, exchange: AsyncExchange) -> Tensor:
        context.exchange = exchange
        exchange.wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = context.exchange
        exchange.gradient, exchange.work = start_exchange(gradient, exchange.receive, exchange.send, exchange.axis)
        return gradient, None  # only for autograd, which wants the input's shape: `exchange.gradient` has the true one


def start_async(tensor: Tensor, exchange: AsyncExchange) -> Tensor:
    """Start an exchange. tensor: [sum(send), ...]; returns [sum(receive), ...], without values until `finish_async`.

    Backward: wait for the gradient.
    """
    return tensor if exchange.axis.size == 1 else _Start.apply(tensor, exchange)


def finish_async(received: Tensor, exchange: AsyncExchange) -> Tensor:
    """Wait for the result of `start_async`. received, result: [sum(receive), ...]. Backward: start the exchange of the gradient."""
    return received if exchange.axis.size == 1 else _Finish.apply(received, exchange)


def exchange(tensor: Tensor, send: list[int], receive: list[int], axis: Axis, meanwhile: Meanwhile = None) -> Tensor:
    """All-to-all along dimension 0: the i-th piece goes to rank i. Backward: the same of the gradient, the other way round.

    send, receive: rows to and from every rank. tensor: [sum(send), ...]; returns [sum(receive), ...].
    """
    one = AsyncExchange(send, receive, axis, meanwhile)
    return finish_async(start_async(tensor, one), one)


def _gather_uneven(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    whole = all_gather(_filled(tensor, max(sizes)), axis)
    return torch.cat([piece[:size] for piece, size in zip(whole.chunk(axis.size), sizes, strict=True)])


def _scatter_uneven(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    pieces = torch.cat([_filled(piece, max(sizes)) for piece in tensor.split(sizes)])
    return reduce_scatter(pieces, axis)[: sizes[axis.rank]]


def _filled(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros((rows - len(tensor), *tensor.shape[1:]))))


def uneven_gather_then_scatter(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """`gather_then_scatter` of pieces with these numbers of rows. tensor: [sizes[axis.rank], ...]; returns [sum(sizes), ...]."""
    if axis.size == 1:
        return tensor
    gather, scatter = (partial(move, sizes=sizes, axis=axis) for move in (_gather_uneven, _scatter_uneven))
    return _Pair.apply(tensor, gather, scatter)


def uneven_scatter_then_gather(tensor: Tensor, sizes: list[int], axis: Axis) -> Tensor:
    """`scatter_then_gather` into pieces with these numbers of rows. tensor: [sum(sizes), ...]; returns [sizes[axis.rank], ...]."""
    if axis.size == 1:
        return tensor
    gather, scatter = (partial(move, sizes=sizes, axis=axis) for move in (_gather_uneven, _scatter_uneven))
    return _Pair.apply(tensor, scatter, gather)
