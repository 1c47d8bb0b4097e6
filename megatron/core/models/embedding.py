"""The input embedding: ids, positions and types of tokens to vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.embedding import (
    PositionEmbeddingTable,
    VocabParallelEmbedding,
    vocabulary_matrix_spec,
)
from megatron.core.transformer.context.layer_build_context import LayerBuildContext, multiply_unless_one
from megatron.core.transformer.dropout import Dropout


class IdsWithImages(NamedTuple):
    """Token ids [b, s], ignored where images are; images and slots as `ImageEmbedder` takes them."""

    ids: Tensor
    images: Tensor
    slots: Tensor


class Embedding(nn.Module):
    """The sum of word, learned position and token type embeddings, optionally scaled and normalized.

    tied: another stage has the output layer with the same matrix. has_mtp_copy: another stage has a copy for
    multi-token prediction.
    """

    def __init__(
        self, build: LayerBuildContext, *, tied: bool, token_types: int = 0, has_mtp_copy: bool = False
    ) -> None:
        super().__init__()
        model = build.model
        spec = vocabulary_matrix_spec(model, build.embedding_init_method(), tied=tied or has_mtp_copy)
        spec = replace(spec, tied_over="embed" if tied else "mtp_embed")
        shared: dict[str, Any] = {
            "init": build.embedding_init_method(),
            "region": build.tp_region,
            "mesh": build.mesh,
            "dtype": build.dtype,
        }
        self.residual_dtype = build.residual_dtype
        self.word_embeddings = VocabParallelEmbedding(spec, region=build.tp_region, mesh=build.mesh, dtype=build.dtype)
        self.position_embeddings = None
        if model.rope.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbeddingTable(
                model.max_position_embeddings, model.hidden_size, tied=has_mtp_copy, **shared
            )
        self.tokentype_embeddings = (
            PositionEmbeddingTable(token_types, model.hidden_size, **shared) if token_types else None
        )
        self.layernorm = build.make_norm(model.hidden_size) if model.embedding_layernorm else None
        # The factor is rounded to the weights' format, as in the published networks: in bf16 it is 55.5 for a width of 3072.
        root = torch.tensor(model.hidden_size**0.5, dtype=build.dtype, device="cpu").item()
        self.scale = (root if model.scale_embeddings else 1.0) * model.multipliers.embedding_multiplier
        self.dropout = Dropout(model.hidden_dropout, build.streams, build.tp_region.dropout_stream)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Embed tokens. ids: [b, s]; positions: [b or 1, s]; types: [b, s], for networks with token types.

        Returns [s, b, h] ([s/tp, b, h] with sequence parallelism), in the dtype of the residual stream or of the norm.
        """
        x = self.word_embeddings(ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        if self.tokentype_embeddings is not None:
            assert types is not None, "a network with token types needs them as input"
            x = x + self.tokentype_embeddings(types)
        x = multiply_unless_one(x, self.scale).to(self.residual_dtype)
        return self.dropout(x if self.layernorm is None else self.layernorm(x))
