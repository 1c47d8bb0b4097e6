"""Decoders that score texts, and which class the stages of a decoder have: with images or without, with scores or words."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron.core.config.plan.layers import StageSpec
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import MTPInputs
from megatron.core.models.output_heads import ScalarHead
from megatron.core.models.vision_language import VisionLanguageModel
from megatron.core.parallel.spec import param_spec_of
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


class GPTRewardModel(GPTModel):
    """One pipeline stage of a decoder with a head of one row. On the last stage, `forward` returns scores [b, s]."""

    predicts_words = False

    def _add_head(self) -> None:
        self.score = ScalarHead(self.build, init=self.build.init_method(), bias=False)
        # It may start from a language model, whose checkpoint lacks the head.
        self.score.weight.spec = replace(param_spec_of(self.score.weight), starts_from="")  # type: ignore[attr-defined]

    def _apply_head(self, x: Tensor, labels: Tensor | None, ahead: MTPInputs | None) -> Tensor:
        return self.score(x)


class VisionRewardModel(VisionLanguageModel, GPTRewardModel):
    """One pipeline stage of a decoder that scores texts with images."""


def build_decoder(stage: StageSpec, build: LayerBuildContext) -> GPTModel:
    """Build one pipeline stage of the decoder that the settings describe."""
    if build.model.has_vision:
        return (VisionRewardModel if build.model.reward_head else VisionLanguageModel)(stage, build)
    return (GPTRewardModel if build.model.reward_head else GPTModel)(stage, build)
