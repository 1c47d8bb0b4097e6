"""One forward pass over answers: their loss, or the log-probabilities of their tokens by a network as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.preference.losses import PAIR_LOSSES, AnswerLogprobs, kto_loss, reward_loss, share_of_right_order
from megatron.preference.settings import PreferenceConfig
from megatron.training.state.batch import Batch, Loss, LossFunction
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.run import RunContext
from megatron.training.state.step import StepWork
from megatron.training.state.trainer import Trainer


class PreferenceStep:
    """The forward step of preference optimization. collected: list to which log-probabilities [b, s] are added instead
    of a loss; None in training.
    """

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.collected: list[Tensor] | None = None

    def __call__(self, run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[Any, LossFunction]:
        """One microbatch through one stage."""
        batch = next(batches)
        if stage.output_layer is not None:
            stage.output_layer.even = False
        labels = batch.labels
        output = stage(
            ids=batch.tokens,
            hidden=batch.hidden,
            labels=None if labels is None else labels.masked_fill(batch.extras["answer_mask"] == 0, -1),
            positions=batch.positions,
            documents=batch.documents,
            microbatch_context=batch.microbatch_context,
        )

        def loss(values: Tensor) -> Loss:
            if self.collected is None:
                return LOSSES[self.config.finetune_task](self.config, values, batch, run.mesh.cp)
            self.collected.append(-values.detach() * batch.extras["answer_mask"])
            zero = torch.zeros((), device=values.device)
            return zero, zero, {}

        return output, loss


class PackedAnswers:
    """The answers packed into a microbatch, for sums over the tokens of each, across context ranks.

    each: answers of a row, 2 of a pair. This rank has the n rows whose first answer ends on it, so that each row is
    counted once.
    """

    def __init__(self, batch: Batch, context: Axis, dtype: torch.dtype, *, each: int) -> None:
        assert batch.loss_mask is not None, "the stage of the loss has the mask"
        self._numbers, self._context, self._each = batch.extras["preference"], context, each
        self._mask, self._dtype, self._extras = batch.extras["answer_mask"].to(dtype), dtype, batch.extras
        width = int(self._numbers.max()) + 1
        if context.group is not None:
            width = int(collectives.all_reduce(torch.tensor(width, device=self._mask.device), context, "max"))
        self._width = -(-width // each) * each
        self._here = self._sum_local_tokens(batch.loss_mask.to(dtype))[:, ::each] > 0

    def sum_per_answer(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return the sum of values [b, s] over the labels of each answer: for each of a row's answers [n]."""
        local = self._sum_local_tokens(values * self._mask)
        whole = collectives.identity_with_reduce_backward(
            collectives.reduce_with_identity_backward(local, self._context), self._context
        )
        return tuple(whole[:, which :: self._each][self._here] for which in range(self._each))

    def sum_extra_per_answer(self, name: str) -> tuple[Tensor, ...]:
        """Return the sum over each answer of the batch's extra `name`, [n] for each of a row's answers."""
        return self.sum_per_answer(self._extras[name].to(self._dtype))

    def summed_logprobs_per_answer(self, token_losses: Tensor, *, reference: bool) -> tuple[AnswerLogprobs, ...]:
        """Return log-probabilities and token counts for each of a row's answers. token_losses: [b, s], minus the
        labels' log-probabilities. reference: add the reference's; else 0.
        """
        logprobs, tokens = self.sum_per_answer(-token_losses), self.sum_per_answer(torch.ones_like(self._mask))
        references = self.sum_extra_per_answer("reference") if reference else tuple(map(torch.zeros_like, logprobs))
        return tuple(map(AnswerLogprobs, logprobs, references, tokens))

    def sum_per_row_losses_and_figures(self, losses: Tensor, figures: dict[str, Tensor]) -> Loss:
        """Return (sum over rows, number of rows, figures to log). losses, figures: [n]."""
        count = self._here.sum().to(self._dtype)
        report = {name: torch.stack((values.detach().to(self._dtype).sum(), count)) for name, values in figures.items()}
        return losses.sum(), count, report

    def _sum_local_tokens(self, values: Tensor) -> Tensor:
        """Return the sum over each answer of this context rank's tokens, [b, answers]. values: [b, s]."""
        return values.new_zeros(len(values), self._width).scatter_add(1, self._numbers, values)


