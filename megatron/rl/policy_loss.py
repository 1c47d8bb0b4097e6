"""The loss of a microbatch of rollouts, from the log-probabilities that the network gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.rl import losses
from megatron.rl.algorithms import ALGORITHMS, PolicyAlgorithm
from megatron.rl.settings import RLConfig
from megatron.training.data.batch import Batch, Loss


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of --rl-algorithm. has_old, has_reference: whether batches hold those log-probabilities; context: the axis of cut sequences."""

    config: RLConfig
    context: Axis
    has_old: bool
    has_reference: bool

    @property
    def policy_algorithm(self) -> PolicyAlgorithm:
        """The algorithm of --rl-algorithm."""
        return ALGORITHMS[self.config.rl_algorithm]

    def __call__(
        self, token_losses: Tensor, batch: Batch, values: Tensor | None = None, entropy: Tensor | None = None
    ) -> Loss:
        """Return (sum over tokens, number of tokens, figures to log).

        token_losses: [b, s], minus the log-probabilities of the labels. values: [b, s], of the critic's state before each label. entropy: [b, s],
        of the whole distribution; None: the entropy term is that of the sampled tokens.
        """
        assert batch.loss_mask is not None, "the stage of the loss has the mask"
        config, extras = self.config, batch.extras
        mask = batch.loss_mask.to(token_losses.dtype)
        logprobs = -token_losses * mask
        advantages, weight = (extras[name].to(token_losses.dtype) for name in ("rl_advantage", "rl_weight"))
        generation = extras["rl_generation"].to(token_losses.dtype)
        old = extras["rl_old"].to(token_losses.dtype) if self.has_old else logprobs.detach()
        ratio = self._importance_ratio(logprobs, old, mask, extras["rl_answer"])
        limits = {"lower": config.grpo_clamp_eps_lower, "upper": config.grpo_clamp_eps_upper}
        if self.policy_algorithm.loss == "cispo":
            loss = losses.cispo_loss(logprobs, ratio, advantages, upper=limits["upper"])
        else:
            loss = losses.clipped_policy_loss(ratio, advantages, dual_clip=config.rl_dual_clip, **limits)
        if config.rl_inference_logprobs_is_correction:
            loss = loss * self._generation_mismatch_weight((old - generation) * mask, extras["rl_answer"])
        divergence = torch.zeros_like(loss)
        if self.has_reference:
            reference = extras["rl_reference"].to(token_losses.dtype)
            divergence = losses.kl_to_reference(logprobs, reference, config.rl_kl_estimator)
            loss = loss + config.grpo_kl_beta * divergence
        bonus = losses.sampled_entropy_term(logprobs) if entropy is None else entropy.to(loss.dtype)
        loss = loss - config.grpo_entropy_term_weight * bonus
        count, total = mask.sum(), (loss * weight).sum()
        clipped = losses.is_ratio_clipped(ratio, advantages, **limits)
        difference = (old - generation).abs()

        def sum_and_count(values: Tensor) -> Tensor:
            return torch.stack(((values.detach() * mask).sum(), count))

        report = {
            "rl loss": torch.stack((total.detach(), count)),
            "clip fraction": sum_and_count(clipped.to(loss.dtype)),
            "entropy estimate": sum_and_count(-logprobs),
            "generation logprob difference": sum_and_count(difference),
        }
        if entropy is not None:
            report["entropy"] = sum_and_count(entropy)
        if self.has_reference:
            report["kl to reference"] = sum_and_count(divergence)
        if values is not None:
            old_values, returns = (extras[name].to(token_losses.dtype) for name in ("rl_value", "rl_return"))
            values = values.to(token_losses.dtype)
            errors = losses.value_loss(values, old_values, returns, clip=config.rl_value_clip)
            total = total + config.rl_value_loss_coef * (errors * mask).sum()
            report["value loss"] = sum_and_count(errors)
            moved_far = (values - old_values).abs() > config.rl_value_clip
            report["value clip fraction"] = sum_and_count((moved_far & (config.rl_value_clip > 0)).to(loss.dtype))
        return total, count, report

    def _importance_ratio(self, logprobs: Tensor, old: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        """Return the policy ratio of each token, or of its whole answer, [b, s]. answers: index of each token's answer
        in its row.
        """
        if self.policy_algorithm.sequence_ratio == "none":
            return losses.policy_ratio(logprobs, old)
        sums = answer_sum_at_each_token((logprobs - old) * mask, answers, self.context)
        if self.policy_algorithm.sequence_ratio == "mean":
            sums = sums / answer_sum_at_each_token(mask, answers, self.context).clamp(min=1.0)
        return losses.policy_ratio(sums, torch.zeros_like(sums))

    def _generation_mismatch_weight(self, differences: Tensor, answers: Tensor) -> Tensor:
        """Return the weight that corrects for generation's log-probabilities, [b, s], by --rl-importance-sampling-mode.

        differences: old minus generation's log-probabilities.
        """
        level, _, above = self.config.rl_importance_sampling_mode.partition("_")
        if level == "sequence":
            differences = answer_sum_at_each_token(differences, answers, self.context)
        cap = self.config.rl_importance_sampling_truncation_coef or float("inf")
        return losses.importance_weight(differences, torch.zeros_like(differences), cap=cap, masks=above == "mask")


def answer_sum_at_each_token(values: Tensor, answers: Tensor, context: Axis) -> Tensor:
    """Return at each token the sum of the values over its answer, on all context ranks. values, answers: [b, s]; answers counts from 0 in each row."""
    rows, length = values.shape
    width = (
        length * context.size
    )  # no row has more answers than tokens, so the host need not ask the device how many there are
    sums = torch.zeros(rows, width, dtype=values.dtype, device=values.device).scatter_add(1, answers, values)
    whole = collectives.identity_with_reduce_backward(collectives.reduce_with_identity_backward(sums, context), context)
    return whole.gather(1, answers)
