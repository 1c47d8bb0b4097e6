"""What each --rl-algorithm is made of: how rewards become advantages, the loss of a token, and how much each token weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Baseline = Literal["group-std", "group-mean", "leave-one-out", "batch-std"]
TokenLoss = Literal["clipped", "cispo"]
SequenceRatio = Literal["none", "mean", "sum"]
Average = Literal["answer", "token", "length"]


@dataclass(frozen=True, slots=True)
class PolicyAlgorithm:
    """One policy-gradient method.

    baseline: as in `advantages`. loss: of a token. sequence_ratio: one ratio of the whole answer stands for those of its tokens: exp of the
    mean (GSPO, Zheng et al., 2025) or of the sum (RLOO, Ahmadian et al., 2024) of its tokens' differences. average: answer: the mean over each answer's tokens, then over answers; token: the mean over all tokens of the
    step; length: the sum over tokens divided by the longest answer allowed, then the mean over answers. has_critic: advantages of tokens
    come from the values of a critic (PPO, Schulman et al., 2017), and the baseline is not used.
    """

    baseline: Baseline
    loss: TokenLoss = "clipped"
    average: Average = "token"
    sequence_ratio: SequenceRatio = "none"
    has_critic: bool = False


ALGORITHMS: Mapping[str, PolicyAlgorithm] = {
    "grpo": PolicyAlgorithm("group-std", average="answer"),
    "dapo": PolicyAlgorithm("group-std", average="token"),
    "dr_grpo": PolicyAlgorithm("group-mean", average="length"),
    "gspo": PolicyAlgorithm("group-std", average="answer", sequence_ratio="mean"),
    "cispo": PolicyAlgorithm("group-std", "cispo", average="token"),
    "rloo": PolicyAlgorithm("leave-one-out", average="answer", sequence_ratio="sum"),
    "reinforce++": PolicyAlgorithm("batch-std", average="token"),
    "ppo": PolicyAlgorithm("group-mean", average="token", has_critic=True),
}