def pair_step_loss(config: PreferenceConfig, token_losses: Tensor, batch: Batch, context: Axis) -> Loss:
    """Return (sum of --preference-loss over pairs, number of pairs, figures to log).

    token_losses: [b, s], minus the log-probabilities of the labels.
    """
    answers = PackedAnswers(batch, context, token_losses.dtype, each=2)
    chosen, rejected = answers.summed_logprobs_per_answer(token_losses, reference=config.has_reference)
    losses = PAIR_LOSSES[config.preference_loss](chosen, rejected, config)
    if config.preference_sft_weight:
        losses = losses - config.preference_sft_weight * chosen.mean_logprob
    rewards = [one.reward(config) for one in (chosen, rejected)]
    margin, rounding = rewards[0] - rewards[1], sum(one.reward_rounding(config) for one in (chosen, rejected))
    figures = {
        "preference loss": losses,
        "preference accuracy": share_of_right_order(margin, rounding),
        "reward margin": margin,
        "chosen reward": rewards[0],
        "rejected reward": rewards[1],
        "chosen logprob": chosen.mean_logprob,
    }
    return answers.sum_per_row_losses_and_figures(losses, figures)


def kto_step_loss(config: PreferenceConfig, token_losses: Tensor, batch: Batch, context: Axis) -> Loss:
    """Return (sum over answers, number of answers, figures to log) of KTO. token_losses: [b, s], as of
    `pair_step_loss`.
    """
    answers = PackedAnswers(batch, context, token_losses.dtype, each=1)
    (scores,), (desirable,) = (
        answers.summed_logprobs_per_answer(token_losses, reference=True),
        answers.sum_extra_per_answer("desirable"),
    )
    losses = kto_loss(scores, desirable, batch.extras["divergence"].to(scores.logprob.dtype), config)
    reward = scores.reward(config)
    above = reward - config.preference_beta * batch.extras["divergence"].to(reward.dtype)
    right = share_of_right_order(torch.where(desirable > 0, above, -above), scores.reward_rounding(config))
    total, count, report = answers.sum_per_row_losses_and_figures(
        losses, {"preference loss": losses, "preference accuracy": right}
    )
    for name, which in (("chosen reward", desirable > 0), ("rejected reward", desirable <= 0)):
        report[name] = torch.stack((reward[which].sum(), which.sum().to(reward.dtype)))
    report["divergence"] = torch.stack((batch.extras["divergence"].to(count.dtype) * count, count))
    return total, count, report


def reward_step_loss(config: PreferenceConfig, values: Tensor, batch: Batch, context: Axis) -> Loss:
    """Return (sum over pairs, number of pairs, figures to log) of a reward model. values: [b, s], the score at every position."""
    answers = PackedAnswers(batch, context, values.dtype, each=2)
    (chosen, rejected), (margin, _) = answers.sum_per_answer(values), answers.sum_extra_per_answer("margin")
    losses = reward_loss(chosen, rejected, margin, config.reward_centre)
    figures = {
        "preference loss": losses,
        "preference accuracy": share_of_right_order(chosen - rejected),
        "reward margin": chosen - rejected,
        "chosen reward": chosen,
        "rejected reward": rejected,
    }
    return answers.sum_per_row_losses_and_figures(losses, figures)


LOSSES = {"dpo": pair_step_loss, "kto": kto_step_loss, "reward": reward_step_loss}


def compute_answer_logprobs(trainer: Trainer, network: Trainer, batches: Sequence[Batch]) -> list[Tensor]:
    """Return log-probabilities of the answers' labels, 0 at others: [b, s] for each microbatch on ranks of the last
    stage, [] on others. No gradients. Collective.

    trainer: the run's. network: the trainer whose stages compute them, which have no dropout in this pass.
    """
    step = trainer.forward_step
    assert isinstance(step, PreferenceStep), "answers are trained by a preference step"
    step.collected = []
    names, network.loss_names = network.loss_names, ()
    try:
        with evaluation_mode(trainer) if trainer.stages[0].training else nullcontext():
            work = StepWork(network, iter(batches), len(batches), training=False)
            trainer.run_schedule(work, len(batches), training=False)
        return step.collected
    finally:
        step.collected, network.loss_names = None, names


def mismatched_answers_batch(batch: Batch, context: Axis) -> Batch:
    """Return KTO's microbatch of mismatched answers that belongs to a batch. Samples that only pad an evaluation get a
    zero mask.
    """
    if batch.tokens is None or batch.loss_mask is None:
        return batch
    counts = collectives.all_reduce(batch.loss_mask.sum(dim=1, keepdim=True), context) > 0
    extras = {name.removeprefix("kl_"): value for name, value in batch.extras.items() if name.startswith("kl_")}
    return dataclasses.replace(
        batch,
        tokens=extras.pop("tokens"),
        labels=extras.pop("labels"),
        loss_mask=extras.pop("loss_mask") * counts,
        positions=extras.pop("position_ids"),
        documents=extras.pop("document_ids")[:, :-1],
        extras={**extras, "answer_mask": extras["answer_mask"] * counts},
    )
