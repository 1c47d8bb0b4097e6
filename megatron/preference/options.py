"""Which losses there are, and what they are given; without torch, so that command lines are checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")


@dataclass(frozen=True, slots=True)
class PairLossOptions:
    """beta: strength of the tie to the reference. smoothing: share of labels taken to be wrong. gamma: SimPO's margin."""

    beta: float = 0.1
    smoothing: float = 0.0
    gamma: float = 0.0


@dataclass(frozen=True, slots=True)
class KTOOptions:
    """beta: strength of the tie to the reference. weights: of desirable answers and of the others."""

    beta: float = 0.1
    weights: tuple[float, float] = (1.0, 1.0)
