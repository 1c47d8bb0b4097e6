"""The tree of a run's state for checkpoints: which boxes of which global tensor this rank holds.

    state = {"model.decoder.layers.3.mlp.linear_fc1.weight": ShardedTensor(shape=(512, 128), pieces=[(box, tensor), ...]), ...}

A parameter's boxes follow from its spec. Optimizer state (a moment, a main weight) belongs to a segment: a flat range
of the local parameter. A flat range is a few boxes of the local tensor, each of which intersects a few boxes of the
global one:

    local [q1 | k0 | v0], two heads a part, of which the segment owns *:     . . . . | . * * * | * * . .
    global [q0 q1 q2 q3 | k0 k1 | v0 v1]: one box in k and one in v

All tensors are views: saving reads the run's memory, and loading writes into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core.parallel.boxes import Box, boxes_of_flat_range, intersect, whole_box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, local_shard_boxes, param_spec_of, quantized_storage_of


@dataclass(slots=True)
class ShardedTensor:
    """The boxes of a global tensor that this rank holds, with their values. Padding is in no box.

    receivers: boxes whose values are read and given to a function, where the rank holds no tensor of them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Box, Tensor]] = field(default_factory=list)
    receivers: list[tuple[Box, Callable[[Tensor], None]]] = field(default_factory=list)


Tree = dict[str, Any]  # name -> ShardedTensor, a tensor that every rank holds alike, or a value that JSON can say


class FlatParamRange(Protocol):
    """Flat elements [low, high) of a local parameter (`distributed.buffers.OwnedSegment` implements it)."""

    @property
    def spec(self) -> ParamSpec:
        """Spec of the parameter."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""

    @property
    def low(self) -> int:
        """First element."""

    @property
    def high(self) -> int:
        """One past the last element."""


def replicated_tensor(tensor: Tensor) -> ShardedTensor:
    """Return the tree entry of a tensor of any shape that this rank holds as a whole."""
    return ShardedTensor(tuple(tensor.shape), tensor.dtype, [(whole_box(tuple(tensor.shape)), tensor.detach())])


def sharded_parameter(param: nn.Parameter, mesh: Mesh) -> ShardedTensor:
    """Return the tree entry of a parameter of any shape: its global shape, and the boxes that this rank holds."""
    spec, local, quantized = param_spec_of(param), param.detach(), quantized_storage_of(param)
    if quantized is not None:
        receivers = [(box, partial(quantized.quantize_box, index)) for index, box in enumerate(quantized.boxes)]
        return ShardedTensor(spec.shape, param.dtype, receivers=list(receivers))
    return ShardedTensor(
        spec.shape, param.dtype, [(piece.box, local[piece.local.slices()]) for piece in local_shard_boxes(spec, mesh)]
    )


def sharded_optimizer_state(segment: FlatParamRange, tensor: Tensor, mesh: Mesh) -> ShardedTensor:
    """Return the tree entry of optimizer state: the boxes of the parameter that the segment covers.

    tensor: flat, [elements of the segment].
    """
    expected = segment.high - segment.low
    assert tensor.shape == (expected,), (
        f"a slot of {segment.spec.name} has shape {tuple(tensor.shape)}, not ({expected},)"
    )
    spec, flat_tensor = segment.spec, tensor.detach()
    placed = ShardedTensor(spec.shape, tensor.dtype)
    for box, start, stop in boxes_of_flat_range(segment.local_shape, segment.low, segment.high):
        values = flat_tensor[start - segment.low : stop - segment.low].view(box.shape)
        for piece in local_shard_boxes(spec, mesh):
            common = intersect(box, piece.local)
            if common is not None:
                inside = common.shifted(_negated_offset(box.offset))
                outside = common.shifted(_negated_offset(piece.local.offset)).shifted(piece.box.offset)
                placed.pieces.append((outside, values[inside.slices()]))
    return placed


def add_sharded_tensor(tree: Tree, name: str, placed: ShardedTensor) -> None:
    """Add an entry to the tree, to the boxes of the same name if there are some (both copies of a tied matrix)."""
    there = tree.get(name)
    if there is None:
        tree[name] = placed
        return
    assert there.shape == placed.shape, f"{name} has shape {there.shape} here and {placed.shape} there"
    there.pieces += placed.pieces
    there.receivers += placed.receivers


def _negated_offset(offset: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-start for start in offset)
