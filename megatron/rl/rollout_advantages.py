"""Advantages of rollouts: of whole answers, and with a critic of each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megatron.rl.advantages import (
    answer_advantages,
    gae_advantages_and_returns,
    has_varied_rewards,
    overlong_penalty,
    whiten,
)
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.rollout_batches import TrainingRollout
from megatron.rl.rollouts import Rollout
from megatron.rl.settings import RLConfig


def rollouts_with_advantages(rollouts: Sequence[Rollout], rl: RLConfig, *, longest: int) -> list[TrainingRollout]:
    """Return the rollouts with advantages, by comparing the answers to each prompt.

    One that failed counts as the mean of its group, and is not trained on. longest: most tokens of an answer. With a
    critic the advantage is the reward.
    """
    rewards = torch.tensor([one.reward for one in rollouts], dtype=torch.float64).view(-1, rl.grpo_group_size)
    if rl.rl_overlong_margin:
        lengths = torch.tensor([one.num_sampled for one in rollouts]).view_as(rewards)
        rewards = rewards + overlong_penalty(lengths, limit=longest, margin=rl.rl_overlong_margin)
    failed = rewards.isnan()
    means = rewards.nanmean(dim=1, keepdim=True).nan_to_num(0.0)
    rewards = torch.where(failed, means, rewards)
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
