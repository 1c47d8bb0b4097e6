"""Contiguous parameter and gradient buffers in buckets, and which range of each this rank owns.

    bucket.data  [ fc2.weight | fc2.bias | fc1.weight | ... | padding ]     parameters are views into it
    bucket.grad  [     ...         same places              | padding ]     gradients are accumulated here
    owned range  [ rank 0     |     rank 1     |  rank 2    |  rank 3 ]     when sharded (ZeRO-1), else everything

Parameters stand in reverse order of registration, about the order in which the backward pass finishes them. A tied
matrix has a bucket of its own, so that the two stages that hold it cut it alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.parallel.device import widens_products
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import ParamSpec, spec_of

_ALIGNMENT = 64  # elements: pieces of a bucket start at addresses that vector units and NCCL like


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter that this rank owns: flat elements [low, high) of its local tensor.

    rounds_to: format of the weights that work, where `data` is their fp32 main weight (FSDP2).
    """

    spec: ParamSpec
    local_shape: tuple[int, ...]
    low: int
    high: int
    data: Tensor
    grad: Tensor
    rounds_to: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The parameter's global name."""
        return self.spec.name

    @property
    def is_low_precision(self) -> bool:
        """Whether the weights that work are in half precision, so that a main weight holds more than they do."""
        return self.data.dtype in (torch.bfloat16, torch.float16) or self.rounds_to is not None


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which flat elements [low, high) of a parameter's local tensor each rank of its data axis owns, in the order of the axis.

    Where ranks hold copies, each owns all of it.
    """

    spec: ParamSpec
    local_shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


class Bucket:
    """Some parameters in one piece of memory, reduced and gathered together over `axis`.

    holds_values: whether the parameters' values are in it as they are.
    """

    holds_values = True

    def __init__(self, params: list[nn.Parameter], axis: Axis, *, grad_dtype: torch.dtype, sharded: bool) -> None:
        self.params, self.axis, self.sharded = params, axis, sharded
        self.starts = [0]
        for param in params:
            self.starts.append(self.starts[-1] + _round_up(param.numel(), _ALIGNMENT))
        size = _round_up(self.starts[-1], math.lcm(axis.size, _ALIGNMENT) if sharded else 1)
        device = params[0].device
        self.data = torch.zeros(size, dtype=params[0].dtype, device=device)
        self.grad = torch.zeros(size, dtype=grad_dtype, device=device)
        for param, start in zip(params, self.starts, strict=False):
            view = self.data[start : start + param.numel()].view_as(param)
            view.copy_(param.data)
            param.data = view
        widens = widens_products(device, self.data.dtype, grad_dtype)
        self.sums = [MainGrad(view, widens=widens) for view in self.gradient_views()]

    def gradient_views(self) -> list[Tensor]:
        """Each parameter's gradient, in its shape."""
        return [
            self.grad[start : start + param.numel()].view_as(param)
            for param, start in zip(self.params, self.starts, strict=False)
        ]

    def owned(self, rank: int | None = None) -> tuple[int, int]:
        """The range of the buffer that this rank steps, or another of the axis."""
        if not self.sharded:
            return 0, self.data.numel()
        piece, rank = self.data.numel() // self.axis.size, self.axis.rank if rank is None else rank
        return piece * rank, piece * (rank + 1)

    def prepare(self) -> None:
        """Bring what is owned into the form in which it is gathered: it has it."""

    @property
    def gathered(self) -> tuple[Tensor, ...]:
        """What is gathered, each with an element for each of the bucket."""
        return (self.data,)

    def ownership(self) -> Iterator[Ownership]:
        """Who owns what of each parameter."""
        bounds = [self.owned(rank) for rank in range(self.axis.size)]
        for param, start in zip(self.params, self.starts, strict=False):
            ranges = (tuple(min(max(edge - start, 0), param.numel()) for edge in bound) for bound in bounds)
            yield Ownership(spec_of(param), tuple(param.shape), tuple((low, high) for low, high in ranges))

    def segments(self) -> Iterator[Segment]:
        """What this rank owns of each parameter."""
        low, high = self.owned()
        for param, start in zip(self.params, self.starts, strict=False):
            begin, end = max(low, start), min(high, start + param.numel())
            if begin < end:
                yield Segment(
                    spec_of(param),
                    tuple(param.shape),
                    begin - start,
                    end - start,
                    self.data[begin:end],
                    self.grad[begin:end],
                )


def make_buckets(
    module: nn.Module,
    mesh: Mesh,
    *,
    grad_dtype: torch.dtype,
    sharded: bool,
    bucket_size: int | None,
    others: Mapping[nn.Parameter, Callable[..., Bucket]] | None = None,
) -> list[Bucket]:
    """Move a stage's parameters into buckets. bucket_size: elements, or None for one bucket per format and axis.

    others: parameters that go into buckets of another kind, and what makes those.
    """
    buckets: list[Bucket] = []
    usual = partial(Bucket, sharded=sharded)
    waiting: dict[tuple[torch.dtype, str, Callable[..., Bucket]], list[nn.Parameter]] = {}

    def close(key: tuple[torch.dtype, str, Callable[..., Bucket]]) -> None:
        params = waiting.pop(key, [])
        if params:
            buckets.append(key[2](params, mesh.axis(key[1]), grad_dtype=grad_dtype))

    for param in reversed(list(module.parameters())):
        if not param.requires_grad:
            continue
        key = (param.dtype, spec_of(param).reduce_over, (others or {}).get(param, usual))
        if spec_of(param).tied:
            close(key)
        waiting.setdefault(key, []).append(param)
        full = bucket_size is not None and sum(p.numel() for p in waiting[key]) >= bucket_size
        if full or spec_of(param).tied:
            close(key)
    for key in list(waiting):
        close(key)
    return buckets


def default_bucket_size(data_parallel_size: int) -> int:
    """Elements in a bucket when nothing is said: large enough that latency does not matter."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
