"""Norm and zeros of the gradient: every element of the network is counted exactly once, under any layout.

Not counted: replicas on tensor and data ranks other than the first, replicas of key/value heads but the first, the
second copy of a tied matrix. Which ranks hold replicas differs between experts and the rest of the network, so sums run
over all ranks. Padding is zero and adds nothing to a norm; counts leave it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.distributed.finalize import ranges_replicated_over_tensor
from megatron.core.parallel import collectives
from megatron.core.parallel.boxes import boxes_of_flat_range, intersect
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import is_replicated_over_tensor, local_shard_boxes, tensor_parallel_axis_name

_BLOCK = 2**18  # elements whose squares are summed in fp32 on a CPU, where a sum over 40M would be off by a thousandth


def gradient_ranges_counted_once(segment: OwnedSegment, mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield the ranges [low, high) of a segment, relative to its start, that this rank counts: first replicas."""
    spec = segment.spec
    if not segment.sharded and not mesh.axis(spec.reduce_over).is_first:
        return
    if is_replicated_over_tensor(spec) and not mesh.axis(tensor_parallel_axis_name(spec)).is_first:
        return
    if spec.tied and not mesh.axis(spec.tied_over).is_first:
        return
    start = 0
    for low, high, _, is_first_replica in ranges_replicated_over_tensor(segment, mesh):
        if not is_first_replica:
            yield start, low
            start = high
    yield start, segment.high - segment.low


def without_tied_duplicates(segments: Sequence[OwnedSegment]) -> list[OwnedSegment]:
    """Return the segments without the second copy of a tied matrix: in a V-shaped pipeline a rank can have both."""
    homes: dict[str, OwnedSegment] = {}
    return [
        segment for segment in segments if not segment.spec.tied or homes.setdefault(segment.name, segment) is segment
    ]


def global_norm(segments: Sequence[OwnedSegment], mesh: Mesh, *, of: str = "grad") -> Tensor:
    """Return the 2-norm of the network's gradient (of="data": of its weights): fp64 [], on all ranks. Collective."""
    views = [
        getattr(segment, of)[low:high]
        for segment in without_tied_duplicates(segments)
        for low, high in gradient_ranges_counted_once(segment, mesh)
        if low < high
    ]
    # fp64 on every rank, also on one that counts nothing; and never in fp16, whose largest number a scaled gradient passes.
    if views:
        if mesh.device.type == "cpu":
            views = [block for view in views for block in view.split(_BLOCK)]
        wide = torch.float64 if views[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(views, 2.0, dtype=wide)).double()
        total = norms.dot(norms)
    else:
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    return collectives.all_reduce(total, mesh.world).sqrt()


def count_zeros(segments: Sequence[OwnedSegment], mesh: Mesh) -> Tensor:
    """Return the number of zero elements in the whole network's gradient: int64 [], equal on all ranks. Collective."""
    zeros = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for segment in without_tied_duplicates(segments):
        held = [piece.local for piece in local_shard_boxes(segment.spec, mesh)]
        for low, high in gradient_ranges_counted_once(segment, mesh):
            for box, start, stop in boxes_of_flat_range(segment.local_shape, segment.low + low, segment.low + high):
                true = sum(common.num_elements for piece in held if (common := intersect(box, piece)) is not None)
                padding = (stop - start) - true  # padded rows never receive a gradient: all their elements are zero
                zeros += (segment.grad[start - segment.low : stop - segment.low] == 0).sum() - padding
    return collectives.all_reduce(zeros, mesh.world)
