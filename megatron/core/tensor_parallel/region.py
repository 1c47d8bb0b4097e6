"""How activations enter and leave a tensor-parallel region, with or without sequence parallelism.

Without sequence parallelism activations between regions are whole on every rank: `copy_to_region` is the
identity (its backward all-reduces), `reduce_from_region` all-reduces. With it they are sharded along the sequence:
`copy_to_region` all-gathers and `reduce_from_region` reduce-scatters; both cost the same bytes, and what lies between
regions is computed once instead of on every rank (Korthikanti et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.main_grad import MainGrad, active_main_grad
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.low_precision import LowPrecision
from megatron.core.tensor_parallel.overlapped_matmul import OverlappedMatmuls


@dataclass(frozen=True, slots=True)
class Region:
    """The choice, made once. axis: the tensor axis. wgrad_store: where weight gradients are delayed, if the schedule does so.

    low: how linear layers round what they multiply; None: not at all. overlapped: which matmuls overlap their communication.
    sums: layers add the gradients of their weights themselves, to where these are summed.
    """

    axis: Axis
    sequence_parallel: bool = False
    wgrad_store: WeightGradStore | None = None
    low: LowPrecision | None = None
    overlapped: OverlappedMatmuls = OverlappedMatmuls()
    sums: bool = False

    def main_grad_of(self, weight: Tensor) -> MainGrad | None:
        """Return the main gradient to which a layer adds the gradient of a weight (any shape);

        None if autograd is to return it.
        """
        return active_main_grad(weight) if self.sums else None

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Enter a region: x [s, b, h] or [s/tp, b, h] to [s, b, h] on every rank; its gradient is summed over ranks."""
        if self.sequence_parallel:
            return collectives.gather_then_scatter(x, self.axis)
        return collectives.identity_then_reduce(x, self.axis)

    def reduce_from_region(self, partial: Tensor) -> Tensor:
        """Leave a region: the sum of all ranks' partial results [s, b, h]; returns [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        if self.sequence_parallel:
            return collectives.scatter_then_gather(partial, self.axis)
        return collectives.reduce_then_identity(partial, self.axis)

    def gather_from_region(self, columns: Tensor) -> Tensor:
        """The whole output of a column-parallel layer, [s, b, out/tp] on each rank; returns [s or s/tp, b, out]."""
        return self.scatter_to_sequence(collectives.gather_columns_then_split(columns, self.axis))

    def scatter_to_sequence(self, whole: Tensor) -> Tensor:
        """Of a tensor [s, ...] that all ranks computed, what a rank keeps between regions: [s, ...], or its shard [s/tp, ...]."""
        return collectives.split_then_gather(whole, self.axis) if self.sequence_parallel else whole

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """The tokens [s/tp, b, h] between regions that this rank alone has: what it holds, or where all hold the same, its piece.

        A sequence that the axis does not divide is filled up with zeros, which `gather_tokens` takes off again.
        """
        if self.sequence_parallel:
            return x
        missing = -x.shape[0] % self.axis.size
        filled = torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x
        return collectives.split_then_gather(filled, self.axis)

    def gather_tokens(self, own: Tensor, held: int) -> Tensor:
        """The way back from `scatter_tokens`: [s/tp, b, h] to [held, b, h], what a rank holds between regions."""
        return own if self.sequence_parallel else collectives.gather_then_split(own, self.axis)[:held]

    def local_length(self, sequence: int) -> int:
        """Positions that a rank holds between regions."""
        return sequence // self.axis.size if self.sequence_parallel else sequence

    def whole_length(self, held: int) -> int:
        """Positions of the whole sequence, when a rank holds so many between regions."""
        return held * self.axis.size if self.sequence_parallel else held

    def first_position(self, x: Tensor) -> Tensor:
        """The first position of a tensor [s or s/tp, ...] between regions, on every rank."""
        if not self.sequence_parallel:
            return x[0]
        return collectives.reduce_then_identity(x[0] * float(self.axis.is_first), self.axis)

    @property
    def gradient_sum_axes(self) -> tuple[str, ...]:
        """Axes over which gradients of parameters used between regions must be summed."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def dropout_stream(self) -> str:
        """Random stream for dropout between regions."""
        return "cut" if self.sequence_parallel else "default"
