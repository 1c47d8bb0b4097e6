"""T5: encoder and decoder in one sequence of pipeline stages (Raffel et al., 2019).

    encoder ids, decoder ids -> embedding -> encoder layers -> final norm -> decoder layers -> final norm -> head -> loss
                                   \\-- the decoder's embedding is passed along --/     memory: input of cross attention

A `T5Model` is one pipeline stage, and may hold layers of both. Each stage passes on all shared tensors: the decoder's state (before
its first layer, its embedding), the encoder's state (after its last layer, the memory), and with relative positions the two bias
tables. So only the first stage embeds, and gradients of shared tensors return the same way; the only matrix with two copies is the
tied output layer, as in a decoder-only model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.models.embedding import Embedding
from megatron.core.models.memory_layer import make_memory_layer
from megatron.core.models.output_heads import LanguageModelHead, output_layer_weight
from megatron.core.models.stage_model import StageModel
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.context.cache import DecodingCache
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import rotary_table_for
from megatron.core.transformer.mixers.attention import default_position_ids
from megatron.core.transformer.relative import RelativePositionEmbedding, relative_score_bias
from megatron.core.transformer.stack import TransformerStack

Message = tuple[Tensor, ...]
_WHOLE = "a stage that encodes and decodes is the whole network"


class T5Model(StageModel):
    """One pipeline stage of an encoder-decoder transformer."""

    def __init__(self, stage: StageSpec, build: LayerBuildContext) -> None:
        super().__init__()
        self.stage, self.build, model = stage, build, build.model
        encoder, decoder = (
            [plan for plan in stage.layers if plan.has_cross_attention == cross] for cross in (False, True)
        )
        tied_apart = model.ties_embeddings and not (stage.has_embedding and stage.has_output)
        relative = stage.has_embedding and model.rope.position_embedding_type == "relative"
        self.embedding = Embedding(build, tied=tied_apart) if stage.has_embedding else None
        self.encoder_relative_pos_emb = RelativePositionEmbedding(build) if relative else None
        self.decoder_relative_pos_emb = RelativePositionEmbedding(build) if relative else None
        ends_encoder = bool(encoder) and encoder[-1].index == model.encoder_num_layers - 1
        self.encoder = TransformerStack(encoder, build, final_norm=ends_encoder) if encoder else None
        self.decoder = (
            TransformerStack(decoder, build, final_norm=stage.has_output, make_layer=make_memory_layer)
            if decoder or stage.has_output
            else None
        )
        self.output_layer = (
            LanguageModelHead(build, self.embedding, bias=model.add_bias_linear) if stage.has_output else None
        )
        set_global_param_names(self)

    def received_tensor_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return (shape, dtype) of each tensor that a pipeline stage receives from the previous one."""
        build, rope = self.build, self.build.model.rope
        states = tuple(
            (
                (build.tp_region.local_sequence_length(length), train.micro_batch_size, build.model.hidden_size),
                build.residual_dtype,
            )
            for length in (train.decoder_seq_length, train.seq_length)
        )
        if rope.position_embedding_type != "relative":
            return states
        heads = build.model.num_attention_heads // build.mesh.tp.size
        return (*states, ((2, rope.relative_attention_num_buckets, heads), build.dtype))

    def forward(
        self,
        *,
        encoder_padding: Tensor | None,
        encoder_ids: Tensor | None = None,
        decoder_ids: Tensor | None = None,
        message: Message | None = None,
        labels: Tensor | None = None,
    ) -> Message | Tensor:
        """Run this stage.

        encoder_padding: bool [b, s], False where there is no token; None: all are tokens. encoder_ids: [b, s] and
        decoder_ids: [b, t], used by the first stage. message: the output of the previous stage. labels: [b, t]. Returns
        the input of the next stage; on the last, the loss of every token [b, t], or logits [t, b, v/tp] without labels.
        """
        if self.embedding is not None:
            assert encoder_ids is not None and decoder_ids is not None, "the first stage reads ids"
            message = self._embed_inputs(encoder_ids, decoder_ids)
        assert message is not None, "a later stage receives the output of the previous stage"
        state, memory, *tables = message
        if self.encoder is not None:
            memory = self._run_encoder(memory, tables, encoder_padding)
        if self.decoder is not None:
            context = self._decoder_context(state, memory, encoder_padding)
            bias = self._relative_score_bias(tables, state, causal=True)
            state = self.decoder(state, context, bias=bias)
        if self.output_layer is None:
            return (state, memory, *tables)
        return self.output_layer(state, self.output_weight(), labels)

    def encode(self, ids: Tensor, padding: Tensor | None) -> Message:
        """Return the encoder's output [s, b, h] and the bias tables for `decode_next_logits`. ids, padding: [b, s]."""
        _, memory, *tables = self._embed_inputs(ids, ids[:, :1])
        return (self._run_encoder(memory, tables, padding), *tables)

    def decode_next_logits(
        self, ids: Tensor, place: int, message: Message, *, padding: Tensor | None, cache: DecodingCache
    ) -> Tensor:
        """Return the logits of the next token of every text, [1, b, v/tp]; the stage must be the whole network.

        ids: [b, 1], the tokens at position `place`, whose predecessors are in the cache. message: from `encode`;
        padding: as given to it.
        """
        memory, *tables = message
        assert self.embedding is not None and self.decoder is not None and self.output_layer is not None, _WHOLE
        positions = torch.full_like(ids, place)
        state = self.embedding(ids, positions)
        context = replace(self._decoder_context(state, memory, padding, positions), cache=cache)
        bias = None
        if tables:
            bias = relative_score_bias(tables[0][1], place + 1, self.build.model.rope, causal=True)[:, :, -1:]
        return self.output_layer(self.decoder(state, context, bias=bias), self.output_weight())

    def output_weight(self) -> Tensor:
        """Return the matrix of the output layer [v/tp, h]: its own, or the embedding's."""
        return output_layer_weight(self.output_layer, self.embedding)

    def _decoder_context(
        self, state: Tensor, memory: Tensor, padding: Tensor | None, positions: Tensor | None = None
    ) -> ForwardContext:
        table, memory_mask = (
            rotary_table_for(self.build, state, positions),
            AttentionMaskSpec(causal=False, padding=padding),
        )
        return ForwardContext(AttentionMaskSpec(), table, memory, memory_mask)

    def _embed_inputs(self, encoder_ids: Tensor, decoder_ids: Tensor) -> Message:
        """Return the first message: decoder and encoder embeddings [s or s/tp, b, h], and any stacked bias tables."""
        assert self.embedding is not None, "the first stage reads ids"
        memory = self.embedding(encoder_ids, default_position_ids(encoder_ids))
        state = self.embedding(decoder_ids, default_position_ids(decoder_ids))
        encoder, decoder = self.encoder_relative_pos_emb, self.decoder_relative_pos_emb
        if encoder is None or decoder is None:
            return state, memory
        tables = (encoder.relative_attention_bias.weight, decoder.relative_attention_bias.weight)
        return state, memory, torch.stack(tables)

    def _run_encoder(self, memory: Tensor, tables: list[Tensor], padding: Tensor | None) -> Tensor:
        """Run the stage's encoder layers. memory, result: [s or s/tp, b, h]; tables: empty or [stacked bias tables]."""
        assert self.encoder is not None, _WHOLE
        return self.encoder(
            memory,
            ForwardContext(AttentionMaskSpec(causal=False, padding=padding), rotary_table_for(self.build, memory)),
            bias=self._relative_score_bias(tables, memory, causal=False),
        ).to(self.build.residual_dtype)

    def _relative_score_bias(self, tables: list[Tensor], x: Tensor, *, causal: bool) -> Tensor | None:
        """Return the relative bias of the scores, [1, n/tp, s, s]; None without tables. x: [s or s/tp, b, h]."""
        if not tables:
            return None
        return relative_score_bias(
            tables[0][int(causal)],
            self.build.tp_region.whole_sequence_length(x.shape[0]),
            self.build.model.rope,
            causal=causal,
        )
