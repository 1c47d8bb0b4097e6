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
class Algorithm:
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


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm("group-std", average="answer"),
    "dapo": Algorithm("group-std", average="token"),
    "dr_grpo": Algorithm("group-mean", average="length"),
    "gspo": Algorithm("group-std", average="answer", sequence_ratio="mean"),
    "cispo": Algorithm("group-std", "cispo", average="token"),
    "rloo": Algorithm("leave-one-out", average="answer", sequence_ratio="sum"),
    "reinforce++": Algorithm("batch-std", average="token"),
    "ppo": Algorithm("group-mean", average="token", has_critic=True),
}
