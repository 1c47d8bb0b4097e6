"""An encoder with a classification head: the class of a text, or which of several texts fits.

    ids, types -> embedding -> layers -> final norm -> pooler (first token) -> dropout -> scores of the classes

The same stages and names as `BERTModel`, with one small head instead of its two; a pretrained BERT's weights load into
everything but the head. With `choices`, each sample has that many consecutive texts, and each text one score.
"""

from __future__ import annotations

from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.models.bert import EncoderModel
from megatron.core.models.output_heads import Pooler
from megatron.core.parallel.spec import set_global_param_names
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.dropout import Dropout


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
