"""ParamSpec, the record that every parameter carries, and what follows from it: local shapes, shards, initial values.

A layer declares the global parameter, as if there were one rank, and how it is sharded:

    key = FusedWeightSegment(kv, replicas)
    parameter(ParamSpec(shape=(q + 2 * kv, h), shards=(Shard(0, "tp", (FusedWeightSegment(q), key, key)),), ...))

A sharded dimension is a concatenation of segments, each of which is divided over the axis separately. When an axis has
more ranks than a segment has units (key/value heads), `replicas` neighbouring ranks hold the same shard. A segment
whose size the axis does not divide is padded (the vocabulary); padding belongs to no box, so checkpoints and initial
values never contain it.

    segment q, 4 ranks:     [q0 | q1 | q2 | q3]      segment kv, 2 replicas:   [k0 | k0 | k1 | k1]
    held by rank 2:         [q2 | k1 | v1]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megatron.core.parallel.boxes import Box
from megatron.core.parallel.mesh import Mesh

Initial = Callable[[tuple[int, ...], torch.Generator], Tensor]
# rows of a "table" are looked up, like those of the embedding; lora_a and lora_b are the factors of an adapter; in_proj is a state-space mixer's
# projection to parts of different roles, conv its convolution
Kind = Literal["matrix", "table", "vector", "embedding", "qk_norm", "lora_a", "lora_b", "in_proj", "conv"]


@dataclass(frozen=True, slots=True)
class FusedWeightSegment:
    """One segment of a sharded dimension, such as q, k or v of a fused matrix.

    size: global length without padding. replicas: number of ranks that hold the same shard. padded: length that is
    divided, if larger than `size`.
    """

    size: int
    replicas: int = 1
    padded: int | None = None

    def local_size(self, ranks: int) -> int:
        """Return the length of one rank's shard, padding included, on an axis of `ranks` ranks."""
        return (self.padded or self.size) * self.replicas // ranks


@dataclass(frozen=True, slots=True)
class ShardedDim:
    """Dimension `dim` of a parameter is sharded over mesh axis `axis`, each of its segments separately."""

    dim: int
    axis: str
    segments: tuple[FusedWeightSegment, ...]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The global description of a parameter.

    shape: global shape. init: draws its initial values. kind: its role in the layer, which optimizers and
    initialization look at. shards: how its dimensions are sharded. sum_over: axes over which each rank's gradient is
    only a partial sum. reduce_over: the data-parallel axis that averages its gradient. tied: two or three pipeline
    stages hold a copy; tied_over: the axis of those stages. stacked: dimension 0 counts parameters (experts) that have
    their initial values drawn separately. name: global name, set by `set_global_param_names`. starts_from: the
    parameter whose values it takes where a checkpoint lacks it, "" for its initial values; None: a checkpoint must have
    it. lr_ratio: its learning rate over that of others.
    """

    shape: tuple[int, ...]
    init: Initial
    kind: Kind
    shards: tuple[ShardedDim, ...] = ()
    sum_over: tuple[str, ...] = ()
    reduce_over: str = "dp_cp"
    tied: bool = False
    tied_over: str = "embed"
    stacked: bool = False
    name: str = ""
    starts_from: str | None = None
    lr_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class LocalShardBox:
    """One rectangle of a parameter that this rank holds.

    box: its position in the global tensor. local: its position in the local tensor. replicas: number of ranks that hold
    it. is_first_replica: whether this rank is the first of them.
    """

    box: Box
    local: Box
    replicas: int
    is_first_replica: bool


def local_shape(spec: ParamSpec, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the tensor that this rank holds, padding included."""
    shape = list(spec.shape)
    for shard in spec.shards:
        shape[shard.dim] = sum(part.local_size(mesh.axis(shard.axis).size) for part in shard.segments)
    return tuple(shape)


def local_shard_boxes(spec: ParamSpec, mesh: Mesh) -> list[LocalShardBox]:
    """Return the global tensor's rectangles that this rank holds. At most one dimension has several segments."""
    return list(
        _local_shard_boxes(spec, tuple((axis.size, axis.rank) for axis in (mesh.axis(c.axis) for c in spec.shards)))
    )


@lru_cache(maxsize=1 << 16)  # called for each parameter several times a step
def _local_shard_boxes(spec: ParamSpec, coordinates: tuple[tuple[int, int], ...]) -> tuple[LocalShardBox, ...]:
    """Compute `local_shard_boxes`. coordinates: (size, rank) of the axis of each of `spec.shards`."""
    shards = [LocalShardBox(Box((0,) * len(spec.shape), spec.shape), Box((0,) * len(spec.shape), spec.shape), 1, True)]
    for shard, (size, rank) in zip(spec.shards, coordinates, strict=True):
        shards = [cut_piece for piece in shards for cut_piece in _boxes_held_by_rank(piece, shard, size, rank)]
    return tuple(shards)


