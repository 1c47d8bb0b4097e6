"""How activations enter and leave a tensor-parallel region, with or without sequence parallelism.

Without sequence parallelism activations between regions are whole on every rank: `copy_to_region` is the
identity (its backward all-reduces), `reduce_from_region` all-reduces. With it they are sharded along the sequence:
`copy_to_region` all-gathers and `reduce_from_region` reduce-scatters; both cost the same bytes, and what lies between
regions is computed once instead of on every rank (Korthikanti et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.main_grad import MainGrad, active_main_grad
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.wgrad import WeightGradStore
from megatron.core.tensor_parallel.low_precision import LowPrecisionSetup
from megatron.core.tensor_parallel.overlapped_matmul import MatmulOverlapOptions

_ALONE = Axis("alone")


@dataclass(frozen=True, slots=True)
class TensorParallelRegion:
    """How activations enter and leave tensor-parallel regions. axis: the tensor axis.

    wgrad_store: takes delayed weight gradients, if the schedule delays them. low: setup of low-precision matmuls; None:
    full precision. overlapped: which matmuls overlap their communication. sums: linear layers add weight gradients to
    the main gradients themselves.
    """

    axis: Axis
    sequence_parallel: bool = False
    wgrad_store: WeightGradStore | None = None
    low: LowPrecisionSetup | None = None
    overlapped: MatmulOverlapOptions = MatmulOverlapOptions()
    sums: bool = False

    def main_grad_of(self, weight: Tensor) -> MainGrad | None:
        """Return the main gradient that a layer adds this weight's (any shape) to; None if autograd returns it."""
        return active_main_grad(weight) if self.sums else None

    def without_communication(self) -> TensorParallelRegion:
        """Return the region of a layer that works on what this rank has."""
        if self.axis.size == 1:
            return self
        return replace(self, axis=_ALONE, sequence_parallel=False, overlapped=MatmulOverlapOptions())

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Enter a region: x [s, b, h] or [s/tp, b, h] to [s, b, h] on every rank; its gradient is summed over ranks."""
        if self.sequence_parallel:
            return collectives.gather_with_scatter_backward(x, self.axis)
        return collectives.identity_with_reduce_backward(x, self.axis)

    def reduce_from_region(self, partial: Tensor) -> Tensor:
        """Leave a region: sum partial results [s, b, h]; return [s, b, h], with sequence parallelism [s/tp, b, h]."""
        if self.sequence_parallel:
            return collectives.scatter_with_gather_backward(partial, self.axis)
        return collectives.reduce_with_identity_backward(partial, self.axis)

    def gather_columns_from_region(self, columns: Tensor) -> Tensor:
        """Gather the output of a column-parallel layer, [s, b, out/tp], over the ranks; return [s or s/tp, b, out]."""
        return self.scatter_to_sequence(collectives.gather_columns_with_split_backward(columns, self.axis))

    def scatter_to_sequence(self, whole: Tensor) -> Tensor:
        """Return this rank's part outside of regions of a tensor [s, ...] that all ranks have; backward gathers."""
        return collectives.split_with_gather_backward(whole, self.axis) if self.sequence_parallel else whole

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """Return tokens of this rank alone, [ceil(s/tp), b, h]: x with sequence parallelism, else its chunk of x.

        x: hidden states outside of regions. A sequence that the axis does not divide is padded with zeros, which
        `undo_scatter_tokens` drops.
        """
        if self.sequence_parallel:
            return x
        missing = -x.shape[0] % self.axis.size
        filled = torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) if missing else x
        return collectives.split_with_gather_backward(filled, self.axis)

    def undo_scatter_tokens(self, own: Tensor, held: int) -> Tensor:
        """Undo `scatter_tokens`: return the hidden states outside of regions, [held, b, h]. own: [ceil(held/tp), b, h]."""
        return own if self.sequence_parallel else collectives.gather_with_split_backward(own, self.axis)[:held]

    def local_sequence_length(self, sequence: int) -> int:
        """Return how many positions of a sequence of this length a rank holds outside of regions."""
        return sequence // self.axis.size if self.sequence_parallel else sequence

    def whole_sequence_length(self, held: int) -> int:
        """Return the sequence's length, of which a tensor rank holds `held` positions outside of regions."""
        return held * self.axis.size if self.sequence_parallel else held

    def replicate_first_position(self, x: Tensor) -> Tensor:
        """Return the first position of a tensor [s or s/tp, ...] outside of regions, on every rank."""
        if not self.sequence_parallel:
            return x[0]
        return collectives.reduce_with_identity_backward(x[0] * float(self.axis.is_first), self.axis)

    @property
    def gradient_sum_axes(self) -> tuple[str, ...]:
        """Axes that sum gradients of parameters outside of regions: ("tp",) with sequence parallelism."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def dropout_stream(self) -> str:
        """Random stream of dropout outside of regions: "cut" if ranks hold different positions, else "default"."""
        return "cut" if self.sequence_parallel else "default"
