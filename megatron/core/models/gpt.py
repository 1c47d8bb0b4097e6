"""Decoder-only transformers.

    ids -> embedding -> layers of stage 0 -> message -> layers of stage 1 -> ... -> final norm -> head -> loss
                                                                                         \\-> mtp.py -> head -> losses ahead

A `GPTModel` is one pipeline stage; without a pipeline it is the whole network.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core.config.plan import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.models.embedding import Embedding
from megatron.core.models.mtp import Losses, MTPInputs, MultiTokenPrediction
from megatron.core.models.names import WORD_EMBEDDING
from megatron.core.models.output_heads import LanguageModelHead, output_matrix
from megatron.core.parallel.rng import materialize
from megatron.core.parallel.spec import name_all
from megatron.core.transformer.build import Build
from megatron.core.transformer.cache import Cache
from megatron.core.transformer.passing import ForwardContext, MicrobatchContext
from megatron.core.transformer.rope import rotary_of
from megatron.core.transformer.stack import Stack


class GPTModel(nn.Module):
    """One stage of a decoder-only transformer."""

    def __init__(self, stage: StageSpec, build: Build) -> None:
        super().__init__()
        self.stage, self.build = stage, build
        # A pipeline of several stages holds a tied matrix twice: where it embeds, and where it predicts; and the embedding
        # once more where tokens ahead are predicted.
        split = not (stage.has_embedding and stage.has_output)
        tied, self.depths = build.model.ties_embeddings, build.model.mtp.mtp_num_layers or 0
        looks_ahead = stage.has_mtp and self.depths > 0
        again = self.depths > 0 and not (stage.has_embedding and stage.has_mtp)
        self.embedding = (
            Embedding(build, tied=tied and split, again=again) if stage.has_embedding or looks_ahead else None
        )
        self.decoder = Stack(stage.layers, build, final_norm=stage.has_mtp)
        self.mtp = MultiTokenPrediction(build) if looks_ahead else None
        self.output_layer = None
        if stage.has_output:
            shared = self.embedding.word_embeddings.weight if tied and self.embedding is not None else None
            self.output_layer = LanguageModelHead(
                build, shared=shared, tied_name=WORD_EMBEDDING if tied and split else ""
            )
        name_all(self)

    def materialize(self, seed: int, *, draw_on: torch.device | None = None) -> GPTModel:
        """Give the parameters memory and their initial values. Returns the model."""
        materialize(self, self.build.mesh, seed, draw_on=draw_on)
        return self

    def message_shape(self, batch_size: int, sequence: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and format of what one stage sends to the next."""
        length = self.build.region.length(sequence // self.build.mesh.cp.size)
        return (length, batch_size, self.build.model.hidden_size), self.build.residual_dtype

    def receives(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and format of each tensor that a stage takes from the one before."""
        return (self.message_shape(train.micro_batch_size, train.seq_length),) * self.states

    @property
    def states(self) -> int:
        """Tensors in the message that a stage takes: with the states of all depths where others look ahead."""
        return 1 if self.stage.has_mtp or not self.stage.has_output else 1 + self.depths

    def forward(
        self,
        *,
        ids: Tensor | None = None,
        hidden: Tensor | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        microbatch_context: MicrobatchContext | None = None,
        cache: Cache | None = None,
        ahead: MTPInputs | None = None,
    ) -> Tensor | tuple[Tensor, ...] | Losses:
        """Run this stage.

        ids: [b, s], read by the first stage. hidden: the message of the stage before, [s or s/tp, b, h]. labels: [b, s].
        positions: [b, s] when they do not simply count; documents: [b, s] when documents are kept apart. microbatch_context: where layers
        note their own losses. cache: new tokens of many texts end to end, [1, t], whose beginnings it knows; logits are those it
        wants. ahead: of the tokens that multi-token prediction is about; left out, only the next one is predicted.
        Returns the message to the next stage; on the last, the loss of every token [b, s], with those of the tokens ahead if
        there are any, or logits [s, b, v/tp] without labels.
        """
        if self.stage.has_embedding:
            assert self.embedding is not None and ids is not None, "the first stage reads ids"
            hidden = self.embedding(ids, self.build.places(ids.shape[1])[None] if positions is None else positions)
        assert hidden is not None, "a later stage reads the message of the stage before"
        context = ForwardContext(
            self.build.causal_mask(hidden, documents),
            rotary_of(self.build, hidden, positions),
            microbatch_context=microbatch_context,
            cache=cache,
        )
        x = self.decoder(hidden, context)
        ahead = None if ahead is None or self.depths == 0 else self._look(x, positions, ahead, context)
        if self.output_layer is None:
            return x if self.mtp is None else self._message(x, ahead)
        x = (x if cache is None else cache.for_logits(x)).to(self.build.dtype)
        output = self.output_layer(x, self.output_weight(), labels)
        if labels is None or ahead is None:
            return output
        weight = self.output_weight().detach() if self.build.model.mtp.mtp_detach_heads else self.output_weight()
        return Losses(
            output,
            tuple(
                self.output_layer(state.to(self.build.dtype), weight, own)
                for state, own in zip(ahead.states, ahead.labels, strict=True)
            ),
        )

    def _look(self, x: Tensor, positions: Tensor | None, ahead: MTPInputs, context: ForwardContext) -> MTPInputs:
        """`ahead` with the states of all depths, made here if here are their layers. x: [s or s/tp, b, h], normed."""
        if self.mtp is None:
            return ahead
        assert self.embedding is not None, "who looks ahead embeds"
        places = self.build.places(ahead.ids[0].shape[1])[None] if positions is None else positions
        return replace(ahead, states=self.mtp(x, ahead.ids, places, self.embedding, context))

    def look(self, depth: int, states: Tensor, ids: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """One depth of multi-token prediction, counted from 1, for texts that are decoded, on the stage that has all of it.

        states: of the depth before, or after the final norm, [t, 1, h]. ids: [1, t], `depth` places ahead of the tokens, whose
        positions [1, t] are. Returns the states of this depth, and the logits [w, 1, v/tp] that the cache wants.
        """
        assert self.mtp is not None and self.embedding is not None and self.output_layer is not None, (
            "this stage predicts ahead"
        )
        context = ForwardContext(self.build.causal_mask(states), rotary_of(self.build, states, positions), cache=cache)
        states = self.mtp.look(depth, states, ids, positions, self.embedding, context)
        return states, self.output_layer(cache.for_logits(states).to(self.build.dtype), self.output_weight())

    def _message(self, x: Tensor, ahead: MTPInputs | None) -> tuple[Tensor, ...]:
        """The states of all depths to the stage of the head; it has room for them even when nobody looks ahead."""
        states = (torch.zeros_like(x),) * self.depths if ahead is None else ahead.states
        return tuple(state.to(self.build.residual_dtype) for state in (x, *states))

    def output_weight(self) -> Tensor:
        """The matrix of the output layer: its own, or the embedding's."""
        return output_matrix(self.output_layer, self.embedding)
