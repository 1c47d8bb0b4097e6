"""Buckets of weights that work in 8 bits (`--fp8-param-gather`): what is owned is kept in fp32, what is gathered in 8 bits.

    master  [ rank's own range, fp32 ]                                 a `Segment`, which the optimizer steps in place
    data    [ rank 0  |  rank 1  |  rank 2  |  rank 3 ]  1 byte each   values of all weights, which layers multiply
    scales  [ a weight, a weight, ... ]                                of each weight as a whole

After a step, ranks agree on the largest value of every weight, each rounds its own range, and ranges are gathered. So a weight
is rounded once, from fp32, a quarter to half of the bytes travels, and no rank holds weights of 16 bits. Parameters stay as
what gradients arrive at: their values are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from megatron.core.distributed.buffers import Bucket, Segment
from megatron.core.kernels import fp8
from megatron.core.kernels.fp8 import Quantised
from megatron.core.kernels.recipes import Recipe
from megatron.core.kernels.reference import wide
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis


class Holder(Protocol):
    """What a layer takes its rounded weight from. (`tensor_parallel.low_precision.Scaling` is one.) cut: axis of the weight's pieces."""

    recipe: Recipe
    cut: Axis
    held: Quantised | None


class RoundedBucket(Bucket):
    """A bucket whose parameters have their values in `holders` alone, a holder each."""

    holds_values = False

    def __init__(self, params: list[nn.Parameter], axis: Axis, *, grad_dtype: torch.dtype, holders: dict[nn.Parameter, Holder]) -> None:
        super().__init__(params, axis, grad_dtype=grad_dtype, sharded=True)
        self.holders, self.dtype = [holders[param] for param in params], params[0].dtype
        low, high = self.owned()
        self.master = self.data[low:high].to(wide(self.dtype), copy=True)
        self.data = torch.zeros(len(self.data), dtype=torch.uint8, device=self.data.device)
        self.scales = torch.ones(len(params), dtype=self.master.dtype, device=self.data.device)
        for place, (param, holder) in enumerate(zip(params, self.holders, strict=True)):
            shape, number = param.shape, holder.recipe.forward
            values = self.data[self.starts[place]:self.starts[place] + shape.numel()].view(number.dtype).view(shape)
            holder.held = Quantised(values, self.scales[place])
            param.data = param.data.new_zeros(()).expand(shape)

    def segments(self) -> Iterator[Segment]:
        """What this rank owns of each parameter: its fp32 master."""
        low, _ = self.owned()
        for segment in super().segments():
            start = self.starts[self._place(segment)] + segment.low - low
            yield replace(segment, data=self.master[start:start + segment.high - segment.low],
                          rounds_to=self.dtype if self.dtype != self.master.dtype else None)

    def prepare(self) -> None:
        """Round this rank's range anew. All ranks that hold a piece of these weights call it together."""
        low, _ = self.owned()
        largest = self.scales.new_zeros(len(self.params))
        for segment in self.segments():
            largest[self._place(segment)] = fp8.largest_of(segment.data)
        for axis in (self.axis, self.holders[0].cut):
            collectives.all_reduce(largest, axis, "max")
        recipe = self.holders[0].recipe
        scales = fp8.tensor_scale(largest, recipe.forward, recipe.margin)
        self.scales.copy_(scales.reciprocal())
        for segment in self.segments():
            place = self._place(segment)
            rounded = fp8.by_tensor(segment.data[None], recipe.forward, scales[place]).values
            start = self.starts[place] + segment.low
            self.data[start:start + segment.high - segment.low] = rounded.view(torch.uint8)[0]

    def _place(self, segment: Segment) -> int:
        return next(place for place, param in enumerate(self.params) if param.spec is segment.spec)  # type: ignore[attr-defined]


def holders_of(module: nn.Module) -> dict[nn.Parameter, Holder]:
    """The weights of a stage that are to be kept in 8 bits, with what holds them."""
    found = {}
    for part in module.modules():
        holder = getattr(part, "scaling", None)
        if holder is not None and holder.recipe.holds_weights and part.weight.dim() == 2:
            found[part.weight] = holder
    return found
