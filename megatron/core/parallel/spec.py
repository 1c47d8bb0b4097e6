"""The one record a parameter carries, and what follows from it.

A layer states the whole parameter, as if there were one rank, and how it is sharded:

    key = FusedSegment(kv, replicas)
    parameter(ParamSpec(shape=(q + 2 * kv, h), shards=(Shard(0, "tp", (FusedSegment(q), key, key)),), ...))

A sharded dimension is made of segments laid end to end, each divided over the axis by itself. When an axis has more ranks
than a segment has units (key/value heads), `replicas` neighbouring ranks hold the same shard. A segment whose size the
axis does not divide is padded (the vocabulary); padding belongs to no box, so checkpoints and initial values never see it.

    segment q, 4 ranks:     [q0 | q1 | q2 | q3]      segment kv, 2 replicas:   [k0 | k0 | k1 | k1]
    held by rank 2:         [q2 | k1 | v1]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from megatron.core.parallel.boxes import Box
from megatron.core.parallel.mesh import Mesh

Initial = Callable[[tuple[int, ...], torch.Generator], Tensor]
# a table is looked up, as is the embedding; lora_a and lora_b are the factors of an adapter
Kind = Literal["matrix", "table", "vector", "embedding", "qk_norm", "lora_a", "lora_b"]


@dataclass(frozen=True, slots=True)
class FusedSegment:
    """A segment of a sharded dimension, as q, k and v of a fused matrix. size: true length; replicas: ranks that hold the same shard
    of it; padded: length that is divided."""

    size: int
    replicas: int = 1
    padded: int | None = None

    def local_size(self, ranks: int) -> int:
        """Length of one rank's shard, padding included."""
        return (self.padded or self.size) * self.replicas // ranks


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension `dim` is sharded over mesh axis `axis`, each segment by itself."""

    dim: int
    axis: str
    parts: tuple[FusedSegment, ...]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter's place in the whole.

    shape: true global shape. sum_over: axes over which every rank's gradient is only a share. reduce_over: data axis
    that averages it. tied: held by two pipeline stages or three, which are on axis tied_over. stacked: dimension 0 counts
    parameters (experts) with initial values of their own. name: global name, filled in by `name_all`.
    """

    shape: tuple[int, ...]
    init: Initial
    kind: Kind
    shards: tuple[Shard, ...] = ()
    sum_over: tuple[str, ...] = ()
    reduce_over: str = "dp_cp"
    tied: bool = False
    tied_over: str = "embed"
    stacked: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One rectangle this rank holds: `box` in the global tensor, `local` in its own tensor, shared by `replicas` ranks."""

    box: Box
    local: Box
    replicas: int
    is_first_replica: bool


def local_shape(spec: ParamSpec, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the tensor that this rank holds, padding included."""
    shape = list(spec.shape)
    for cut in spec.shards:
        shape[cut.dim] = sum(part.local_size(mesh.axis(cut.axis).size) for part in cut.parts)
    return tuple(shape)


def local_shards(spec: ParamSpec, mesh: Mesh) -> list[LocalShard]:
    """The rectangles of the global tensor that this rank holds. At most one dimension of a parameter has more than one segment."""
    return list(_local_shards(spec, tuple((axis.size, axis.rank) for axis in (mesh.axis(c.axis) for c in spec.shards))))


@lru_cache(maxsize=1 << 16)  # asked for each parameter several times a step, and the same in each
def _local_shards(spec: ParamSpec, places: tuple[tuple[int, int], ...]) -> tuple[LocalShard, ...]:
    """places: (size, rank) of the axis of each of `spec.shards`."""
    held = [LocalShard(Box((0,) * len(spec.shape), spec.shape), Box((0,) * len(spec.shape), spec.shape), 1, True)]
    for cut, (size, rank) in zip(spec.shards, places, strict=True):
        held = [cut_piece for piece in held for cut_piece in _cut(piece, cut, size, rank)]
    return tuple(held)


def _cut(piece: LocalShard, cut: Shard, size: int, rank: int) -> Iterator[LocalShard]:
    start, local_start = 0, 0
    for part in cut.parts:
        length = part.local_size(size)
        begin = rank // part.replicas * length
        held = max(0, min(length, part.size - begin))
        if held:
            yield LocalShard(
                _replace(piece.box, cut.dim, start + begin, held),
                _replace(piece.local, cut.dim, local_start, held),
                piece.replicas * part.replicas,
                piece.is_first_replica and rank % part.replicas == 0,
            )
        start, local_start = start + part.size, local_start + length


def _replace(box: Box, dim: int, offset: int, size: int) -> Box:
    offsets, shape = list(box.offset), list(box.shape)
    offsets[dim], shape[dim] = offset, size
    return Box(tuple(offsets), tuple(shape))


def parameter(spec: ParamSpec, mesh: Mesh, dtype: torch.dtype) -> nn.Parameter:
    """An empty parameter on the meta device that carries its spec; `materialize` gives it its values."""
    made = nn.Parameter(torch.empty(local_shape(spec, mesh), dtype=dtype, device="meta"))
    made.spec = spec  # type: ignore[attr-defined]
    return made


def spec_of(param: nn.Parameter) -> ParamSpec:
    """The record that a parameter carries."""
    return param.spec  # type: ignore[attr-defined]


def name_all(module: nn.Module) -> None:
    """Write each parameter's global name (its module path) into its spec. A tied parameter has one already."""
    for path, param in module.named_parameters():
        if not spec_of(param).name:
            param.spec = dataclasses.replace(spec_of(param), name=path)  # type: ignore[attr-defined]


def tensor_axis(spec: ParamSpec) -> str:
    """The axis whose ranks share each matrix of this parameter: experts have one of their own."""
    return "etp" if spec.reduce_over == "edp" else "tp"


def is_shared_over_tensor(spec: ParamSpec) -> bool:
    """Whether every tensor rank holds the whole parameter."""
    return not any(cut.axis == tensor_axis(spec) for cut in spec.shards)


def normal(deviation: float) -> Initial:
    """Initial values drawn from a normal distribution around zero."""
    return lambda shape, generator: torch.empty(shape, device=generator.device).normal_(
        0.0, deviation, generator=generator
    )


def xavier_uniform() -> Initial:
    """Initial values drawn by Glorot and Bengio's uniform rule (2010), for a matrix [out, in]."""

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        bound = (6.0 / (shape[0] + shape[1])) ** 0.5
        return torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator)

    return draw


def constant(value: float) -> Initial:
    """The same initial value everywhere."""
    return lambda shape, generator: torch.full(shape, value, device=generator.device)
