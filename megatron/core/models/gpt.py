"""Decoder-only transformers.

    ids -> embedding -> layers of stage 0 -> hidden states -> layers of stage 1 -> ... -> final norm -> head -> loss
                                                                                         \\-> mtp.py -> head -> losses ahead

A `GPTModel` is one pipeline stage; without pipeline parallelism it is the whole network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.models.embedding import Embedding
from megatron.core.models.mtp import MTPInputs, MTPLosses, MultiTokenPrediction
from megatron.core.models.output_heads import LanguageModelHead, output_layer_weight
from megatron.core.models.stage_model import StageModel
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.context.cache import DecodingCache
from megatron.core.transformer.context.forward_context import ForwardContext, MicrobatchContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import rotary_table_for
from megatron.core.transformer.stack import TransformerStack


class GPTModel(StageModel):
    """One pipeline stage of a decoder-only transformer."""

    predicts_words: ClassVar[bool] = True  # with an output layer, which may share the matrix of the embedding

    def __init__(self, stage: StageSpec, build: LayerBuildContext) -> None:
        super().__init__()
        self.stage, self.build = stage, build
        self.depths = build.model.mtp.mtp_num_layers or 0
        has_mtp = stage.has_mtp and self.depths > 0
        self.embedding: Embedding | None = None
        self.output_layer: LanguageModelHead | None = None
        # Gradients are reduced in the order of modules, which is that of the forward pass.
        self._add_embedding(has_mtp=has_mtp)
        self.decoder = TransformerStack(stage.layers, build, final_norm=stage.has_mtp)
        self.mtp = MultiTokenPrediction(build) if has_mtp else None
        if stage.has_output:
            self._add_head()
        set_global_param_names(self)

    def _add_embedding(self, *, has_mtp: bool) -> None:
        """Create the embedding, if this stage embeds tokens."""
        if not (self.stage.has_embedding or has_mtp):
            return
        # With several stages a tied matrix has two copies, in the embedding and in the output layer; the embedding has another
        # copy on the stage with multi-token prediction.
        spans_stages = not (self.stage.has_embedding and self.stage.has_output)
        self.embedding = Embedding(
            self.build,
            tied=self.predicts_words and self.build.model.ties_embeddings and spans_stages,
            has_mtp_copy=self.depths > 0 and not (self.stage.has_embedding and has_mtp),
        )

    def _add_head(self) -> None:
        """Create the output layer of the last stage."""
        self.output_layer = LanguageModelHead(self.build, self.embedding)

    def hidden_states_spec(self, batch_size: int, sequence: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return (shape, dtype) of the hidden states between stages. sequence: length of the whole sequence."""
        length = self.build.tp_region.local_sequence_length(sequence // self.build.mesh.cp.size)
        return (length, batch_size, self.build.model.hidden_size), self.build.residual_dtype

    def received_tensor_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return (shape, dtype) of each tensor that a pipeline stage receives from the previous one."""
        return (self.hidden_states_spec(train.micro_batch_size, train.seq_length),) * self.num_received_tensors

    @property
    def num_received_tensors(self) -> int:
        """Number of received tensors: 1, on an output stage behind the MTP stage also one for each depth."""
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
        cache: DecodingCache | None = None,
        ahead: MTPInputs | None = None,
    ) -> Tensor | tuple[Tensor, ...] | MTPLosses:
        """Run this stage.

        ids: [b, s], used by the first stage. hidden: the output of the previous stage, [s or s/tp, b, h]. labels: [b,
        s]. positions: [b, s], if they are not 0, 1, 2, ...; documents: document index [b, s], if attention is to stay
        within documents. microbatch_context: collects the auxiliary losses of layers. cache: KV cache; ids are then the
        new tokens of several sequences, concatenated as [1, t], and logits are those of the positions that the cache
        asks for. ahead: ids and labels for multi-token prediction; None: predict only the next token. Returns the input
        of the next stage; on the last stage, the loss of every token [b, s], with those of multi-token prediction if
        any, or logits [s, b, v/tp] without labels.
        """
        if self.stage.has_embedding:
            assert ids is not None, "the first stage reads ids"
            hidden = self._embed(ids, positions)
        assert hidden is not None, "a later stage receives the output of the previous stage"
        context = ForwardContext(
            self.build.causal_mask(hidden, documents),
            rotary_table_for(self.build, hidden, positions),
            microbatch_context=microbatch_context,
            cache=cache,
        )
        x = self.decoder(hidden, context)
        ahead = None if ahead is None or self.depths == 0 else self._compute_mtp_states(x, positions, ahead, context)
        if not self.stage.has_output:
            return x if self.mtp is None else self._with_mtp_states(x, ahead)
        return self._apply_head(x if cache is None else cache.select_logit_states(x), labels, ahead)

    def _embed(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Return the hidden states [s or s/tp, b, h] of ids [b, s]."""
        assert self.embedding is not None, "the first stage has the embedding"
        return self.embedding(ids, self.build.local_positions(ids.shape[1])[None] if positions is None else positions)

    def _apply_head(self, x: Tensor, labels: Tensor | None, ahead: MTPInputs | None) -> Tensor | MTPLosses:
        """Return what the last stage returns, of its final states x [s or s/tp, b, h]. See `forward`."""
        assert self.output_layer is not None, "the last stage has the output layer"
        output = self.output_layer(x.to(self.build.dtype), self.output_weight(), labels)
        if labels is None or ahead is None:
            return output
        weight = self.output_weight().detach() if self.build.model.mtp.mtp_detach_heads else self.output_weight()
        losses = [
            self.output_layer(state.to(self.build.dtype), weight, own)
            for state, own in zip(ahead.states, ahead.labels, strict=True)
        ]
        return MTPLosses(output, tuple(losses))

    def _compute_mtp_states(
        self, x: Tensor, positions: Tensor | None, ahead: MTPInputs, context: ForwardContext
    ) -> MTPInputs:
        """Return `ahead` with the states of all depths of x [s or s/tp, b, h], if this stage has MTP layers."""
        if self.mtp is None:
            return ahead
        assert self.embedding is not None, "a stage with multi-token prediction has an embedding"
        places = self.build.local_positions(ahead.ids[0].shape[1])[None] if positions is None else positions
        return replace(ahead, states=self.mtp(x, ahead.ids, places, self.embedding, context))

    def decode_mtp_depth(
        self, depth: int, states: Tensor, ids: Tensor, positions: Tensor, cache: DecodingCache
    ) -> tuple[Tensor, Tensor]:
        """Run one depth (from 1) of multi-token prediction during decoding, on a stage that has all its parts.

        states: of the previous depth, or after the final norm, [t, 1, h]. ids: [1, t], the tokens `depth` positions
        ahead; positions: of the tokens themselves, [1, t]. Returns the states of this depth, and the logits [w, 1,
        v/tp] that the cache asks for.
        """
        assert self.mtp is not None and self.embedding is not None and self.output_layer is not None, (
            "this stage has multi-token prediction"
        )
        context = ForwardContext(
            self.build.causal_mask(states), rotary_table_for(self.build, states, positions), cache=cache
        )
        states = self.mtp.run_depth(depth, states, ids, positions, self.embedding, context)
        return states, self.output_layer(cache.select_logit_states(states).to(self.build.dtype), self.output_weight())

    def _with_mtp_states(self, x: Tensor, ahead: MTPInputs | None) -> tuple[Tensor, ...]:
        """Return what the output stage gets: x and the states of all depths, zeros if no tokens ahead are predicted."""
        states = (torch.zeros_like(x),) * self.depths if ahead is None else ahead.states
        return tuple(state.to(self.build.residual_dtype) for state in (x, *states))

    def output_weight(self) -> Tensor:
        """Return the matrix of the output layer [v/tp, h]: its own, or the embedding's."""
        return output_layer_weight(self.output_layer, self.embedding)
