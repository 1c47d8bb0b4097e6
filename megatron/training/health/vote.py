"""Questions that all ranks must answer alike, such as whether to stop: at once, or a call late so that no step waits."""

from __future__ import annotations

import torch

from megatron.core.parallel.late_reduction import DeferredReduction
from megatron.core.parallel.mesh import Axis


class Vote:
    """Whether any rank of an axis said True. All of them call the same methods in the same order; a rank alone answers itself."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._reduction = DeferredReduction(axis, device, "max", first=0)

    def result(self, vote: bool) -> bool:
        """The answer to this question; waits for it."""
        return bool(self._reduction.result(int(vote)))

    def poll(self, vote: bool) -> bool:
        """The answer to the question of the call before, whose votes met while a step was computed; False in the first call."""
        return bool(self._reduction.previous_result(int(vote)))
