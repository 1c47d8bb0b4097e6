"""Masters and moments in the memory of the CPU, and their update there (`--optimizer-cpu-offload`).

    device    gradient ----> |                               | ----> weight
    CPU                      pinned gradient, update of the main weight

Of all elements that a rank owns, the first few are kept there: whole segments, and a piece of the one in which the share
ends. Copies go by a lane of their own. With `--overlap-cpu-optimizer-d2h-h2d` segments travel and are updated in a few groups,
one of which is copied while another is updated; otherwise all arrive before any is updated. Ren et al., 2021, arXiv 2101.06840.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import Segment
from megatron.core.optimizer.rule import UpdateRule
from megatron.core.parallel.device import Lane, host_memory

_GROUPS = 4  # of segments, where copies go beside updates


@dataclass(frozen=True, slots=True)
class _Away:
    """A segment that is updated here. gradient, weights: what comes down, and what goes up in its own format."""

    segment: Segment
    main: Tensor
    gradient: Tensor
    weights: Tensor


class Host:
    """What is kept in the CPU's memory, and the way there and back."""

    def __init__(self, device: torch.device, segments: Sequence[Segment], config: OptimizerConfig) -> None:
        self.segments, self.lane = segments, Lane(device)
        self.main_weights: list[Tensor] = []
        self._groups: list[list[_Away]] = []
        size = -(-len(segments) // _GROUPS) if config.overlap_cpu_optimizer_d2h_h2d else len(segments)
        for place, segment in enumerate(segments):
            wide = torch.float64 if segment.data.dtype == torch.float64 else torch.float32
            count, main = segment.data.numel(), host_memory(segment.data.numel(), wide, pinned=config.pin_cpu_params)
            self.main_weights.append(main.copy_(segment.data))
            # Half-precision weights are rounded before they travel.
            weights = (
                main
                if segment.data.dtype == wide
                else host_memory(count, segment.data.dtype, pinned=config.pin_cpu_params)
            )
            if place % max(1, size) == 0:
                self._groups.append([])
            self._groups[-1].append(
                _Away(segment, main, host_memory(count, wide, pinned=config.pin_cpu_grads), weights)
            )

    def step(self, rule: UpdateRule, factor: float | Tensor, here: Callable[[], None]) -> None:
        """Send gradients down, update by factor times them, and send the weights up. here: the device's own work, begun meanwhile."""
        marks = []
        for group in self._groups:
            with self.lane:
                for one in group:
                    one.gradient.copy_(one.segment.grad, non_blocking=True)
            marks.append(self.lane.mark())
        here()
        factor = float(factor)
        for mark, group in zip(marks, self._groups, strict=True):
            mark.wait_on_host()
            for one in group:
                one.main.grad = one.gradient
            rule.step(factor)
            for one in group:
                one.main.grad = None
                if one.weights is not one.main:
                    one.weights.copy_(one.main)
            with self.lane:
                for one in group:
                    one.segment.data.copy_(one.weights, non_blocking=True)
        self.lane.join()

    def adopt(self) -> None:
        """Weights were loaded that are their own main weights elsewhere: copy them into those here."""
        for main, segment in zip(self.main_weights, self.segments, strict=True):
            if segment.data.dtype == main.dtype and segment.rounds_to is None:
                main.copy_(segment.data)


def divided(segments: Sequence[Segment], fraction: float) -> tuple[list[Segment], int]:
    """The segments, of which the first so many hold a share `fraction` of all elements: one may have been divided for that."""
    left, parts = round(fraction * sum(segment.high - segment.low for segment in segments)), []
    count = 0
    for segment in segments:
        size = segment.high - segment.low
        inside = min(left, size)
        if inside:
            parts.append(_part(segment, 0, inside))
            count, left = len(parts), left - inside
        if inside < size:
            parts.append(_part(segment, inside, size))
    return parts, count


def _part(segment: Segment, low: int, high: int) -> Segment:
    return replace(
        segment,
        low=segment.low + low,
        high=segment.low + high,
        data=segment.data[low:high],
        grad=segment.grad[low:high],
    )