def _boxes_held_by_rank(outer: LocalShardBox, shard: ShardedDim, size: int, rank: int) -> Iterator[LocalShardBox]:
    """Yield the rectangles of `outer` that rank `rank` of `size` holds when dimension `shard.dim` is sharded."""
    start, local_start = 0, 0
    for part in shard.segments:
        length = part.local_size(size)
        begin = rank // part.replicas * length
        local_length = max(0, min(length, part.size - begin))
        if local_length:
            yield LocalShardBox(
                _replace_box_dim(outer.box, shard.dim, start + begin, local_length),
                _replace_box_dim(outer.local, shard.dim, local_start, local_length),
                outer.replicas * part.replicas,
                outer.is_first_replica and rank % part.replicas == 0,
            )
        start, local_start = start + part.size, local_start + length


def _replace_box_dim(box: Box, dim: int, offset: int, size: int) -> Box:
    """Return the box with another offset and size along one dimension."""
    offsets, shape = list(box.offset), list(box.shape)
    offsets[dim], shape[dim] = offset, size
    return Box(tuple(offsets), tuple(shape))


def meta_parameter(spec: ParamSpec, mesh: Mesh, dtype: torch.dtype) -> nn.Parameter:
    """Return an empty parameter on the meta device, with its spec; `rng.materialize_parameters` gives it values."""
    param = nn.Parameter(torch.empty(local_shape(spec, mesh), dtype=dtype, device="meta"))
    param.spec = spec  # type: ignore[attr-defined]
    return param


def param_spec_of(param: nn.Parameter) -> ParamSpec:
    """Return the `ParamSpec` that a parameter carries."""
    return param.spec  # type: ignore[attr-defined]


class QuantizedStorage(Protocol):
    """The values of a parameter that stays on the meta device (`FrozenQuantizedWeight` implements it)."""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Boxes of the global tensor that are given to `quantize_box`, one by one, when values are drawn or loaded."""

    @property
    def unquantized_hashes(self) -> list[Tensor | None]:
        """Of each local box the hash (int64 []) of its values before quantization; None if none were stored."""

    def quantize_box(self, index: int, values: Tensor) -> None:
        """Quantize and store the values of a box, given by its index; values have the shape of the box (any shape)."""

    def storage_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors (any shape) that store the quantized values."""

    def dequantized(self) -> Tensor:
        """Return this rank's shard dequantized, newly allocated, [..., rows, columns], in the parameter's dtype."""


def quantized_storage_of(param: Tensor) -> QuantizedStorage | None:
    """Return the quantized values that stand for a parameter (any shape), or None if it is not quantized."""
    return getattr(param, "quantized", None)


def set_global_param_names(module: nn.Module) -> None:
    """Write each parameter's global name (its module path) into its spec; a tied parameter already has one."""
    for path, param in module.named_parameters():
        if not param_spec_of(param).name:
            param.spec = dataclasses.replace(param_spec_of(param), name=path)  # type: ignore[attr-defined]


def tensor_parallel_axis_name(spec: ParamSpec) -> str:
    """Return the name of the tensor-parallel axis of this parameter: "etp" for experts, else "tp"."""
    return "etp" if spec.reduce_over == "edp" else "tp"


def is_replicated_over_tensor(spec: ParamSpec) -> bool:
    """Return whether every tensor-parallel rank holds the whole parameter."""
    return not any(shard.axis == tensor_parallel_axis_name(spec) for shard in spec.shards)


def normal_initializer(deviation: float) -> Initial:
    """Return an initializer that draws from a normal distribution with mean 0 and this standard deviation."""
    return lambda shape, generator: torch.empty(shape, device=generator.device).normal_(
        0.0, deviation, generator=generator
    )


def xavier_uniform_initializer() -> Initial:
    """Return the uniform initializer of Glorot and Bengio (2010), for a matrix [out, in]."""

    def draw_xavier_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        bound = (6.0 / (shape[0] + shape[1])) ** 0.5
        return torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator)

    return draw_xavier_uniform


def constant_initializer(value: float) -> Initial:
    """Return an initializer that sets every element to `value`."""
    return lambda shape, generator: torch.full(shape, value, device=generator.device)
