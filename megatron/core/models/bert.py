"""BERT: bidirectional encoders trained to predict masked words (Devlin et al., 2018).

    ids, types -> embedding -> layers, bidirectional attention -> ... -> final norm -> masked-word head -> loss
                                                                                      \\-> first token -> pooler -> pair head

A `BERTModel` is one pipeline stage. Norms precede each sublayer, as in Megatron; with --norm-after-residual and
--embedding-layernorm it is the published BERT, which has no final norm.

    ids, types -> embedding -> layers -> final norm -> pooler (first token) -> dropout -> scores of the classes

A `ClassifierModel` gives the class of a text, or says which of several texts fits. It has the same stages and names, with one small head
instead of the two; a pretrained BERT's weights load into everything but the head. With `choices`, each sample has that many consecutive
texts, and each text one score.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from megatron.core.models.embedding import Embedding
from megatron.core.models.output_heads import LanguageModelHead, MaskedLMHeadTransform, Pooler, output_layer_weight
from megatron.core.models.stage_model import StageModel
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.tensor_parallel.linear import ReplicatedLinear
from megatron.core.transformer.context.forward_context import ForwardContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import rotary_table_for
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.mixers.attention import default_position_ids
from megatron.core.transformer.stack import TransformerStack

TOKEN_TYPES = 2


class BERTOutput(NamedTuple):
    """Output of the last stage.

    words: the loss of every token [b, s], or logits [s, b, v/tp] without labels. pairs: sentence-pair logits [b, 2], or
    None.
    """

    words: Tensor
    pairs: Tensor | None


class EncoderModel(StageModel):
    """One stage of a bidirectional encoder without heads. choices: texts of a sample, encoded one by one."""

    def __init__(self, stage: StageSpec, build: LayerBuildContext, *, tied: bool = False, choices: int = 1) -> None:
        super().__init__()
        self.stage, self.build, self.choices = stage, build, choices
        self.embedding = Embedding(build, tied=tied, token_types=TOKEN_TYPES) if stage.has_embedding else None
        has_final_norm = stage.has_output and not build.model.norm_after_residual
        self.encoder = TransformerStack(stage.layers, build, final_norm=has_final_norm)

    def received_tensor_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return (shape, dtype) of each tensor that a pipeline stage receives from the previous one."""
        length = self.build.tp_region.local_sequence_length(train.seq_length)
        shape = (length, train.micro_batch_size * self.choices, self.build.model.hidden_size)
        return ((shape, self.build.residual_dtype),)

    def encode(
        self,
        *,
        padding: Tensor | None,
        ids: Tensor | None = None,
        types: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run the embedding (first stage) and layers; return [s or s/tp, b, h]. Arguments: see `BERTModel.forward`."""
        if self.embedding is not None:
            assert ids is not None, "the first stage reads ids"
            hidden = self.embedding(ids, default_position_ids(ids), torch.zeros_like(ids) if types is None else types)
        assert hidden is not None, "a later stage receives the output of the previous stage"
        mask = AttentionMaskSpec(causal=False, padding=padding)
        return self.encoder(hidden, ForwardContext(mask, rotary_table_for(self.build, hidden)))


class BERTModel(EncoderModel):
    """One pipeline stage of BERT, with the masked-word head and the sentence-pair head on the last stage."""

    def __init__(self, stage: StageSpec, build: LayerBuildContext) -> None:
        model = build.model
        spans_stages = not (stage.has_embedding and stage.has_output)
        super().__init__(stage, build, tied=model.ties_embeddings and spans_stages)
        self.lm_head: MaskedLMHeadTransform | None = None
        self.output_layer: LanguageModelHead | None = None
        self.pooler: Pooler | None = None
        self.binary_head: ReplicatedLinear | None = None
        if stage.has_output:
            self.lm_head = MaskedLMHeadTransform(build)
            self.output_layer = LanguageModelHead(build, self.embedding, bias=True)
            if model.bert_binary_head:
                self.pooler = Pooler(build)
                self.binary_head = build.make_replicated_linear(model.hidden_size, 2)
        set_global_param_names(self)

    def forward(
        self,
        *,
        padding: Tensor | None,
        ids: Tensor | None = None,
        types: Tensor | None = None,
        hidden: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor | BERTOutput:
        """Run this stage.

        padding: bool [b, s], False where there is no token; None: all are tokens. ids, types: [b, s], used by the first
        stage. hidden: the output of the previous stage, [s or s/tp, b, h]. labels: [b, s]. Returns the input of the
        next stage, [s or s/tp, b, h]; the last stage returns the outputs of the heads.
        """
        x = self.encode(padding=padding, ids=ids, types=types, hidden=hidden)
        if self.output_layer is None or self.lm_head is None:
            return x
        pairs = self.binary_head(self.pooler(x)) if self.binary_head is not None and self.pooler is not None else None
        return BERTOutput(self.output_layer(self.lm_head(x), self.output_weight(), labels), pairs)

    def output_weight(self) -> Tensor:
        """Return the matrix of the output layer [v/tp, h]: its own, or the embedding's."""
        return output_layer_weight(self.output_layer, self.embedding)


class ClassifierModel(EncoderModel):
    """One pipeline stage of a BERT-like classifier.

    classes: number of scores of a text. choices: number of texts of a sample, of which one score each is compared
    (multiple choice, with classes 1).
    """

    def __init__(self, stage: StageSpec, build: LayerBuildContext, *, classes: int, choices: int = 1) -> None:
        super().__init__(stage, build, choices=choices)
        self.pooler = Pooler(build) if stage.has_output else None
        self.dropout = Dropout(build.model.hidden_dropout, build.streams, "default") if stage.has_output else None
        head = build.make_replicated_linear(build.model.hidden_size, classes) if stage.has_output else None
        self.classification_head = head if choices == 1 else None
        self.multichoice_head = head if choices > 1 else None
        set_global_param_names(self)

    def forward(
        self, *, padding: Tensor, ids: Tensor | None = None, types: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Run this stage on b samples of c texts.

        padding: bool [b * c, s], False where there is no token. ids, types: [b * c, s], used by the first stage.
        hidden: the output of the previous stage, [s or s/tp, b * c, h]. Returns the input of the next stage; on the
        last, scores: [b, classes], or [b, c].
        """
        x = self.encode(padding=padding, ids=ids, types=types, hidden=hidden)
        if self.pooler is None or self.dropout is None:
            return x
        pooled = self.dropout(self.pooler(x))
        if self.classification_head is not None:
            return self.classification_head(pooled)
        assert self.multichoice_head is not None, "the last stage has one of the two heads"
        return self.multichoice_head(pooled).view(-1, self.choices)
