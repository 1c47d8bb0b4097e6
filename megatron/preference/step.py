"""One forward pass over pairs of answers: their loss, or the log-probabilities of their tokens by a reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.preference.losses import PAIR_LOSSES, AnswerScores
from megatron.preference.settings import PreferenceConfig
from megatron.training.data.batch import Batch, Loss, LossFunction
from megatron.training.run import Run


class PreferenceStep:
    """The forward step of preference optimization. collected: while a reference is asked, its log-probabilities so far, [b, s] each."""

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.collected: list[Tensor] | None = None

    def __call__(self, run: Run, batches: Iterator[Batch], stage: GPTModel) -> tuple[Any, LossFunction]:
        """One microbatch through one stage."""
        batch = next(batches)
        if stage.output_layer is not None:
            stage.output_layer.even = False
        output = stage(
            ids=batch.tokens,
            hidden=batch.hidden,
            labels=batch.targets,
            positions=batch.positions,
            documents=batch.documents,
            microbatch_context=batch.microbatch_context,
        )

        def loss(token_losses: Tensor) -> Loss:
            if self.collected is None:
                return pair_loss(self.config, token_losses, batch, run.mesh.cp)
            self.collected.append(-token_losses.detach())
            zero = torch.zeros((), device=token_losses.device)
            return zero, zero, {}

        return output, loss


def pair_loss(config: PreferenceConfig, token_losses: Tensor, batch: Batch, context: Axis) -> Loss:
    """Return (sum over pairs, number of pairs, figures to log). token_losses: [b, s], minus the log-probabilities of the labels.

    Context ranks have parts of the same answers: each counts its share of every pair.
    """
    assert batch.loss_mask is not None, "the stage of the loss has the mask"
    mask, answers = batch.loss_mask.to(token_losses.dtype), batch.extras["preference"]
    reference = batch.extras["reference"].to(token_losses.dtype) if config.has_reference else torch.zeros_like(mask)
    width = int(answers.max()) + 1
    if context.group is not None:
        width = int(collectives.all_reduce(torch.tensor(width, device=mask.device), context, "max"))
    width += width % 2

    def sums(values: Tensor) -> Tensor:
        """[b, answers]: over the tokens of each, on all context ranks."""
        local = values.new_zeros(len(values), width).scatter_add(1, answers, values * mask)
        return collectives.identity_then_reduce(collectives.reduce_then_identity(local, context), context)

    scores = [sums(values) for values in (-token_losses, reference, torch.ones_like(mask))]
    exists = scores[2][:, ::2] > 0
    chosen, rejected = (AnswerScores(*(one[:, which::2][exists] for one in scores)) for which in (0, 1))
    losses = PAIR_LOSSES[config.preference_loss](chosen, rejected, config.options)
    if config.preference_sft_weight:
        losses = losses - config.preference_sft_weight * chosen.mean
    share = 1.0 / context.size
    count = losses.new_full((), len(losses) * share)
    total = losses.sum() * share

    def mean(values: Tensor) -> Tensor:
        return torch.stack((values.detach().sum().to(losses.dtype) * share, count))

    rewards = [config.preference_beta * one.ratio for one in (chosen, rejected)]
    margin = rewards[0] - rewards[1]
    return (
        total,
        count,
        {
            "preference loss": mean(losses),
            "preference accuracy": mean((margin > 0).to(losses.dtype)),
            "reward margin": mean(margin),
            "chosen reward": mean(rewards[0]),
            "rejected reward": mean(rewards[1]),
            "chosen logprob": mean(chosen.mean),
        },
    )
