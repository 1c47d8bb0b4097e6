"""An encoder with a classification head: the class of a text, or which of several texts fits.

    ids, types -> embedding -> layers -> final norm -> pooler (first token) -> dropout -> scores of the classes

The same stages and names as `BERTModel`, with one small head instead of its two; a pretrained BERT's weights load into
everything but the head. With `choices`, each sample has that many consecutive texts, and each text one score.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.config.plan import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.kernels.mask import AttentionMaskSpec
from megatron.core.models.bert import TOKEN_TYPES
from megatron.core.models.embedding import Embedding
from megatron.core.models.output_heads import Pooler
from megatron.core.parallel.rng import materialize_parameters
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.attention import default_position_ids
from megatron.core.transformer.dropout import Dropout
from megatron.core.transformer.forward_context import ForwardContext
from megatron.core.transformer.layer_build_context import LayerBuildContext
from megatron.core.transformer.rope import rotary_table_for
from megatron.core.transformer.stack import TransformerStack


class ClassifierModel(nn.Module):
    """One pipeline stage of a BERT-like classifier.

    classes: number of scores of a text. choices: number of texts of a sample, of which one score each is compared
    (multiple choice, with classes 1).
    """

    def __init__(self, stage: StageSpec, build: LayerBuildContext, *, classes: int, choices: int = 1) -> None:
        super().__init__()
        self.stage, self.build, self.choices = stage, build, choices
        self.embedding = Embedding(build, tied=False, token_types=TOKEN_TYPES) if stage.has_embedding else None
        self.encoder = TransformerStack(
            stage.layers, build, final_norm=stage.has_output and not build.model.norm_after_residual
        )
        self.pooler = Pooler(build) if stage.has_output else None
        self.dropout = Dropout(build.model.hidden_dropout, build.streams, "default") if stage.has_output else None
        head = build.make_replicated_linear(build.model.hidden_size, classes) if stage.has_output else None
        self.classification_head = head if choices == 1 else None
        self.multichoice_head = head if choices > 1 else None
        set_global_param_names(self)

    def materialize(self, seed: int, *, draw_on: torch.device | None = None) -> ClassifierModel:
        """Allocate the parameters and draw their initial values from `seed`; return the model itself.

        draw_on: device on which random numbers are drawn; None: that of the mesh.
        """
        materialize_parameters(self, self.build.mesh, seed, draw_on=draw_on)
        return self

    def received_tensor_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return (shape, dtype) of each tensor that a pipeline stage receives from the previous one."""
        length, texts = (
            self.build.tp_region.local_sequence_length(train.seq_length),
            train.micro_batch_size * self.choices,
        )
        return (((length, texts, self.build.model.hidden_size), self.build.residual_dtype),)

    def forward(
        self, *, padding: Tensor, ids: Tensor | None = None, types: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Run this stage on b samples of c texts.

        padding: bool [b * c, s], False where there is no token. ids, types: [b * c, s], used by the first stage.
        hidden: the output of the previous stage, [s or s/tp, b * c, h]. Returns the input of the next stage; on the
        last, scores: [b, classes], or [b, c].
        """
        if self.embedding is not None:
            assert ids is not None and types is not None, "the first stage reads ids and types"
            hidden = self.embedding(ids, default_position_ids(ids), types)
        assert hidden is not None, "a later stage receives the output of the previous stage"
        x = self.encoder(
            hidden,
            ForwardContext(AttentionMaskSpec(causal=False, padding=padding), rotary_table_for(self.build, hidden)),
        )
        if self.pooler is None or self.dropout is None:
            return x
        pooled = self.dropout(self.pooler(x))
        if self.classification_head is not None:
            return self.classification_head(pooled)
        assert self.multichoice_head is not None, "the last stage has one of the two heads"
        return self.multichoice_head(pooled).view(-1, self.choices)
