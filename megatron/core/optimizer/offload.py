"""Main weights and moments in CPU memory, and their update there (`--optimizer-cpu-offload`).

    device    gradient ----> |                                        | ----> weight
    CPU                      pinned gradient, update of the main weight

The first `--optimizer-offload-fraction` of the elements that a rank owns are offloaded: whole segments, and part of the
segment in which that share ends. Copies use a side stream. With `--overlap-cpu-optimizer-d2h-h2d` segments are copied
and updated in a few groups, one being copied while another is updated; otherwise all are copied before any is updated.
Ren et al., 2021, arXiv 2101.06840.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.optimizer.rule import UpdateRule
from megatron.core.parallel.device import SideStream, empty_host_tensor

_GROUPS = 4  # groups of segments whose copies overlap with updates


@dataclass(frozen=True, slots=True)
class _OffloadedOptimizerSegment:
    """A segment that is updated on the CPU. main: its main weight; gradient, weights: pinned buffers of copies."""

    segment: OwnedSegment
    main: Tensor
    gradient: Tensor
    weights: Tensor


class OptimizerCpuOffload:
    """The main weights of segments that are offloaded to the CPU, and the copies of gradients and weights."""

    def __init__(self, device: torch.device, segments: Sequence[OwnedSegment], config: OptimizerConfig) -> None:
        self.segments, self.side_stream = segments, SideStream(device)
        self.main_weights: list[Tensor] = []
        self._groups: list[list[_OffloadedOptimizerSegment]] = []
        size = -(-len(segments) // _GROUPS) if config.overlap_cpu_optimizer_d2h_h2d else len(segments)
        for place, segment in enumerate(segments):
            wide = torch.float64 if segment.data.dtype == torch.float64 else torch.float32
            count, main = (
                segment.data.numel(),
                empty_host_tensor(segment.data.numel(), wide, pinned=config.pin_cpu_params),
            )
            self.main_weights.append(main.copy_(segment.data))
            # Half-precision weights are rounded before they travel.
            weights = (
                main
                if segment.data.dtype == wide
                else empty_host_tensor(count, segment.data.dtype, pinned=config.pin_cpu_params)
            )
            if place % max(1, size) == 0:
                self._groups.append([])
            self._groups[-1].append(
                _OffloadedOptimizerSegment(
                    segment, main, empty_host_tensor(count, wide, pinned=config.pin_cpu_grads), weights
                )
            )

    def step(self, rule: UpdateRule, factor: float | Tensor, update_on_device: Callable[[], None]) -> None:
        """Copy gradients to the CPU, run the update rule there, and copy the weights back.

        factor: a scalar that multiplies the gradients. update_on_device: updates the segments that are not offloaded;
        called while gradients are being copied.
        """
        events = []
        for group in self._groups:
            with self.side_stream:
                for item in group:
                    item.gradient.copy_(item.segment.grad, non_blocking=True)
            events.append(self.side_stream.record_event())
        update_on_device()
        factor = float(factor)
        for event, group in zip(events, self._groups, strict=True):
            event.wait_on_host()
            for item in group:
                item.main.grad = item.gradient
            rule.step(factor)
            for item in group:
                item.main.grad = None
                if item.weights is not item.main:
                    item.weights.copy_(item.main)
            with self.side_stream:
                for item in group:
                    item.segment.data.copy_(item.weights, non_blocking=True)
        self.side_stream.join()

    def copy_loaded_weights(self) -> None:
        """After a checkpoint was loaded into fp32 weights, copy them into the main weights here."""
        for main, segment in zip(self.main_weights, self.segments, strict=True):
            if segment.data.dtype == main.dtype and segment.rounds_to is None:
                main.copy_(segment.data)


def split_segments_for_offload(segments: Sequence[OwnedSegment], fraction: float) -> tuple[list[OwnedSegment], int]:
    """Return the segments, and how many of them, from the first on, hold a share `fraction` of all elements.

    The segment in which that share ends is split in two.
    """
    left, parts = round(fraction * sum(segment.high - segment.low for segment in segments)), []
    count = 0
    for segment in segments:
        size = segment.high - segment.low
        inside = min(left, size)
        if inside:
            parts.append(_subsegment(segment, 0, inside))
            count, left = len(parts), left - inside
        if inside < size:
            parts.append(_subsegment(segment, inside, size))
    return parts, count


def _subsegment(segment: OwnedSegment, low: int, high: int) -> OwnedSegment:
    """Return elements [low, high) of a segment, relative to its start, as a segment."""
    return replace(
        segment,
        low=segment.low + low,
        high=segment.low + high,
        data=segment.data[low:high],
        grad=segment.grad[low:high],
    )
