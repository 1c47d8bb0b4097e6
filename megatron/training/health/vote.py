"""Questions that all ranks must answer alike, such as whether to stop: at once, or a call late so that no step waits."""

from __future__ import annotations

import torch

from megatron.core.parallel import collectives
from megatron.core.parallel.device import Download
from megatron.core.parallel.mesh import Axis


class Vote:
    """Whether any rank of an axis said True. All of them call the same methods in the same order; a rank alone answers itself."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis, self._device = axis, device
        self._pending: tuple[torch.Tensor, collectives.Work] | Download | None = None

    def agree(self, vote: bool) -> bool:
        """The answer to this question; waits for it."""
        if self._axis.size == 1:
            return vote
        return bool(collectives.all_reduce(self._vote_tensor(vote), self._axis, "max"))

    def poll(self, vote: bool) -> bool:
        """The answer to the question of the call before, whose votes met while a step was computed; False in the first call."""
        if self._axis.size == 1:
            return vote
        before, ballot = self._pending, self._vote_tensor(vote)
        work = collectives.start_all_reduce(ballot, self._axis, "max")
        if self._device.type == "cuda":
            collectives.wait(work)  # the stream waits, the host does not
            self._pending = Download([ballot], self._device)
        else:
            self._pending = (ballot, work)
        if before is None:
            return False
        if isinstance(before, Download):
            return bool(before.wait()[0])
        collectives.wait(before[1])
        return bool(before[0])

    def _vote_tensor(self, vote: bool) -> torch.Tensor:
        return torch.full((), int(vote), dtype=torch.int32, device=self._device)
