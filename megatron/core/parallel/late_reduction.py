"""An all-reduce whose answer comes a call late, so that neither the host nor the stream of a step waits for other ranks."""

from __future__ import annotations

from typing import Literal

import torch

from megatron.core.parallel import collectives
from megatron.core.parallel.device import DeviceToHostCopy
from megatron.core.parallel.mesh import Axis


class LaggedIntegerReduction:
    """Max or min of one integer per rank. Collective: all ranks make the same calls. Immediate on an axis of size 1."""

    def __init__(self, axis: Axis, device: torch.device, reduction: Literal["max", "min"], *, first: int) -> None:
        """first: the answer of the first call."""
        self._axis, self._device, self._reduction, self._first = axis, device, reduction, first
        self._pending: tuple[torch.Tensor, collectives.Work] | DeviceToHostCopy | None = None

    def reduce_and_wait(self, number: int) -> int:
        """Reduce `number` over the axis and return the result, waiting for it."""
        if self._axis.size == 1:
            return number
        return int(collectives.all_reduce(self._number_to_tensor(number), self._axis, self._reduction))

    def start_and_return_previous(self, number: int) -> int:
        """Start to reduce `number`; return the previous call's result, at first `first`. A step hides the wait."""
        if self._axis.size == 1:
            return number
        before, mine = self._pending, self._number_to_tensor(number)
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

    def _number_to_tensor(self, number: int) -> torch.Tensor:
        """Return the number as an int32 tensor [] on the device."""
        return torch.full((), number, dtype=torch.int32, device=self._device)
