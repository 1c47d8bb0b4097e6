"""A transport that keeps to the contract of asynchronous collectives and messages, and to nothing more.

Gloo has often finished a collective before anybody waits for it, so on a CPU a program computes the same if it never waits.
Here the data travel at once, but into a tensor aside:

    start    the input is copied, and the output becomes NaN (whole numbers: the least there is)
    wait     the output becomes what arrived; an input or output that was written to in between is an error

`on_wait`: a collective is complete when it is waited for, and not before. `any_order`: whenever another one starts or is waited
for, what has arrived may become complete as well, in a random order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel import collectives

Completion = Literal["on_wait", "any_order"]
_GATHER, _SCATTER = collectives._gather_single, collectives._scatter_single
_ALL_REDUCE, _ALL_TO_ALL, _ISEND, _IRECV = dist.all_reduce, dist.all_to_all_single, dist.isend, dist.irecv


class LazyWork(dist.Work):
    """A collective under way, which waits for `inner`, torch's own work."""

    def __init__(
        self,
        transport: LazyTransport,
        name: str,
        inner: Any,
        output: Tensor | None,
        aside: Tensor,
        source: Tensor | None,
    ) -> None:
        """aside: becomes `output`; None where nothing is received. source: the input that must not change meanwhile; None
        where it is the output.
        """
        super().__init__()
        self.transport, self.name, self.inner = transport, name, inner
        self.output, self.aside, self.source = output, aside, source
        self.copy = None if source is None else source.data.clone()
        self.delivered = self.waited = False
        if output is not None:
            poison(output)

    def wait(self, timeout: Any = None) -> bool:
        """Complete it, and perhaps others."""
        self.deliver()
        if not self.waited:
            self.waited = True
            self.transport.pending.remove(self)
            self.transport.complete_some()
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self.delivered

    def deliver(self) -> None:
        """Write the output, once."""
        if self.delivered:
            return
        self.delivered = True
        self.inner.wait()
        if self.source is not None and self.copy is not None:
            assert same_bits(self.source, self.copy), f"the input of {self.name} was written to before it was complete"
        if self.output is not None:
            assert same_bits(self.output, poison(torch.empty_like(self.output))), (
                f"the output of {self.name} was written to before it was complete"
            )
            self.output.data.copy_(self.aside)


@dataclass
class LazyTransport:
    """What stands in for the asynchronous functions of torch.distributed, with their keywords. pending: what nobody waited for."""

    completion: Completion

    def __post_init__(self) -> None:
        self.pending: list[LazyWork] = []
        self.random = random.Random(dist.get_rank() if dist.is_initialized() else 0)

    def start(
        self, name: str, inner: Any, output: Tensor | None, aside: Tensor, source: Tensor | None, async_op: bool
    ) -> LazyWork | None:
        """Take note of a collective whose data travel into `aside`; wait for it unless `async_op`."""
        work = LazyWork(self, name, inner, output, aside, source)
        self.pending.append(work)
        if not async_op:
            work.wait()
            return None
        self.complete_some()
        return work

    def complete_some(self) -> None:
        """In any order: complete about half of what has arrived."""
        if self.completion == "any_order":
            for work in self.random.sample(self.pending, len(self.pending)):
                if not work.delivered and work.inner.is_completed() and self.random.random() < 0.5:
                    work.deliver()

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        aside = tensor.data.clone()
        inner = _ALL_REDUCE(aside, op=op, group=group, async_op=True)
        return self.start("an all-reduce", inner, tensor, aside, None, async_op)

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        aside, travels = torch.empty_like(output_tensor), input_tensor.data.clone()
        inner = _GATHER(aside, travels, group=group, async_op=True)
        source = None if share_memory(output_tensor, input_tensor) else input_tensor
        return self.start("an all-gather", inner, output_tensor, aside, source, async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        aside, travels, shared = torch.empty_like(output), input.data.clone(), share_memory(output, input)
        inner = _SCATTER(aside, travels, op=op, group=group, async_op=True)
        if shared:  # what is left of the input are sums that nobody may read any more
            poison(input)
        return self.start("a reduce-scatter", inner, output, aside, None if shared else input, async_op)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        aside, travels = torch.empty_like(output), input.data.clone()
        inner = _ALL_TO_ALL(aside, travels, output_split_sizes, input_split_sizes, group=group, async_op=True)
        return self.start("an all-to-all", inner, output, aside, input, async_op)

    def isend(self, tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, **peer: Any) -> Any:
        travels = tensor.data.clone()
        return self.start("a message", _ISEND(travels, dst, group, tag, **peer), None, travels, tensor, True)

    def irecv(self, tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, **peer: Any) -> Any:
        aside = torch.empty_like(tensor)
        return self.start("a message", _IRECV(aside, src, group, tag, **peer), tensor, aside, None, True)

    def batch_isend_irecv(self, messages: Sequence[Callable[[], Any]]) -> list[Any]:
        """Start messages that `point_to_point` made."""
        return [message() for message in messages]


def point_to_point(op: Callable[..., Any], tensor: Tensor, peer: int, group: Any = None) -> Callable[[], Any]:
    """Stand in for P2POp, which takes torch's own functions only: return the call that sends or receives."""
    return lambda: op(tensor, peer, group)


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with what no computation survives, and return it."""
    if tensor.is_floating_point():
        return tensor.data.fill_(float("nan"))
    return tensor.data.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both lie in the same storage."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape and dtype are equal to the last bit, NaN to NaN."""
    one, other = (tensor.data.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


@contextmanager
def lazy_collectives(completion: Completion) -> Iterator[LazyTransport]:
    """Within: what is asynchronous goes over a lazy transport."""
    lazy = LazyTransport(completion)
    stand_ins = {
        "all_reduce": lazy.all_reduce,
        "all_to_all_single": lazy.all_to_all,
        "isend": lazy.isend,
        "irecv": lazy.irecv,
        "batch_isend_irecv": lazy.batch_isend_irecv,
        "P2POp": point_to_point,
        **dict.fromkeys(("all_gather_single", "all_gather_into_tensor"), lazy.all_gather),
        **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_tensor"), lazy.reduce_scatter),
    }
    with (
        patch.multiple(dist, **{name: value for name, value in stand_ins.items() if hasattr(dist, name)}),
        patch.multiple(collectives, _gather_single=lazy.all_gather, _scatter_single=lazy.reduce_scatter),
    ):
        yield lazy


def run_lazily(completion: Completion, function: Callable[..., Any], *arguments: Any) -> Any:
    """On every rank: call a function over a lazy transport, where every collective must be waited for."""
    with lazy_collectives(completion) as transport:
        result = function(*arguments)
    assert not transport.pending, f"nobody waited for {[work.name for work in transport.pending]}"
    return result
