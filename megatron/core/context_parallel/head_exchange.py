"""All-to-all between shards of positions and shards of heads, for layers that must see a whole sequence (DeepSpeed-Ulysses).

at home    [s/cp, b, n, w]     this rank's positions in zigzag order, all heads
away       [s, b, n/cp, w]     all positions in true order, a share of the heads
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.settings.parallel import can_exchange_heads
from megatron.core.context_parallel.sequence_sharded_kernels import SequenceShardedKernels
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.choice.table import Kernels
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh


def positions_to_heads(x: Tensor, axis: Axis, counts: list[int], order: Tensor) -> Tensor:
    """All-to-all from shards of positions to shards of heads: [s/cp, b, n, ...] to [s, b, n/cp, ...].

    counts: positions of each rank. order: the permutation that sorts them, int64 [s].
    """
    heads = x.unflatten(2, (axis.size, -1)).movedim(2, 0).flatten(0, 1)
    return collectives.all_to_all(heads, [len(x)] * axis.size, counts, axis)[order]


def heads_to_positions(x: Tensor, axis: Axis, counts: list[int], order: Tensor) -> Tensor:
    """All-to-all back to shards of positions: [s, b, n/cp, ...] to [s/cp, b, n, ...]. counts, order: as in the other."""
    own = counts[axis.rank]
    places = collectives.all_to_all(x[order.argsort()], counts, [own] * axis.size, axis)
    return places.unflatten(0, (axis.size, own)).movedim(0, 2).flatten(2, 3)


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The all-to-all of one forward pass over the ranks that share its sequences; over one rank it does nothing.

    shards: where positions stay where they are, as --state-comm-type says, or because those ranks do not divide the heads.
    """

    axis: Axis
    cut: Zigzag
    shards: SequenceShardedKernels | None = None

    @staticmethod
    def from_mask(
        mesh: Mesh, mask: AttentionMaskSpec, held: int, *, heads: int, groups: int, state_comm_type: str
    ) -> HeadExchange:
        """Return the exchange for the ranks that share a sequence; one that does nothing if it is not divided.

        held: positions of the sequence on this rank. mask: of the whole sequence, with its length if that is divided.
        heads, groups: of this tensor rank. state_comm_type: as the flag.
        """
        if mask.length is None:
            return ALONE
        axis = mesh.context_axis_of_size(mask.length // held)
        cut = Zigzag(mask.length, axis.size)
        if state_comm_type == "states" or not can_exchange_heads(axis.size, heads, groups):
            return HeadExchange(ALONE.axis, ALONE.cut, SequenceShardedKernels(axis, cut))
        return HeadExchange(axis, cut)

    def wrap_kernels(self, kernels: Kernels) -> Kernels:
        """Return the kernels for whole sequences, or, with `shards`, for this rank's positions."""
        return kernels if self.shards is None else self.shards.wrap_kernels(kernels)

    def to_head_shards(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """All-to-all of each part [s/cp, b, n, w] to shards of heads [s, b, n/cp, w]; n and w may differ."""
        if self.axis.size == 1:
            return parts
        shares = [part.unflatten(2, (self.axis.size, -1)) for part in parts]  # [s/cp, b, cp, n/cp, w]
        joined = torch.cat([share.flatten(3) for share in shares], dim=-1)
        order = self._sequence_permutation(joined.device)
        whole = positions_to_heads(joined, self.axis, self.cut.position_counts_by_rank(), order).squeeze(2)
        pieces = whole.split([share.shape[3] * share.shape[4] for share in shares], dim=-1)
        return tuple(piece.unflatten(2, share.shape[3:]) for piece, share in zip(pieces, shares, strict=True))

    def to_position_shards(self, x: Tensor) -> Tensor:
        """All-to-all back from shards of heads [s, b, n/cp, w] to shards of positions [s/cp, b, n, w]."""
        if self.axis.size == 1:
            return x
        order = self._sequence_permutation(x.device)
        return heads_to_positions(x, self.axis, self.cut.position_counts_by_rank(), order)

    def shard_parameter(self, x: Tensor, heads: int, copies: int = 1) -> Tensor:
        """Return this rank's heads of a parameter [heads * k, ...], along dimension 0, each repeated `copies` times."""
        if self.axis.size == 1:
            return x
        by_head = x.unflatten(0, (heads, -1)).repeat_interleave(copies, dim=0)
        return by_head.chunk(self.axis.size)[self.axis.rank].flatten(0, 1)

    def _sequence_permutation(self, device: torch.device) -> Tensor:
        """Return the permutation that sorts the ranks' concatenated shards by position."""
        return self.cut.sorting_permutation(range(self.axis.size), device)


ALONE = HeadExchange(Axis("alone"), Zigzag(1, 1))
