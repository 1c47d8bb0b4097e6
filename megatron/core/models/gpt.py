"""Decoder-only transformers.

    ids -> embedding -> layers of stage 0 -> hidden states -> layers of stage 1 -> ... -> final norm -> head -> loss
                                                                                         \\-> mtp.py -> head -> losses ahead

A `GPTModel` is one pipeline stage; without pipeline parallelism it is the whole network.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.models.embedding import Embedding
from megatron.core.models.mtp import MTPInputs, MTPLosses, MultiTokenPrediction
from megatron.core.models.output_heads import LanguageModelHead, ScalarHead, output_layer_weight
from megatron.core.models.stage_model import StageModel
from megatron.core.models.vision import IdsWithImages, ImageEmbedder
from megatron.core.parallel.spec import param_spec_of, set_global_param_names
from megatron.core.transformer.context.cache import DecodingCache
from megatron.core.transformer.context.forward_context import ForwardContext, MicrobatchContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import rotary_table_for
from megatron.core.transformer.stack import TransformerStack


class GPTModel(StageModel):
    """One pipeline stage of a decoder-only transformer."""

    def __init__(self, stage: StageSpec, build: LayerBuildContext) -> None:
        super().__init__()
        self.stage, self.build = stage, build
        # With several stages a tied matrix has two copies, in the embedding and in the output layer; the embedding has another
        # copy on the stage with multi-token prediction.
        spans_stages = not (stage.has_embedding and stage.has_output)
        tied = build.model.ties_embeddings and not build.model.reward_head
        self.depths = build.model.mtp.mtp_num_layers or 0
        has_mtp = stage.has_mtp and self.depths > 0
        has_mtp_copy = self.depths > 0 and not (stage.has_embedding and stage.has_mtp)
        self.embedding = None
        if stage.has_embedding or has_mtp:
            self.embedding = Embedding(build, tied=tied and spans_stages, has_mtp_copy=has_mtp_copy)
        self.image_input = ImageEmbedder(build) if stage.has_embedding and build.model.has_vision else None
        self.decoder = TransformerStack(stage.layers, build, final_norm=stage.has_mtp)
        self.mtp = MultiTokenPrediction(build) if has_mtp else None
        self.score = _make_reward_head(build) if stage.has_output and build.model.reward_head else None
        has_logits = stage.has_output and self.score is None
        self.output_layer = LanguageModelHead(build, self.embedding) if has_logits else None
        set_global_param_names(self)

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
        ids: Tensor | IdsWithImages | None = None,
        hidden: Tensor | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        microbatch_context: MicrobatchContext | None = None,
        cache: DecodingCache | None = None,
        ahead: MTPInputs | None = None,
    ) -> Tensor | tuple[Tensor, ...] | MTPLosses:
        """Run this stage.

        ids: [b, s], with images or without, used by the first stage. hidden: the output of the previous stage, [s or s/tp, b, h]. labels: [b,
        s]. positions: [b, s], if they are not 0, 1, 2, ...; documents: document index [b, s], if attention is to stay
        within documents. microbatch_context: collects the auxiliary losses of layers. cache: KV cache; ids are then the
        new tokens of several sequences, concatenated as [1, t], and logits are those of the positions that the cache
        asks for. ahead: ids and labels for multi-token prediction; None: predict only the next token. Returns the input
        of the next stage; on the last stage, the loss of every token [b, s], with those of multi-token prediction if
        any, or logits [s, b, v/tp] without labels; of a reward model, the score of every position [b, s].
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
        if self.score is not None:
            return self.score(x)
        if self.output_layer is None:
            return x if self.mtp is None else self._with_mtp_states(x, ahead)
        x = (x if cache is None else cache.select_logit_states(x)).to(self.build.dtype)
        output = self.output_layer(x, self.output_weight(), labels)
        if labels is None or ahead is None:
            return output
        weight = self.output_weight().detach() if self.build.model.mtp.mtp_detach_heads else self.output_weight()
        return MTPLosses(
            output,
            tuple(
                self.output_layer(state.to(self.build.dtype), weight, own)
                for state, own in zip(ahead.states, ahead.labels, strict=True)
            ),
        )

    def _embed(self, ids: Tensor | IdsWithImages, positions: Tensor | None) -> Tensor:
        """Return the hidden states [s or s/tp, b, h] of ids [b, s], with image features at the positions of images."""
        assert self.embedding is not None, "the first stage has the embedding"
        text = ids.ids if isinstance(ids, IdsWithImages) else ids
        hidden = self.embedding(
            text, self.build.local_positions(text.shape[1])[None] if positions is None else positions
        )
        if not isinstance(ids, IdsWithImages):
            return hidden
        assert self.image_input is not None, "a network that is given images reads them"
        return self.image_input(hidden, ids.images, ids.slots)

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


def _make_reward_head(build: LayerBuildContext) -> ScalarHead:
    """Create a reward model's head; it may start from initial values, as a language model's checkpoint lacks it."""
    head = ScalarHead(build, init=build.init_method(), bias=False)
    head.weight.spec = replace(param_spec_of(head.weight), starts_from="")  # type: ignore[attr-defined]
    return head
