"""Tables that turn ids and positions into vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.settings.model import ModelConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import FusedWeightSegment, Initial, ParamSpec, ShardedDim, local_shape, meta_parameter
from megatron.core.tensor_parallel.region import TensorParallelRegion


def vocabulary_matrix_spec(model: ModelConfig, init: Initial, *, tied: bool, name: str = "") -> ParamSpec:
    """Return the spec of a matrix [vocabulary, hidden], rows cut over tensor ranks, without padding rows."""
    cut = ShardedDim(0, "tp", (FusedWeightSegment(model.true_vocab_size, padded=model.padded_vocab_size),))
    return ParamSpec((model.true_vocab_size, model.hidden_size), init, "embedding", (cut,), tied=tied, name=name)


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows are cut over the tensor ranks."""

    def __init__(self, spec: ParamSpec, *, region: TensorParallelRegion, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.region = region
        self.weight = meta_parameter(spec, mesh, dtype)
        self.rows = local_shape(spec, mesh)[0]
        self.first = self.rows * region.axis.rank

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids [b, s]; return [s, b, h] (or [s/tp, b, h] with sequence parallelism)."""
        if self.region.axis.size == 1:
            return F.embedding(ids.t(), self.weight)
        local = ids.t() - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.region.reduce_from_region(vectors.masked_fill(elsewhere[..., None], 0.0))


class PositionEmbeddingTable(nn.Module):
    """Learned vectors of positions or token types, whole on every rank. tied: also on a stage with MTP layers."""

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        *,
        init: Initial,
        region: TensorParallelRegion,
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
        """Embed positions [b or 1, s]; return [s, b or 1, h] (or this rank's [s/tp, ...] with sequence parallelism)."""
        return F.embedding(self.region.scatter_to_sequence(positions.t().contiguous()), self.weight)
