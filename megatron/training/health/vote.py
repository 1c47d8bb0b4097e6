"""Questions that all ranks must answer alike, such as whether to stop: at once, or a call late so that no step waits."""

from __future__ import annotations

import torch

from megatron.core.parallel.late_reduction import LaggedIntegerReduction
from megatron.core.parallel.mesh import Axis


class AnyRankVote:
    """Whether any rank of an axis votes True. All ranks call the same methods in the same order."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._reduction = LaggedIntegerReduction(axis, device, "max", first=0)

    def any_now(self, vote: bool) -> bool:
        """Return whether any rank votes True in this call; waits for the reduction."""
        return bool(self._reduction.reduce_and_wait(int(vote)))

    def any_in_previous(self, vote: bool) -> bool:
        """Return whether any rank voted True in the previous call, without waiting; False in the first call."""
        return bool(self._reduction.start_and_return_previous(int(vote)))
