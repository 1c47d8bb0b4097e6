"""Tables that turn ids and positions into vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import FusedSegment, Initial, ParamSpec, Shard, local_shape, meta_parameter
from megatron.core.tensor_parallel.region import Region


def vocabulary_spec(
    true_size: int, padded_size: int, hidden_size: int, init: Initial, *, tied: bool = False, name: str = ""
) -> ParamSpec:
    """The record of a matrix [vocabulary, hidden] cut over the tensor ranks; padded rows belong to no box."""
    cut = Shard(0, "tp", (FusedSegment(true_size, padded=padded_size),))
    return ParamSpec((true_size, hidden_size), init, "embedding", (cut,), tied=tied, name=name)


class VocabEmbedding(nn.Module):
    """One vector an id; every tensor rank holds a range of ids."""

    def __init__(self, spec: ParamSpec, *, region: Region, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.region = region
        self.weight = meta_parameter(spec, mesh, dtype)
        self.rows = local_shape(spec, mesh)[0]
        self.first = self.rows * region.axis.rank

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [b, s]. Returns [s, b, h] (or [s/tp, b, h] with sequence parallelism)."""
        if self.region.axis.size == 1:
            return F.embedding(ids.t(), self.weight)
        local = ids.t() - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.region.reduce_from_region(vectors.masked_fill(elsewhere[..., None], 0.0))


class PositionEmbedding(nn.Module):
    """One learned vector a position, whole on every rank. tied: held by every stage that embeds."""

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        *,
        init: Initial,
        region: Region,
        mesh: Mesh,
        dtype: torch.dtype,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.region = region
        spec = ParamSpec(
            (num_positions, hidden_size),
            init,
            "table",
            sum_over=region.gradient_sum_axes,
            tied=tied,
            tied_over="mtp_embed",
        )
        self.weight = meta_parameter(spec, mesh, dtype)

    def forward(self, positions: Tensor) -> Tensor:
        """positions: [b or 1, s]. Returns [s, b or 1, h] (or this rank's [s/tp, ...] with sequence parallelism)."""
        return F.embedding(self.region.scatter_to_sequence(positions.t().contiguous()), self.weight)
