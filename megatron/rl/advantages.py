"""Advantages: how much better an answer is than the other answers to its prompt, and with a critic of each token. The same on every rank.

rewards are [groups, answers] throughout: one row for each prompt, one column for each of its answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.rl.algorithms import ALGORITHMS, Baseline
from megatron.rl.rollout_batches import TrainingRollout
from megatron.rl.rollouts import Rollout
from megatron.rl.settings import RLConfig

STD_EPSILON = 1e-4  # added to a standard deviation, as Megatron and TRL do
VARIANCE_EPSILON = 1e-8  # added to the variance of a round's advantages, as TRL's PPO does


def answer_advantages(rewards: Tensor, baseline: Baseline, *, unbiased: bool = False) -> Tensor:
    """Return the advantage of every answer, [groups, answers].

    group-std: (r - mean) / (std + 1e-4) over the answers of a prompt (GRPO, Shao et al., 2024). group-mean: r - mean, without the
    division, which favours prompts whose rewards hardly differ (Dr. GRPO, Liu et al., 2025). leave-one-out: r minus the mean of the *other*
    answers (RLOO, Ahmadian et al., 2024). batch-std: r - mean of the prompt, over the standard deviation of all these differences
    (REINFORCE++ with a baseline, Hu et al., 2025). unbiased: standard deviations divide by n - 1 (TRL) and not by n (Megatron).

    A reward of NaN is that of a rollout that failed: means and deviations are those of the others, and its advantage is
    0. So are those of all answers to a prompt whose rewards are equal, to the last bit: Adam would make a step of what
    rounding leaves. Raises `ValueError` for leave-one-out with a single answer to a prompt.
    """
    rewards = rewards.double()
    if baseline == "leave-one-out" and rewards.shape[1] < 2:
        raise ValueError("leave-one-out compares an answer with others to the same prompt; sample 2 or more")
    valid = ~rewards.isnan()
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    centred = centred.where(valid & has_varied_rewards(rewards)[:, None], 0.0)
    counts = valid.sum(dim=1, keepdim=True)
    if baseline == "group-mean":
        return centred
    if baseline == "leave-one-out":  # the mean of all n rewards is 1/n of this one and (n - 1)/n of the others' mean
        return centred * counts / (counts - 1).clamp(min=1)
    squares = centred.square().sum(dim=1, keepdim=True)
    if baseline == "batch-std":
        squares, counts = squares.sum(), counts.sum()
    return centred / ((squares / (counts - int(unbiased)).clamp(min=1)).sqrt() + STD_EPSILON)


def has_varied_rewards(rewards: Tensor) -> Tensor:
    """Return for each prompt whether its answers have different rewards, bool [groups]; advantages of all others are
    zero (DAPO). NaN, of a rollout that failed, is no reward.
    """
    largest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1)
    return largest > rewards.nan_to_num(nan=torch.inf).amin(dim=1)


def overlong_penalty(lengths: Tensor, *, limit: int, margin: int) -> Tensor:
    """Return what is added to the rewards of long answers, in [-1, 0]: DAPO's soft overlong punishment (Yu et al., 2025).

    lengths: [...] in tokens. limit: the longest answer. An answer loses nothing up to limit - margin tokens, then linearly up to 1 at
    the limit. margin 0: nothing is lost before the limit.
    """
    if margin == 0:
        return -(lengths >= limit).double()
    return ((limit - margin - lengths.double()) / margin).clamp(min=-1.0, max=0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return values with mean 0 and variance 1 over the masked tokens, 0 at others; as PPO trains on advantages. values, mask: [...]."""
    mask = mask.bool()
    chosen = values[mask]
    variance = chosen.var(correction=1) if len(chosen) > 1 else chosen.new_zeros(())
    return (values - (chosen.mean() if len(chosen) else 0.0)) * torch.rsqrt(variance + VARIANCE_EPSILON) * mask


def gae_advantages_and_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of every token, [answers, tokens] each: GAE (Schulman et al., 2015), for PPO.

    rewards: of each token, usually zero but at the last. values: what the critic expects from each token on. mask: 1 for tokens of the
    answer; others have 0 in both results. discount: gamma; smoothing: lambda.
    """
    mask = mask.to(values.dtype)
    result = torch.zeros_like(values)
    later = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        counted = mask[:, place]
        delta = rewards[:, place] + discount * next_value - values[:, place]
        later = torch.where(counted > 0, delta + discount * smoothing * later, later)
        next_value = torch.where(counted > 0, values[:, place], next_value)
        result[:, place] = later * counted
    return result, (result + values) * mask


def rollouts_with_advantages(rollouts: Sequence[Rollout], rl: RLConfig, *, longest: int) -> list[TrainingRollout]:
    """Return the rollouts with advantages, by comparing the answers to each prompt.

    One that failed counts in no mean, and is not trained on. longest: most tokens of an answer. With a critic the
    advantage is the reward.
    """
    rewards = torch.tensor([one.reward for one in rollouts], dtype=torch.float64).view(-1, rl.grpo_group_size)
    if rl.rl_overlong_margin:
        lengths = torch.tensor([one.num_sampled for one in rollouts]).view_as(rewards)
        rewards = rewards + overlong_penalty(lengths, limit=longest, margin=rl.rl_overlong_margin)
    failed = rewards.isnan()
    algorithm = ALGORITHMS[rl.rl_algorithm]
    values = rewards if algorithm.has_critic else answer_advantages(rewards, algorithm.baseline)
    dropped = failed
    if rl.rl_overlong_filtering:
        dropped = dropped | ~torch.tensor([one.finished for one in rollouts]).view_as(failed)
    if rl.grpo_filter_groups_with_same_reward:
        dropped = dropped | ~has_varied_rewards(rewards)[:, None]
    return [
        TrainingRollout(
            dataclasses.replace(one, sampled=(False,) * len(one.ids)) if drop else one, 0.0 if drop else value
        )
        for one, value, drop in zip(rollouts, values.flatten().tolist(), dropped.flatten().tolist(), strict=True)
    ]


def rollouts_with_token_advantages(trained: Sequence[TrainingRollout], rl: RLConfig) -> list[TrainingRollout]:
    """Return the rollouts with advantages and returns of each token, from their values and rewards (`advantage`)."""
    longest = max((len(one.rollout.ids) for one in trained), default=0)
    table = torch.zeros(3, len(trained), longest, dtype=torch.float64)
    rewards, values, mask = table
    for row, one in enumerate(trained):
        size = len(one.rollout.ids)
        mask[row, :size] = torch.tensor(one.rollout.sampled, dtype=torch.float64)
        if one.values:
            values[row, :size] = torch.tensor(one.values, dtype=torch.float64)
            rewards[row, max(place for place, known in enumerate(one.rollout.sampled) if known)] = one.advantage
    gains, returns = gae_advantages_and_returns(
        rewards, values, mask, discount=rl.rl_discount, smoothing=rl.rl_gae_lambda
    )
    gains = whiten(gains, mask)
    return [
        dataclasses.replace(
            one,
            advantages=tuple(gains[row, : len(one.rollout.ids)].tolist()),
            returns=tuple(returns[row, : len(one.rollout.ids)].tolist()),
        )
        for row, one in enumerate(trained)
    ]
