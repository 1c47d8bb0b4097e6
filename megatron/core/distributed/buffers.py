"""Contiguous parameter and gradient buffers in buckets, and the range of each that this rank owns.

    bucket.data  [ fc2.weight | fc2.bias | fc1.weight | ... | padding ]     parameters are views into it
    bucket.grad  [     ...         same offsets             | padding ]     gradients are accumulated here
    owned range  [ rank 0     |     rank 1     |  rank 2    |  rank 3 ]     if sharded (ZeRO-1), else everything

Parameters are in reverse order of registration, about the order in which the backward pass finishes them. A tied matrix
has a bucket to itself, so that the two stages that hold it shard it alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.parallel.device import supports_mixed_dtype_addmm
from megatron.core.parallel.main_grad import MainGrad
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import ParamSpec, param_spec_of

_ALIGNMENT = 64  # elements: aligned chunks of a bucket are faster for vector units and NCCL


@dataclass(frozen=True, slots=True)
class OwnedSegment:
    """The part of one parameter that this rank owns: flat elements [low, high) of its local tensor.

    local_shape: of the local tensor. data, grad: the elements' weights and gradients [high - low]. sharded:
    data-parallel ranks own different elements of the local tensor; otherwise each owns them all. rounds_to: dtype of the
    working weights, if `data` is their fp32 main weight (FSDP2, fp8 parameter gather).
    """

    spec: ParamSpec
    local_shape: tuple[int, ...]
    low: int
    high: int
    data: Tensor
    grad: Tensor
    sharded: bool
    rounds_to: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The parameter's global name."""
        return self.spec.name

    @property
    def has_half_precision_weights(self) -> bool:
        """Whether the working weights are in half precision, so that the fp32 main weights are saved too."""
        return self.data.dtype in (torch.bfloat16, torch.float16) or self.rounds_to is not None


@dataclass(frozen=True, slots=True)
class ParamOwnership:
    """The flat elements [low, high) of a parameter's local tensor that each data-parallel rank owns, in order.

    Where ranks hold replicas, each owns all elements.
    """

    spec: ParamSpec
    local_shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


class Bucket:
    """Some parameters in one contiguous buffer, reduced and gathered together over `axis`.

    data, grad: the buffers [size]. starts: offset of each parameter. main_grads: each parameter's main gradient, a
    view. holds_values: whether `data` holds the parameters' values themselves.
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
        mixed_dtype_addmm = supports_mixed_dtype_addmm(device, self.data.dtype, grad_dtype)
        self.main_grads = [MainGrad(view, mixed_dtype_addmm=mixed_dtype_addmm) for view in self.gradient_views()]

    def gradient_views(self) -> list[Tensor]:
        """Return each parameter's gradient as a view of the bucket, in the parameter's own shape (any shape)."""
        return [
            self.grad[start : start + param.numel()].view_as(param)
            for param, start in zip(self.params, self.starts, strict=False)
        ]

    def owned_range(self, rank: int | None = None) -> tuple[int, int]:
        """Return the range [low, high) of the buffer that this rank, or another rank of the axis, owns and updates."""
        if not self.sharded:
            return 0, self.data.numel()
        chunk, rank = self.data.numel() // self.axis.size, self.axis.rank if rank is None else rank
        return chunk * rank, chunk * (rank + 1)

    def convert_for_all_gather(self) -> None:
        """Convert the owned range into the format in which it is gathered; nothing to do for plain weights."""

    @property
    def all_gather_outputs(self) -> tuple[Tensor, ...]:
        """The buffers to all-gather, each [elements of the bucket]."""
        return (self.data,)

    def param_ownership(self) -> Iterator[ParamOwnership]:
        """Yield, for each parameter, which of its elements each rank of the axis owns."""
        bounds = [self.owned_range(rank) for rank in range(self.axis.size)]
        for param, start in zip(self.params, self.starts, strict=False):
            ranges = (tuple(min(max(edge - start, 0), param.numel()) for edge in bound) for bound in bounds)
            yield ParamOwnership(param_spec_of(param), tuple(param.shape), tuple((low, high) for low, high in ranges))

    def owned_segments(self) -> Iterator[OwnedSegment]:
        """Yield the part of each parameter that this rank owns."""
        low, high = self.owned_range()
        for param, start in zip(self.params, self.starts, strict=False):
            begin, end = max(low, start), min(high, start + param.numel())
            if begin < end:
                yield OwnedSegment(
                    param_spec_of(param),
                    tuple(param.shape),
                    begin - start,
                    end - start,
                    self.data[begin:end],
                    self.grad[begin:end],
                    self.sharded,
                )


def make_buckets(
    module: nn.Module,
    mesh: Mesh,
    *,
    grad_dtype: torch.dtype,
    sharded: bool,
    bucket_size: int | None,
    bucket_kinds: Mapping[nn.Parameter, Callable[..., Bucket]] | None = None,
) -> list[Bucket]:
    """Move a stage's trainable parameters into buckets, and return these.

    bucket_size: elements, or None for one bucket per dtype, axis and kind. bucket_kinds: constructor of the bucket for
    parameters that do not go into plain ones.
    """
    buckets: list[Bucket] = []
    plain_bucket = partial(Bucket, sharded=sharded)
    open_buckets: dict[tuple[torch.dtype, str, Callable[..., Bucket]], list[nn.Parameter]] = {}

    def close_bucket(key: tuple[torch.dtype, str, Callable[..., Bucket]]) -> None:
        params = open_buckets.pop(key, [])
        if params:
            buckets.append(key[2](params, mesh.axis(key[1]), grad_dtype=grad_dtype))

    for param in reversed(list(module.parameters())):
        if not param.requires_grad:
            continue
        key = (param.dtype, param_spec_of(param).reduce_over, (bucket_kinds or {}).get(param, plain_bucket))
        if param_spec_of(param).tied:
            close_bucket(key)
        open_buckets.setdefault(key, []).append(param)
        full = bucket_size is not None and sum(p.numel() for p in open_buckets[key]) >= bucket_size
        if full or param_spec_of(param).tied:
            close_bucket(key)
    for key in list(open_buckets):
        close_bucket(key)
    return buckets


def default_bucket_size(data_parallel_size: int) -> int:
    """Return the default number of elements of a bucket, large enough that latency does not matter."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
