"""Losses of answers, from the log-probabilities that the policy and the reference give them, or from scores.

Everything has shape [pairs]. With x the policy's log-probability of an answer less the reference's, and
delta = x(chosen) - x(rejected):

    sigmoid    -log s(beta delta), with label smoothing e: (1 - e) of it and e of -log s(-beta delta)   DPO, Rafailov et al., 2023; cDPO
    robust     the same with -e for e, divided by 1 - 2 e                                               Chowdhury et al., 2024
    hinge      max(0, 1 - beta delta)                                                                   SLiC, Zhao et al., 2023
    ipo        (delta of means over tokens - 1 / (2 beta))^2                                            Azar et al., 2023
    apo_zero   1 - s(beta x(chosen)) + s(beta x(rejected))                                              D'Oosterlinck et al., 2024
    simpo      -log s(beta (difference of means over tokens) - gamma), no reference                     Meng et al., 2024
    orpo       -log p(chosen), mean over tokens, - beta log s(difference of log odds), no reference     Hong et al., 2024

    kto        w (1 - s(beta (x - z))) of a desirable answer, w (1 - s(beta (z - x))) of another,        Ethayarajh et al., 2024
               z = the policy's divergence from the reference, estimated from mismatched answers
    reward     -log s(r(chosen) - r(rejected) - margin) + c (r(chosen) + r(rejected))^2                  Bradley and Terry, 1952
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.preference.settings import PreferenceConfig

_ROUNDED_DIGITS = 16.0  # units of the last place that two ways to sum the same log-probabilities may differ by


def share_of_right_order(difference: Tensor, rounding: Tensor | float = 0.0) -> Tensor:
    """Return 1 where a difference is positive, 0 where it is negative, and one half for a tie: where it is 0, or no more
    than rounding. difference, rounding: [pairs].
    """
    return torch.where(difference.abs() <= rounding, 0.5, (difference > 0).to(difference.dtype))


@dataclass(frozen=True, slots=True)
class AnswerLogprobs:
    """Log-probabilities of answers, [answers] each. logprob, reference: sums over an answer's tokens by policy and
    reference. tokens: its number of tokens.
    """

    logprob: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """The policy's log-probability less the reference's, [pairs]."""
        return self.logprob - self.reference

    @property
    def mean_logprob(self) -> Tensor:
        """The mean log-probability of a token, [pairs]."""
        return self.logprob / self.tokens.clamp(min=1.0)

    def reward(self, config: PreferenceConfig) -> Tensor:
        """Return beta times what the loss compares of an answer, without gradient, [pairs]: the sum over its tokens, or of
        ipo, simpo and orpo their mean. Else accuracy would go by length where the loss does not.
        """
        return config.preference_beta * self._sum_or_mean(self.log_ratio.detach(), config)

    def reward_rounding(self, config: PreferenceConfig) -> Tensor:
        """Return what rounding may make of a reward that is 0, as when policy and reference are one network, [pairs]."""
        sizes = self.logprob.detach().abs() + self.reference.abs()
        return (
            _ROUNDED_DIGITS * torch.finfo(sizes.dtype).eps * config.preference_beta * self._sum_or_mean(sizes, config)
        )

    def _sum_or_mean(self, sums: Tensor, config: PreferenceConfig) -> Tensor:
        return sums / self.tokens.clamp(min=1.0) if config.compares_means else sums


def kto_loss(answers: AnswerLogprobs, desirable: Tensor, divergence: Tensor, config: PreferenceConfig) -> Tensor:
    """Return KTO's loss of each answer, [answers]. desirable: [answers], 1 or 0. divergence: z, a scalar without a
    gradient.
    """
    against = config.preference_beta * (answers.log_ratio - divergence)
    weights = config.kto_desirable_weight, config.kto_undesirable_weight
    good, bad = (weight * (1.0 - signed.sigmoid()) for weight, signed in zip(weights, (against, -against)))
    return torch.where(desirable > 0, good, bad)


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, centre: float) -> Tensor:
    """Return the reward model's loss of each pair, [pairs]. chosen, rejected: scores [pairs]. margin: least difference
    wanted [pairs]. centre: weight of the squared sum of both scores.
    """
    return -F.logsigmoid(chosen - rejected - margin) + centre * (chosen + rejected).square()


def _smoothed_logsigmoid_loss(logits: Tensor, smoothing: float) -> Tensor:
    """Return the logistic loss with label smoothing, [pairs]."""
    return -(1.0 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def _dpo_loss(chosen: AnswerLogprobs, rejected: AnswerLogprobs, config: PreferenceConfig) -> Tensor:
    return _smoothed_logsigmoid_loss(
        config.preference_beta * (chosen.log_ratio - rejected.log_ratio), config.preference_label_smoothing
    )


def _robust_dpo_loss(chosen: AnswerLogprobs, rejected: AnswerLogprobs, config: PreferenceConfig) -> Tensor:
    logits, e = config.preference_beta * (chosen.log_ratio - rejected.log_ratio), config.preference_label_smoothing
    return (-(1.0 - e) * F.logsigmoid(logits) + e * F.logsigmoid(-logits)) / (1.0 - 2.0 * e)


def _hinge_loss(chosen: AnswerLogprobs, rejected: AnswerLogprobs, config: PreferenceConfig) -> Tensor:
    return (1.0 - config.preference_beta * (chosen.log_ratio - rejected.log_ratio)).relu()


def _ipo_loss(chosen: AnswerLogprobs, rejected: AnswerLogprobs, config: PreferenceConfig) -> Tensor:
    means = (one.log_ratio / one.tokens.clamp(min=1.0) for one in (chosen, rejected))
    return (next(means) - next(means) - 1.0 / (2.0 * config.preference_beta)).square()


def _apo_zero_loss(chosen: AnswerLogprobs, rejected: AnswerLogprobs, config: PreferenceConfig) -> Tensor:
    return (
        1.0
        - (config.preference_beta * chosen.log_ratio).sigmoid()
        + (config.preference_beta * rejected.log_ratio).sigmoid()
    )


def _simpo_loss(chosen: AnswerLogprobs, rejected: AnswerLogprobs, config: PreferenceConfig) -> Tensor:
    return _smoothed_logsigmoid_loss(
        config.preference_beta * (chosen.mean_logprob - rejected.mean_logprob) - config.preference_margin,
        config.preference_label_smoothing,
    )


def _orpo_loss(chosen: AnswerLogprobs, rejected: AnswerLogprobs, config: PreferenceConfig) -> Tensor:
    return -chosen.mean_logprob - config.preference_beta * F.logsigmoid(
        _log_odds(chosen.mean_logprob) - _log_odds(rejected.mean_logprob)
    )


def _log_odds(logprob: Tensor) -> Tensor:
    """log p - log(1 - p) from log p < 0."""
    small = torch.finfo(logprob.dtype).tiny
    return logprob - (-torch.expm1(logprob)).clamp(min=small).log()


PAIR_LOSSES: Mapping[str, Callable[[AnswerLogprobs, AnswerLogprobs, PreferenceConfig], Tensor]] = MappingProxyType(
    {
        "sigmoid": _dpo_loss,
        "robust": _robust_dpo_loss,
        "hinge": _hinge_loss,
        "ipo": _ipo_loss,
        "apo_zero": _apo_zero_loss,
        "simpo": _simpo_loss,
        "orpo": _orpo_loss,
    }
)
