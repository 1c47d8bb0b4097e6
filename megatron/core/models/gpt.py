"""Decoder-only transformers.

    ids -> embedding -> layers of stage 0 -> message -> layers of stage 1 -> ... -> final norm -> head -> loss

A `GPTModel` is one pipeline stage; without a pipeline it is the whole network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.plan import StageSpec
from megatron.core.kernels.mask import MaskSpec
from megatron.core.models.heads import LanguageModelHead
from megatron.core.parallel.rng import materialize
from megatron.core.parallel.spec import name_all
from megatron.core.tensor_parallel.embedding import PositionEmbedding, VocabEmbedding, vocabulary_spec
from megatron.core.transformer.attention import positions_of
from megatron.core.transformer.build import Build
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.rope import RotaryTable, rotary_table
from megatron.core.transformer.stack import Stack

_EMBEDDING = "embedding.word_embeddings.weight"


class Embedding(nn.Module):
    """Ids and positions to vectors."""

    def __init__(self, build: Build, *, tied: bool) -> None:
        super().__init__()
        model = build.model
        spec = vocabulary_spec(model.true_vocab_size, model.padded_vocab_size, model.hidden_size,
                               build.initial_embedding(), tied=tied)
        self.residual_dtype = build.residual_dtype
        self.word_embeddings = VocabEmbedding(spec, region=build.region, mesh=build.mesh, dtype=build.dtype)
        self.position_embeddings = None
        if model.rope.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(
                model.max_position_embeddings, model.hidden_size, init=build.initial_embedding(), region=build.region,
                mesh=build.mesh, dtype=build.dtype)
        self.dropout = Dropout(model.hidden_dropout, build.streams, build.region.outside_stream)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids: [b, s]; positions: [b or 1, s]. Returns [s, b, h] ([s/tp, b, h] with sequence parallelism)."""
        x = self.word_embeddings(ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions)
        return self.dropout(x.to(self.residual_dtype))


class GPTModel(nn.Module):
    """One stage of a decoder-only transformer."""

    def __init__(self, stage: StageSpec, build: Build) -> None:
        super().__init__()
        self.stage, self.build = stage, build
        # A pipeline of several stages holds a tied matrix twice: where it embeds, and where it predicts.
        split = not (stage.embeds and stage.heads)
        tied = build.model.ties_embeddings
        self.embedding = Embedding(build, tied=tied and split) if stage.embeds else None
        self.decoder = Stack(stage.layers, build, final_norm=stage.heads)
        self.output_layer = None
        if stage.heads:
            shared = self.embedding.word_embeddings.weight if tied and self.embedding is not None else None
            self.output_layer = LanguageModelHead(build, shared=shared, tied_name=_EMBEDDING if tied and split else "")
        name_all(self)

    def materialize(self, seed: int, *, draw_on: torch.device | None = None) -> GPTModel:
        """Give the parameters memory and their initial values. Returns the model."""
        materialize(self, self.build.mesh, seed, draw_on=draw_on)
        return self

    def message_shape(self, batch_size: int, sequence: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and format of what one stage sends to the next."""
        length = self.build.region.length(sequence)
        return (length, batch_size, self.build.model.hidden_size), self.build.residual_dtype

    def forward(self, *, ids: Tensor | None = None, hidden: Tensor | None = None, labels: Tensor | None = None,
                positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Run this stage.

        ids: [b, s], read by the first stage. hidden: the message of the stage before, [s or s/tp, b, h]. labels: [b, s].
        positions: [b, s] when they do not simply count; documents: [b, s] when documents are kept apart.
        Returns the message to the next stage; on the last, the loss of every token [b, s], or logits [s, b, v/tp]
        without labels.
        """
        if self.embedding is not None:
            assert ids is not None, "the first stage reads ids"
            hidden = self.embedding(ids, positions_of(ids) if positions is None else positions)
        assert hidden is not None, "a later stage reads the message of the stage before"
        x = self.decoder(hidden, MaskSpec(causal=True, documents=documents), self._rotary(hidden, positions))
        if self.output_layer is None:
            return x
        return self.output_layer(x, self.output_weight(), labels)

    def output_weight(self) -> Tensor:
        """The matrix of the output layer: its own, or the embedding's."""
        assert self.output_layer is not None, "only the last stage has an output layer"
        own = getattr(self.output_layer, "weight", None)
        return self.embedding.word_embeddings.weight if own is None else own

    def _rotary(self, hidden: Tensor, positions: Tensor | None) -> RotaryTable | None:
        model = self.build.model
        if model.rope.position_embedding_type != "rope":
            return None
        length = hidden.shape[0] * (self.build.mesh.tp.size if self.build.region.sequence_parallel else 1)
        places = torch.arange(length, device=hidden.device)[None] if positions is None else positions
        wide = torch.float64 if self.build.dtype == torch.float64 else torch.float32
        return rotary_table(places, model.rope, model.kv_channels, dtype=wide)
