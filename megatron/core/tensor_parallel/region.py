"""A tensor-parallel region has one entrance and one exit.

Without sequence parallelism activations between regions are whole on every rank: enter does nothing (and sums the
gradient), exit sums. With it they are cut along the sequence: enter gathers, exit sums and cuts; both cost the same
bytes, and what lies between is computed once instead of on every rank (Korthikanti et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.parallel.main_grad import MainGrad, sum_of
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

    def sum_of(self, weight: Tensor) -> MainGrad | None:
        """Where a layer is to add the gradient of a weight; None: it is given to autograd."""
        return sum_of(weight) if self.sums else None

    def enter(self, x: Tensor) -> Tensor:
        """All positions [s, b, h] of a tensor between regions, of which ranks make different things; gradients are summed."""
        if self.sequence_parallel:
            return collectives.gather_then_scatter(x, self.axis)
        return collectives.identity_then_reduce(x, self.axis)

    def exit(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' shares [s, b, h]; returns [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        if self.sequence_parallel:
            return collectives.scatter_then_gather(partial, self.axis)
        return collectives.reduce_then_identity(partial, self.axis)

    def collect(self, columns: Tensor) -> Tensor:
        """The whole of what a column layer made, [s, b, out/tp] on each rank; returns [s or s/tp, b, out]."""
        return self.own(collectives.gather_columns_then_cut(columns, self.axis))

    def own(self, whole: Tensor) -> Tensor:
        """What a rank keeps between regions of a tensor [s, ...] that all ranks computed: all of it, or its piece."""
        return collectives.cut_then_gather(whole, self.axis) if self.sequence_parallel else whole

    def own_tokens(self, x: Tensor) -> Tensor:
        """The tokens [s/tp, b, h] between regions that this rank alone has: what it holds, or where all hold the same, its piece.

        A sequence that the axis does not divide is filled up with zeros, which `whole_tokens` takes off again.
        """
        if self.sequence_parallel:
            return x
        missing = -x.shape[0] % self.axis.size
        filled = torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x
        return collectives.cut_then_gather(filled, self.axis)

    def whole_tokens(self, own: Tensor, held: int) -> Tensor:
        """The way back from `own_tokens`: [s/tp, b, h] to [held, b, h], what a rank holds between regions."""
        return own if self.sequence_parallel else collectives.gather_then_cut(own, self.axis)[:held]

    def length(self, sequence: int) -> int:
        """Positions that a rank holds between regions."""
        return sequence // self.axis.size if self.sequence_parallel else sequence

    def whole_length(self, held: int) -> int:
        """Positions of the whole sequence, when a rank holds so many between regions."""
        return held * self.axis.size if self.sequence_parallel else held

    def first(self, x: Tensor) -> Tensor:
        """The first position of a tensor [s or s/tp, ...] between regions, on every rank."""
        if not self.sequence_parallel:
            return x[0]
        return collectives.reduce_then_identity(x[0] * float(self.axis.is_first), self.axis)

    @property
    def outside_sums(self) -> tuple[str, ...]:
        """Axes over which gradients of parameters used between regions must be summed."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def outside_stream(self) -> str:
        """Random stream for dropout between regions."""
        return "cut" if self.sequence_parallel else "default"
