"""The sums that layouts ask for, once data-parallel ranks agree.

All of them work on what this rank owns. Tensor ranks cut their buffers alike, as do the ranks that share an expert's
matrices and the two stages that hold a tied matrix; so owned pieces can be summed as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.distributed.buffers import Segment
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import local_shards


def finalize(segments: Sequence[Segment], mesh: Mesh) -> None:
    """Make every owned gradient the gradient of the whole network."""
    sum_replicated(segments, mesh)
    sum_shared_heads(segments, mesh)
    sum_tied(segments, mesh)


def sum_replicated(segments: Sequence[Segment], mesh: Mesh) -> None:
    """Parameters that every tensor rank holds but of which each saw only some positions or heads; of experts likewise."""
    for axis in ("tp", "etp"):
        _all_reduce_together([s.grad for s in segments if axis in s.spec.sum_over], mesh.axis(axis))


def sum_shared_heads(segments: Sequence[Segment], mesh: Mesh) -> None:
    """Key/value heads that several tensor ranks hold copies of: each copy served other query heads."""
    shared: dict[int, list[Tensor]] = {}
    for segment in segments:
        for low, high, copies, _ in copied_ranges(segment, mesh):
            shared.setdefault(copies, []).append(segment.grad[low:high])
    for copies, views in sorted(shared.items()):
        flat = torch.cat(views)
        table = flat.new_zeros((mesh.tp.size // copies, flat.numel()))
        own = table[mesh.tp.rank // copies]
        own.copy_(flat)
        collectives.all_reduce(table, mesh.tp)
        _scatter(own, views)


def sum_tied(segments: Sequence[Segment], mesh: Mesh) -> None:
    """A matrix that embeds on the first stage and predicts on the last, or embeds again for multi-token prediction.

    Where a pipeline goes there and back, two of its homes are on one rank.
    """
    for axis in ("embed", "mtp_embed"):
        homes: dict[str, list[Tensor]] = {}
        for segment in segments:
            if segment.spec.tied and segment.spec.tied_over == axis:
                homes.setdefault(segment.name, []).append(segment.grad)
        for first, *others in homes.values():
            for other in others:
                first += other
        _all_reduce_together([own[0] for own in homes.values()], mesh.axis(axis))
        for first, *others in homes.values():
            for other in others:
                other.copy_(first)


def copied_ranges(segment: Segment, mesh: Mesh) -> list[tuple[int, int, int, bool]]:
    """(low, high, copies, whether ours is the first copy) of the ranges of `segment.grad` that other ranks hold too."""
    row = 1
    for size in segment.local_shape[1:]:
        row *= size
    ranges = []
    for piece in local_shards(segment.spec, mesh):
        if piece.replicas > 1:
            start = piece.local.offset[0] * row
            low, high = max(segment.low, start), min(segment.high, start + piece.local.shape[0] * row)
            if low < high:
                ranges.append((low - segment.low, high - segment.low, piece.replicas, piece.is_first_replica))
    return ranges


def _all_reduce_together(views: list[Tensor], axis: Axis) -> None:
    if views and axis.group is not None:
        together = torch.cat(views)
        collectives.all_reduce(together, axis)
        _scatter(together, views)


def _scatter(together: Tensor, views: list[Tensor]) -> None:
    for view, value in zip(views, together.split([view.numel() for view in views]), strict=True):
        view.copy_(value)
