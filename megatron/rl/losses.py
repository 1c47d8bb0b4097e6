"""Policy losses of single tokens, from log-probabilities. Nothing here knows ranks, masks or batches.

    ratio = exp(logprob - old_logprob)      how much likelier the policy in training makes a token than the policy that sampled it

Every function takes and returns tensors of one shape, usually [batch, sequence]; what is outside of answers is masked by the caller.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
_MOST = 20.0  # of differences of log-probabilities before exp, as in TRL and Megatron: e^20 is 5e8


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), any shape, with the difference limited to +-20."""
    return (logprobs - old_logprobs).clamp(-_MOST, _MOST).exp()


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, lower: float, upper: float, dual_clip: float | None = None
) -> Tensor:
    """Return -min(ratio A, clip(ratio, 1 - lower, 1 + upper) A), any shape: PPO's loss (Schulman et al., 2017).

    With upper > lower, likely tokens can still grow (DAPO's clip-higher). dual_clip: the loss of a token with a
    negative advantage is at most this times |A| (Ye et al., 2020); it must be above 1.
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - lower, 1.0 + upper) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Return, any shape, half the squared error of the critic's values, the larger of that with and without a limit on how far they move.

    PPO's value loss (Schulman et al., 2017, in its implementation): max((v - R)^2, (old + clip(v - old, -clip, clip) - R)^2) / 2.
    old_values: before the first step of the round. clip: 0 for no limit.
    """
    errors = (values - returns).square()
    if clip:
        near = old_values + (values - old_values).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    return 0.5 * errors


def is_ratio_clipped(ratio: Tensor, advantages: Tensor, *, lower: float, upper: float) -> Tensor:
    """Return for each token whether clipping stops its gradient; bool, any shape."""
    return ((ratio > 1.0 + upper) & (advantages > 0)) | ((ratio < 1.0 - lower) & (advantages < 0))


def cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, upper: float) -> Tensor:
    """Return -min(ratio, 1 + upper) A logprob, any shape, with no gradient through the ratio:

    CISPO (MiniMax-M1, 2025). No token loses its gradient.
    """
    return -ratio.detach().clamp(max=1.0 + upper) * advantages * logprobs


def kl_to_reference(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) from sampled tokens, any shape (Schulman, 2020).

    k1: logprob - reference: unbiased as a value. k2: half its square. k3: exp(-d) + d - 1 with d = logprob - reference:
    never negative. As losses, only k2 has the gradient of the KL divergence in expectation; k3's is what most libraries
    use.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return (-difference).clamp(-_MOST, _MOST).exp() + difference - 1.0


def sampled_entropy_term(logprobs: Tensor) -> Tensor:
    """Return -p log p of the sampled tokens, any shape, which --grpo-entropy-term-weight adds to the objective, as
    Megatron does.
    """
    return -logprobs.exp() * logprobs


def importance_weight(old_logprobs: Tensor, generation_logprobs: Tensor, *, cap: float, masks: bool = False) -> Tensor:
    """Return min(exp(old - generation), cap), any shape: corrects for log-probabilities of the generation engine that
    differ from those in training.

    Truncated importance sampling (Yao et al., 2025). masks: weights above the cap are 0 instead (masked importance sampling).
    No gradient passes.
    """
    weight = policy_ratio(old_logprobs, generation_logprobs).detach()
    return weight.masked_fill(weight > cap, 0.0) if masks else weight.clamp(max=cap)
