"""Policy losses of tokens, against the formulas of the papers and of TRL written out in plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.parallel.mesh import Axis
from megatron.rl import losses
from megatron.rl.policy_step import answer_sum_at_each_token


def draws(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probabilities with a gradient, those of the policy that sampled, advantages), [4, 9] each."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(4, 9, generator=generator, dtype=torch.float64) * 3
    old = logprobs + torch.randn(4, 9, generator=generator, dtype=torch.float64) * 0.4
    signs = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    return logprobs.requires_grad_(), old, signs


def test_the_clipped_loss_is_ppos_with_a_higher_upper_limit() -> None:
    logprobs, old, advantages = draws()
    result = losses.clipped_policy_loss(losses.policy_ratio(logprobs, old), advantages, lower=0.2, upper=0.28)
    # TRL's GRPO: coef_1 = exp(log ratio), coef_2 = clamp(coef_1, 1 - low, 1 + high), -min(coef_1 A, coef_2 A)
    for value, new, before, advantage in zip(
        result.flatten().tolist(), logprobs.flatten().tolist(), old.flatten().tolist(), advantages.flatten().tolist()
    ):
        ratio = math.exp(new - before)
        assert value == pytest.approx(-min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage), abs=1e-12)
    gradient = torch.autograd.grad(result.sum(), logprobs)[0]
    clipped = losses.is_ratio_clipped(losses.policy_ratio(logprobs, old), advantages, lower=0.2, upper=0.28)
    assert clipped.any() and not clipped.all()
    assert ((gradient == 0) == clipped).all(), "where a ratio is clipped no gradient passes, and nowhere else"


def test_a_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    ratio, advantages = torch.tensor([10.0, 10.0]), torch.tensor([-1.0, 1.0])
    assert losses.clipped_policy_loss(ratio, advantages, lower=0.2, upper=0.2).tolist() == pytest.approx([10.0, -1.2])
    assert losses.clipped_policy_loss(ratio, advantages, lower=0.2, upper=0.2, dual_clip=3.0).tolist() == pytest.approx(
        [3.0, -1.2]
    )


def test_cispo_limits_the_weight_and_keeps_every_gradient() -> None:
    logprobs, old, advantages = draws(1)
    ratio = losses.policy_ratio(logprobs, old)
    gradient = torch.autograd.grad(losses.cispo_loss(logprobs, ratio, advantages, upper=0.28).sum(), logprobs)[0]
    expected = -ratio.detach().clamp(max=1.28) * advantages
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_mean_or_the_gradient_of_the_divergence(estimator: losses.KLEstimator) -> None:
    torch.manual_seed(3)
    policy, reference = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64)
    logp, logr = policy.log_softmax(0), reference.log_softmax(0)
    exact = (logp.exp() * (logp - logr)).sum()
    # The expectation over what the policy samples, exactly: probabilities are no part of the graph, as with samples.
    expectation = (logp.exp().detach() * losses.kl_to_reference(logp, logr, estimator)).sum()
    if estimator == "k2":
        torch.testing.assert_close(
            torch.autograd.grad(expectation, policy, retain_graph=True)[0],
            torch.autograd.grad(exact, policy)[0],
            rtol=1e-10,
            atol=1e-12,
        )
    else:
        torch.testing.assert_close(expectation, exact, rtol=1e-12, atol=1e-12)
    if estimator == "k3":
        assert losses.kl_to_reference(logp, logr, estimator).min() >= 0
        x = float((logr - logp).detach()[0])
        assert float(losses.kl_to_reference(logp, logr, "k3").detach()[0]) == pytest.approx(math.exp(x) - x - 1)


def test_importance_weights_are_capped_and_have_no_gradient() -> None:
    old, generation = torch.tensor([0.0, -1.0], requires_grad=True), torch.tensor([-3.0, -1.5])
    weight = losses.importance_weight(old, generation, cap=2.0)
    assert weight.tolist() == pytest.approx([2.0, math.exp(0.5)]) and not weight.requires_grad


def test_ratios_of_extreme_differences_are_finite() -> None:
    ratio = losses.policy_ratio(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]))
    assert ratio.isfinite().all() and (ratio > 0).all()


def test_the_entropy_term_is_minus_p_log_p() -> None:
    logprobs = torch.tensor([-0.5, -2.0])
    assert losses.sampled_entropy_term(logprobs).tolist() == pytest.approx([0.5 * math.exp(-0.5), 2.0 * math.exp(-2.0)])


def test_sums_over_answers_ask_the_device_for_no_number() -> None:
    values, answers = torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[0, 0, 1, 0]])
    assert answer_sum_at_each_token(values, answers, Axis("cp")).tolist() == [[11.0, 11.0, 4.0, 11.0]]
    nowhere = answer_sum_at_each_token(values.to("meta"), answers.to("meta"), Axis("cp"))  # a tensor without numbers
    assert nowhere.shape == values.shape
