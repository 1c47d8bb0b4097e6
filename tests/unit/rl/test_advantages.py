"""Advantages, against the formulas of the papers written out."""

from __future__ import annotations

import statistics

import pytest
import torch

from megatron.rl.advantages import (
    answer_advantages,
    gae_advantages_and_returns,
    has_varied_rewards,
    overlong_penalty,
    rollouts_with_advantages,
)
from megatron.rl.algorithms import Baseline
from megatron.rl.rollouts import Rollout
from megatron.rl.settings import RLConfig

REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])


def test_grpo_divides_by_the_population_deviation_of_the_group() -> None:
    result = answer_advantages(REWARDS, "group-std")
    for row, rewards in zip(result.tolist(), REWARDS.tolist()):
        mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
        assert row == pytest.approx([(r - mean) / (deviation + 1e-4) for r in rewards], abs=1e-12)


def test_trl_divides_by_the_sample_deviation() -> None:
    row = answer_advantages(REWARDS, "group-std", unbiased=True)[0].tolist()
    rewards = REWARDS[0].tolist()
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    assert row == pytest.approx([(r - mean) / (deviation + 1e-4) for r in rewards], abs=1e-12)


def test_equal_rewards_give_no_advantage_and_not_infinity() -> None:
    for baseline in ("group-std", "group-mean", "leave-one-out"):
        assert answer_advantages(REWARDS, baseline)[2].tolist() == [0.0] * 4  # type: ignore[arg-type]
    assert answer_advantages(torch.ones(2, 3), "batch-std").abs().max() == 0.0
    assert answer_advantages(torch.ones(2, 1), "group-std").tolist() == [[0.0], [0.0]]


BASELINES: tuple[Baseline, ...] = ("group-std", "group-mean", "leave-one-out", "batch-std")


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1.0, -1e-3, 1e6 / 3])
def test_a_constant_reward_is_no_advantage_to_the_last_bit(baseline: Baseline, reward: float) -> None:
    """Rounding in a mean of 3, 5 or 7 equal numbers would be one, and Adam makes a whole step of it."""
    for number in (2, 3, 5, 7, 16):
        rewards = torch.full((3, number), reward)
        rewards[1, 1:] += torch.rand(number - 1)
        result = answer_advantages(rewards, baseline)
        assert result[0].tolist() == result[2].tolist() == [0.0] * number and result[1].abs().max() > 0


@pytest.mark.parametrize("baseline", BASELINES)
def test_an_answer_that_failed_counts_in_no_mean_and_no_deviation(baseline: Baseline) -> None:
    nan = float("nan")
    with_failures = torch.tensor([[0.005, 0.821, nan, nan], [nan, 1.0, 0.25, nan]])
    without = torch.tensor([[0.005, 0.821], [1.0, 0.25]])
    for unbiased in (False, True):
        result = answer_advantages(with_failures, baseline, unbiased=unbiased)
        expected = answer_advantages(without, baseline, unbiased=unbiased)
        torch.testing.assert_close(result[with_failures.isfinite()].view(2, 2), expected, rtol=0, atol=1e-12)
        assert (result[with_failures.isnan()] == 0).all()
    if baseline == "leave-one-out":
        assert result[0, 1] == pytest.approx(0.816)
    if baseline == "group-std":
        assert answer_advantages(with_failures, baseline)[0, 1] == pytest.approx(1.0, abs=1e-3)
    alone = torch.tensor([[nan, 0.3, nan], [nan, nan, nan], [0.0, 1.0, nan]])
    assert answer_advantages(alone, baseline)[:2].abs().max() == 0, "nothing to compare with"


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_round_with_failures_is_trained_on_the_others(baseline: Baseline) -> None:
    name = {"group-std": "grpo", "group-mean": "dr_grpo", "leave-one-out": "rloo", "batch-std": "reinforce++"}[baseline]
    rewards = [0.1, 0.1, 0.1, float("nan"), 0.5, float("nan"), 0.25, 0.25]
    rollouts = [
        Rollout("", 0, place // 4, (1, 2), (False, True), (0.0, -1.0), reward, True)
        for place, reward in enumerate(rewards)
    ]
    rl = RLConfig(rl_algorithm=name, grpo_group_size=4)  # type: ignore[arg-type]
    trained = rollouts_with_advantages(rollouts, rl, longest=4)
    assert [one.rollout.num_sampled for one in trained] == [1, 1, 1, 0, 1, 0, 1, 1]
    assert [one.advantage for one in trained[:4]] == [0.0] * 4 == [0.0, *(trained[5].advantage,) * 3]
    assert trained[4].advantage > 0 > trained[6].advantage == trained[7].advantage


def test_dr_grpo_and_leave_one_out() -> None:
    rewards = REWARDS[0].tolist()
    mean = statistics.fmean(rewards)
    assert answer_advantages(REWARDS, "group-mean")[0].tolist() == pytest.approx([r - mean for r in rewards])
    others = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(4)]
    assert answer_advantages(REWARDS, "leave-one-out")[0].tolist() == pytest.approx(
        [r - other for r, other in zip(rewards, others)]
    )
    with pytest.raises(ValueError, match="sample 2 or more"):
        answer_advantages(torch.ones(2, 1), "leave-one-out")


def test_reinforce_plus_plus_divides_by_the_deviation_of_the_batch_and_not_of_the_group() -> None:
    centred = [r - statistics.fmean(row) for row in REWARDS.tolist() for r in row]
    expected = [value / (statistics.pstdev(centred) + 1e-4) for value in centred]
    assert answer_advantages(REWARDS, "batch-std").flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_groups_without_a_difference_are_named() -> None:
    assert has_varied_rewards(REWARDS).tolist() == [True, True, False]


def test_the_length_penalty_is_zero_then_falls_to_minus_one() -> None:
    lengths = torch.tensor([1, 60, 80, 90, 100])
    assert overlong_penalty(lengths, limit=100, margin=40).tolist() == [0.0, 0.0, -0.5, -0.75, -1.0]
    assert overlong_penalty(lengths, limit=100, margin=0).tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]


def test_generalized_advantages_follow_the_recursion() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    discount, smoothing = 0.9, 0.8
    result, returns = gae_advantages_and_returns(rewards, values, mask, discount=discount, smoothing=smoothing)
    for row in range(2):
        places = [place for place in range(5) if mask[row, place]]
        for place in places:
            expected = 0.0
            for later in [p for p in places if p >= place]:
                following = float(values[row, later + 1]) if later + 1 in places else 0.0
                delta = float(rewards[row, later]) + discount * following - float(values[row, later])
                expected += (discount * smoothing) ** (later - place) * delta
            assert float(result[row, place]) == pytest.approx(expected, abs=1e-12)
            assert float(returns[row, place]) == pytest.approx(expected + float(values[row, place]), abs=1e-12)
    assert (result * (1 - mask)).abs().max() == 0.0 == float((returns * (1 - mask)).abs().max())
