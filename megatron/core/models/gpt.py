"""Decoder-only transformers.

    ids -> embedding -> layers of stage 0 -> message -> layers of stage 1 -> ... -> final norm -> head -> loss

A `GPTModel` is one pipeline stage; without a pipeline it is the whole network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.plan import StageSpec
from megatron.core.config.run import TrainConfig
from megatron.core.kernels.mask import MaskSpec
from megatron.core.models.embedding import WORD_EMBEDDING, Embedding
from megatron.core.models.heads import LanguageModelHead
from megatron.core.parallel.rng import materialize
from megatron.core.parallel.spec import name_all
from megatron.core.transformer.attention import positions_of
from megatron.core.transformer.build import Build
from megatron.core.transformer.passing import Pass, Side
from megatron.core.transformer.rope import rotary_of
from megatron.core.transformer.stack import Stack


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
            self.output_layer = LanguageModelHead(build, shared=shared, tied_name=WORD_EMBEDDING if tied and split else "")
        name_all(self)

    def materialize(self, seed: int, *, draw_on: torch.device | None = None) -> GPTModel:
        """Give the parameters memory and their initial values. Returns the model."""
        materialize(self, self.build.mesh, seed, draw_on=draw_on)
        return self

    def message_shape(self, batch_size: int, sequence: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and format of what one stage sends to the next."""
        length = self.build.region.length(sequence)
        return (length, batch_size, self.build.model.hidden_size), self.build.residual_dtype

    def receives(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and format of each tensor that a stage takes from the one before."""
        return (self.message_shape(train.micro_batch_size, train.seq_length),)

    def forward(self, *, ids: Tensor | None = None, hidden: Tensor | None = None, labels: Tensor | None = None,
                positions: Tensor | None = None, documents: Tensor | None = None, side: Side | None = None) -> Tensor:
        """Run this stage.

        ids: [b, s], read by the first stage. hidden: the message of the stage before, [s or s/tp, b, h]. labels: [b, s].
        positions: [b, s] when they do not simply count; documents: [b, s] when documents are kept apart. side: where layers
        note their own losses.
        Returns the message to the next stage; on the last, the loss of every token [b, s], or logits [s, b, v/tp]
        without labels.
        """
        if self.embedding is not None:
            assert ids is not None, "the first stage reads ids"
            hidden = self.embedding(ids, positions_of(ids) if positions is None else positions)
        assert hidden is not None, "a later stage reads the message of the stage before"
        x = self.decoder(hidden, Pass(MaskSpec(documents=documents), rotary_of(self.build, hidden, positions), side=side))
        if self.output_layer is None:
            return x
        return self.output_layer(x, self.output_weight(), labels)

    def output_weight(self) -> Tensor:
        """The matrix of the output layer: its own, or the embedding's."""
        assert self.output_layer is not None, "only the last stage has an output layer"
        own = getattr(self.output_layer, "weight", None)
        return self.embedding.word_embeddings.weight if own is None else own
