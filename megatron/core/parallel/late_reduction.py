"""An all-reduce whose answer comes a call late, so that neither the host nor the stream of a step waits for other ranks."""

from __future__ import annotations

from typing import Literal

import torch

from megatron.core.parallel import collectives
from megatron.core.parallel.device import DeviceToHostCopy
from megatron.core.parallel.mesh import Axis


class DeferredReduction:
    """A number of each rank, reduced over an axis. All ranks call it together; a rank alone has its answer at once."""

    def __init__(self, axis: Axis, device: torch.device, reduction: Literal["max", "min"], *, first: int) -> None:
        """first: the answer of the first call."""
        self._axis, self._device, self._reduction, self._first = axis, device, reduction, first
        self._pending: tuple[torch.Tensor, collectives.Work] | DeviceToHostCopy | None = None

    def result(self, number: int) -> int:
        """The answer to this number; waits for it."""
        if self._axis.size == 1:
            return number
        return int(collectives.all_reduce(self._filled(number), self._axis, self._reduction))

    def previous_result(self, number: int) -> int:
        """The answer to the number of the call before, which was reduced while a step was computed."""
        if self._axis.size == 1:
            return number
        before, mine = self._pending, self._filled(number)
        work = collectives.start_all_reduce(mine, self._axis, self._reduction)
        if self._device.type == "cuda":
            collectives.wait(work)  # the stream waits, the host does not
            self._pending = DeviceToHostCopy([mine], self._device)
        else:
            self._pending = (mine, work)
        if before is None:
            return self._first
        if isinstance(before, DeviceToHostCopy):
            return int(before.wait()[0])
        collectives.wait(before[1])
        return int(before[0])

    def _filled(self, number: int) -> torch.Tensor:
        return torch.full((), number, dtype=torch.int32, device=self._device)
