"""The critic of PPO: a network of the policy's shape whose head gives one number for each token, what reward it expects from there on.

    ids -> policy's layers -> log-probabilities          Each pipeline stage of the policy carries the critic's stage of the same layers;
       `-> critic's layers -> value head -> values       their messages travel together, and one optimizer and checkpoint hold both.

The critic's parameters are called `critic.<name>`. In a checkpoint without a critic they start as the policy's own, and the value
head as zeros.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import TrainConfig
from megatron.core.dist_checkpointing.state_hooks import OptionalWeights
from megatron.core.models.embedding import Embedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.output_heads import ScalarHead
from megatron.core.models.vision_language import VisionLanguageModel
from megatron.core.parallel.spec import constant_initializer, param_spec_of, set_global_param_names
from megatron.core.transformer.context.forward_context import ForwardContext, MicrobatchContext
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.core.transformer.context.rope import rotary_table_for
from megatron.core.transformer.stack import TransformerStack


class CriticStage(nn.Module):
    """One pipeline stage of the critic."""

    def __init__(self, stage: StageSpec, build: LayerBuildContext) -> None:
        super().__init__()
        self.build = build
        self.embedding = Embedding(build, tied=False) if stage.has_embedding else None
        self.decoder = TransformerStack(stage.layers, build, final_norm=stage.has_output)
        self.value_head = ScalarHead(build, init=constant_initializer(0.0), bias=True) if stage.has_output else None

    def forward(
        self,
        *,
        ids: Tensor | None = None,
        hidden: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        microbatch_context: MicrobatchContext | None = None,
    ) -> Tensor:
        """Run this stage; the arguments are those of `GPTModel`. Returns the input of the next stage; on the last, values [b, s]."""
        if self.embedding is not None:
            assert ids is not None, "the first stage reads ids"
            hidden = self.embedding(
                ids, self.build.local_positions(ids.shape[1])[None] if positions is None else positions
            )
        assert hidden is not None, "a later stage receives the output of the previous stage"
        context = ForwardContext(
            self.build.causal_mask(hidden, documents),
            rotary_table_for(self.build, hidden, positions),
            microbatch_context=microbatch_context,
        )
        x = self.decoder(hidden, context)
        if self.value_head is None:
            return x
        return self.value_head(x)


class ActorCritic(GPTModel):
    """One pipeline stage of the policy, with that of its critic. lr_ratio: the critic's learning rate over the policy's.

    `forward` is the policy's alone, so that generation does not run the critic. A run without a critic leaves its weights in the
    checkpoint.
    """

    state_hooks = (OptionalWeights("model.critic."),)

    def __init__(self, stage: StageSpec, build: LayerBuildContext, *, lr_ratio: float = 1.0) -> None:
        super().__init__(stage, build)
        self.critic = CriticStage(stage, build)
        for name, param in self.critic.named_parameters():
            same = "" if name.startswith("value_head.") else name
            param.spec = dataclasses.replace(  # type: ignore[attr-defined]
                param_spec_of(param), name="", starts_from=same, lr_ratio=lr_ratio
            )
        set_global_param_names(self)

    def received_tensor_specs(self, train: TrainConfig) -> tuple[tuple[tuple[int, ...], object], ...]:  # type: ignore[override]
        """Shape and dtype of each tensor that a stage receives: the policy's hidden states, and the critic's."""
        return (
            *super().received_tensor_specs(train),
            self.hidden_states_spec(train.micro_batch_size, train.seq_length),
        )


class VisionActorCritic(ActorCritic, VisionLanguageModel):
    """One pipeline stage of a policy that reads images, with that of its critic."""
