"""Which boxes of which global tensor this rank holds: the form in which a run's state meets its checkpoint.

    state = {"model.decoder.layers.3.mlp.linear_fc1.weight": Placed(shape=(512, 128), pieces=[(box, tensor), ...]), ...}

A parameter's boxes follow from its spec. A slot of the optimizer (a moment, a master weight) belongs to a segment: a
flat range of the local parameter. A flat range is a few boxes of the local tensor, and each meets a few pieces of the
global one:

    local [q1 | k0 | v0], two heads a part, of which the segment owns *:     . . . . | . * * * | * * . .
    global [q0 q1 q2 q3 | k0 k1 | v0 v1]: one box in k and one in v

All tensors are views: saving reads the run's own memory, and loading writes into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron.core.parallel.boxes import Box, boxes_of_flat_range, intersect, whole_box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, local_shards, spec_of


@dataclass(slots=True)
class Placed:
    """The boxes of a global tensor that this rank holds, with their values. Padding is in no box."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Box, Tensor]] = field(default_factory=list)


Tree = dict[str, Any]  # name -> Placed, a tensor that every rank holds alike, or a value that JSON can say


class Segment(Protocol):
    """Flat elements [low, high) of a local parameter. (`distributed.buffers.Segment` is one.)"""

    @property
    def spec(self) -> ParamSpec:
        """Of the parameter."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's tensor."""

    @property
    def low(self) -> int:
        """The first element."""

    @property
    def high(self) -> int:
        """Behind the last element."""


def placed_tensor(tensor: Tensor) -> Placed:
    """A tensor that this rank holds whole."""
    return Placed(tuple(tensor.shape), tensor.dtype, [(whole_box(tuple(tensor.shape)), tensor.detach())])


def placed_parameter(param: nn.Parameter, mesh: Mesh) -> Placed:
    """What this rank holds of a parameter."""
    spec, local = spec_of(param), param.detach()
    return Placed(
        spec.shape, param.dtype, [(piece.box, local[piece.local.slices()]) for piece in local_shards(spec, mesh)]
    )


def placed_segment(segment: Segment, tensor: Tensor, mesh: Mesh) -> Placed:
    """What this rank holds of a slot of the optimizer. tensor: flat, with an element for each of the segment's."""
    expected = segment.high - segment.low
    assert tensor.shape == (expected,), (
        f"a slot of {segment.spec.name} has shape {tuple(tensor.shape)}, not ({expected},)"
    )
    spec, flat_tensor = segment.spec, tensor.detach()
    placed = Placed(spec.shape, tensor.dtype)
    for box, start, stop in boxes_of_flat_range(segment.local_shape, segment.low, segment.high):
        values = flat_tensor[start - segment.low : stop - segment.low].view(box.shape)
        for piece in local_shards(spec, mesh):
            common = intersect(box, piece.local)
            if common is not None:
                inside = common.shifted(_minus(box.offset))
                outside = common.shifted(_minus(piece.local.offset)).shifted(piece.box.offset)
                placed.pieces.append((outside, values[inside.slices()]))
    return placed


def put(tree: Tree, name: str, placed: Placed) -> None:
    """Add to the tree. A name may be held twice on a rank (both ends of a tied matrix); then all its pieces count."""
    there = tree.get(name)
    if there is None:
        tree[name] = placed
        return
    assert there.shape == placed.shape, f"{name} has shape {there.shape} here and {placed.shape} there"
    there.pieces += placed.pieces


def _minus(offset: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-start for start in offset)
