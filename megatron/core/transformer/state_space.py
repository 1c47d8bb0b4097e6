"""What Mamba-2's mixer and the gated delta net have in common: a convolution with parameters cut by segment, and the state of decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.context_parallel.heads import HeadExchange
from megatron.core.kernels.mask import MaskSpec
from megatron.core.kernels.reference import accumulation_dtype
from megatron.core.kernels.scans import segments_of
from megatron.core.parallel.spec import FusedSegment, Initial, ParamSpec, Shard, meta_parameter
from megatron.core.transformer.build import BuildContext


@dataclass(frozen=True, slots=True)
class MixerState:
    """What a mixer has to know of a text's beginning. conv: [width - 1, b, c/tp], its last inputs; scan: [b, n/tp, .., ..], in fp32 or wider."""

    conv: Tensor
    scan: Tensor


class CausalConv(nn.Module):
    """The parameters of a depthwise causal convolution. parts: the segments of its channels, each cut by itself over the tensor ranks."""

    def __init__(self, parts: tuple[FusedSegment, ...], width: int, build: BuildContext, *, bias: bool) -> None:
        super().__init__()
        channels, shards = sum(part.size for part in parts), (Shard(0, "tp", parts),)
        bound = 1.0 / math.sqrt(width)  # Kaiming's uniform rule with a = sqrt(5), as torch draws convolutions
        spec = ParamSpec((channels, 1, width), uniform(-bound, bound), "conv", shards)
        self.weight = meta_parameter(spec, build.mesh, build.dtype)
        shift = ParamSpec((channels,), uniform(-bound, bound), "vector", shards)
        self.bias = meta_parameter(shift, build.mesh, build.dtype) if bias else None


def uniform(low: float, high: float) -> Initial:
    """An initializer that draws evenly between two numbers."""
    return lambda shape, generator: torch.empty(shape, device=generator.device).uniform_(low, high, generator=generator)


def log_uniform(low: float, high: float) -> Initial:
    """An initializer that draws logarithms of numbers that are drawn evenly."""
    return lambda shape, generator: uniform(low, high)(shape, generator).log()


def head_vector(build: BuildContext, heads: int, initial: Initial) -> nn.Parameter:
    """One number for each head, cut as heads are, in fp32 whatever the format of the weights is: half precision would lose decays."""
    spec = ParamSpec((heads,), initial, "vector", (Shard(0, "tp", (FusedSegment(heads),)),))
    return meta_parameter(spec, build.mesh, accumulation_dtype(build.dtype))


def document_segments(mask: MaskSpec) -> Tensor | None:
    """The segments [b, s] of whole sequences, where documents are kept apart."""
    return None if mask.documents is None else segments_of(mask.documents)


def group_repeats(groups: int, exchange: HeadExchange) -> int:
    """How often each group is repeated so that every context rank has groups beside its heads."""
    return exchange.axis.size // math.gcd(exchange.axis.size, groups)
