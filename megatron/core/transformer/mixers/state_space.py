"""What Mamba-2's mixer and the gated delta net have in common: a convolution with parameters cut by segment, and the state of decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.context_parallel.head_exchange import HeadExchange
from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.kernels.ops.reference import accumulation_dtype_of
from megatron.core.kernels.state_space.scans import segment_ids_from_document_ids
from megatron.core.parallel.spec import FusedWeightSegment, Initial, ParamSpec, ShardedDim, meta_parameter
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


class CausalConvParameters(nn.Module):
    """The parameters of a depthwise causal convolution. parts: the segments of its channels, each cut by itself over the tensor ranks."""

    def __init__(
        self, parts: tuple[FusedWeightSegment, ...], width: int, build: LayerBuildContext, *, bias: bool
    ) -> None:
        super().__init__()
        channels, shards = sum(part.size for part in parts), (ShardedDim(0, "tp", parts),)
        bound = 1.0 / math.sqrt(width)  # Kaiming's uniform rule with a = sqrt(5), as torch draws convolutions
        spec = ParamSpec((channels, 1, width), uniform_initializer(-bound, bound), "conv", shards)
        self.weight = meta_parameter(spec, build.mesh, build.dtype)
        shift = ParamSpec((channels,), uniform_initializer(-bound, bound), "vector", shards)
        self.bias = meta_parameter(shift, build.mesh, build.dtype) if bias else None

    def convolve(
        self,
        parts: Sequence[Tensor],
        copies: Sequence[int],
        exchange: HeadExchange,
        kernels: Kernels,
        segments: Tensor | None,
        before: Tensor | None,
    ) -> tuple[list[Tensor], Tensor]:
        """Convolve the channels of all parts; return the parts, and the convolution's input [s, b, c].

        parts: [s, b, heads, size] each, behind the exchange. copies: how often the heads of each part were repeated for it.
        segments: of documents [b, s]. before: [width - 1, b, c], the inputs before these.
        """
        heads = [part.shape[2] * exchange.axis.size // times for part, times in zip(parts, copies, strict=True)]
        channels = [count * part.shape[3] for count, part in zip(heads, parts, strict=True)]

        def channels_of_this_cp_rank(x: Tensor) -> Tensor:
            pieces = zip(x.split(channels), heads, copies, strict=True)
            return torch.cat([exchange.shard_parameter(piece, count, times) for piece, count, times in pieces])

        joined = torch.cat([part.flatten(2) for part in parts], dim=-1)
        bias = None if self.bias is None else channels_of_this_cp_rank(self.bias)
        made = kernels.causal_conv(joined, channels_of_this_cp_rank(self.weight[:, 0]), bias, segments, before)
        split = made.split([part.shape[2] * part.shape[3] for part in parts], dim=-1)
        return [one.unflatten(2, part.shape[2:]) for one, part in zip(split, parts, strict=True)], joined


def uniform_initializer(low: float, high: float) -> Initial:
    """Return an initializer that draws uniformly between `low` and `high`."""
    return lambda shape, generator: torch.empty(shape, device=generator.device).uniform_(low, high, generator=generator)


def log_of_uniform_initializer(low: float, high: float) -> Initial:
    """Return an initializer that draws uniformly between `low` and `high` and takes the logarithm."""
    return lambda shape, generator: uniform_initializer(low, high)(shape, generator).log()


def per_head_parameter(build: LayerBuildContext, heads: int, initial: Initial) -> nn.Parameter:
    """Create a parameter [heads], cut as heads are, in fp32 or wider: half precision would lose decays."""
    spec = ParamSpec((heads,), initial, "vector", (ShardedDim(0, "tp", (FusedWeightSegment(heads),)),))
    return meta_parameter(spec, build.mesh, accumulation_dtype_of(build.dtype))


def document_segment_ids(mask: AttentionMaskSpec) -> Tensor | None:
    """Return the segments [b, s] of whole sequences, as scans take them, if the mask separates documents; else None."""
    return None if mask.documents is None else segment_ids_from_document_ids(mask.documents)


def num_group_repeats_for_cp(groups: int, exchange: HeadExchange) -> int:
    """Return how often each group must be repeated so that every context rank gets groups along with its heads."""
    return exchange.axis.size // math.gcd(exchange.axis.size, groups)
