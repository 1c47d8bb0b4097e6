"""Gradient sums over axes other than data parallelism, after the data-parallel reduction.

All of them work on the segments that this rank owns. Tensor ranks shard their buffers alike, as do the ranks that share
an expert's matrices and the two stages that hold a tied matrix, so owned segments can be summed as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import local_shard_boxes


def finalize_gradients(segments: Sequence[OwnedSegment], mesh: Mesh) -> None:
    """Sum every owned gradient, in place, over the tensor and pipeline ranks that hold parts of it. Collective."""
    sum_replicated_grads(segments, mesh)
    sum_shared_kv_head_grads(segments, mesh)
    sum_tied_grads(segments, mesh)


def sum_replicated_grads(segments: Sequence[OwnedSegment], mesh: Mesh) -> None:
    """Sum gradients of parameters replicated over tensor ranks, each of which saw some positions or heads."""
    for axis in ("tp", "etp"):
        collectives.all_reduce_together([s.grad for s in segments if axis in s.spec.sum_over], mesh.axis(axis))


def sum_shared_kv_head_grads(segments: Sequence[OwnedSegment], mesh: Mesh) -> None:
    """Sum the gradients of key/value heads that several tensor ranks replicate: each replica served other query heads."""
    shared: dict[int, list[Tensor]] = {}
    for segment in segments:
        for low, high, replicas, _ in ranges_replicated_over_tensor(segment, mesh):
            shared.setdefault(replicas, []).append(segment.grad[low:high])
    for replicas, views in sorted(shared.items()):
        flat = torch.cat(views)
        table = flat.new_zeros((mesh.tp.size // replicas, flat.numel()))
        table_row = table[mesh.tp.rank // replicas]
        table_row.copy_(flat)
        collectives.all_reduce(table, mesh.tp)
        torch._foreach_copy_(views, list(table_row.split([view.numel() for view in views])))


def sum_tied_grads(segments: Sequence[OwnedSegment], mesh: Mesh) -> None:
    """Sum the gradients of a matrix that is the embedding on one stage, and output layer or embedding on another.

    With a V-shaped placement both copies can be on one rank.
    """
    for axis in ("embed", "mtp_embed"):
        copies: dict[str, list[Tensor]] = {}
        for segment in segments:
            if segment.spec.tied and segment.spec.tied_over == axis:
                copies.setdefault(segment.name, []).append(segment.grad)
        for first, *others in copies.values():
            for other in others:
                first += other
        collectives.all_reduce_together([grads[0] for grads in copies.values()], mesh.axis(axis))
        for first, *others in copies.values():
            for other in others:
                other.copy_(first)


def ranges_replicated_over_tensor(segment: OwnedSegment, mesh: Mesh) -> list[tuple[int, int, int, bool]]:
    """Return (low, high, replicas, is_first_replica) of the ranges of `segment.grad` that other tensor ranks hold too."""
    row, ranges = math.prod(segment.local_shape[1:]), []
    for piece in local_shard_boxes(segment.spec, mesh):
        if piece.replicas > 1:
            start = piece.local.offset[0] * row
            low, high = max(segment.low, start), min(segment.high, start + piece.local.shape[0] * row)
            if low < high:
                ranges.append((low - segment.low, high - segment.low, piece.replicas, piece.is_first_replica))
    return ranges
