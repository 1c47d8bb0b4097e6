"""This rank's place on every axis, and the process groups that go with it.

A `Mesh` is made once and passed; nothing about ranks is kept in module state. An axis of size 1 has no group, and
every collective over it returns its input: one code path serves a laptop and a cluster.

        dp 0        dp 1                 Mesh of tensor 2 x data 2 x pipeline 2, rank 5 in brackets:
      tp0 tp1     tp0 tp1                tp (4, 5) here 1;  dp (5, 7) here 0;  pp (1, 5) here 1
pp 0   0   1       2   3
pp 1   4  [5]      6   7
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.parallel.device import backend_of, compute_in_batches
from megatron.core.parallel.flight_recorder import FlightRecorder
from megatron.core.parallel.grid import axis_ranks, block_ranks
from megatron.core.parallel.overlap import Overlap


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the mesh. rank: this rank's place on it; ranks: global ranks; group: None at size 1.

    flight_recorder: where collectives over it are noted; overlap: what is computed during waits. All axes of a mesh share both.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    flight_recorder: FlightRecorder = field(default_factory=FlightRecorder, compare=False, repr=False)
    overlap: Overlap = field(default_factory=Overlap, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this rank stands at the beginning of the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank stands at the end of the axis."""
        return self.rank == self.size - 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where this rank stands. `pp_backward` is the pipeline again, with a group of its own for gradients.

    cp_inner, cp_outer: neighbours on cp, and those at the same place among theirs. blocks: neighbours that may share a sequence
    under --hybrid-context-parallel, one axis for every number of them.
    """

    device: torch.device
    tp: Axis
    cp: Axis
    cp_inner: Axis
    cp_outer: Axis
    dp: Axis
    pp: Axis
    pp_backward: Axis
    ep: Axis
    etp: Axis
    edp: Axis
    dp_cp: Axis
    tp_cp: Axis
    model: Axis
    embed: Axis
    mtp_embed: Axis
    world: Axis
    blocks: tuple[Axis, ...] = ()

    @staticmethod
    def single(device: torch.device | None = None) -> Mesh:
        """The mesh of one process, without torch.distributed."""
        flight_recorder, overlap = FlightRecorder(), Overlap()
        axes: dict[str, Any] = {
            field.name: Axis(field.name, flight_recorder=flight_recorder, overlap=overlap)
            for field in fields(Mesh)
            if field.name not in ("device", "blocks")
        }
        return Mesh(device=device or torch.device("cpu"), **axes)

    @staticmethod
    def build(parallel: ParallelConfig, device: torch.device) -> Mesh:
        """Make all groups. Every rank of the initialized default group calls this, with the same config."""
        compute_in_batches(device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        backend = backend_of(device, parallel.distributed_backend)
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        lists = axis_ranks(parallel, world_size)
        lists["pp_backward"] = lists["pp"]
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        axes, flight_recorder, overlap = {}, FlightRecorder(), Overlap()

        def axis(name: str, lists: tuple[tuple[int, ...], ...]) -> Axis:
            mine = _axis(name, lists, rank, made, backend, timeout)
            return replace(mine, flight_recorder=flight_recorder, overlap=overlap)

        for place in fields(Mesh):
            if place.name in ("device", "blocks"):
                continue
            if place.name == "pp_backward":
                made = {}
            axes[place.name] = axis(place.name, lists[place.name])
        made = {}
        blocks = tuple(axis(name, ranks) for name, ranks in block_ranks(parallel, world_size).items())
        return Mesh(device=device, blocks=blocks, **axes)

    @property
    def flight_recorder(self) -> FlightRecorder:
        """Where this rank notes what it does."""
        return self.world.flight_recorder

    @property
    def overlap(self) -> Overlap:
        """What this rank computes while it waits for others."""
        return self.world.overlap

    def sharing(self, size: int) -> Axis:
        """This rank and those with which it shares a sequence that is cut over so many."""
        return next(axis for axis in (self.cp, *self.blocks) if axis.size == size)

    def with_axes(self, axes: Mapping[str, Axis]) -> Mesh:
        """The mesh with other axes under some names."""
        changes: dict[str, Any] = dict(axes)
        return replace(self, **changes)

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        return getattr(self, name)


def _axis(
    name: str,
    lists: tuple[tuple[int, ...], ...],
    rank: int,
    made: dict[tuple[int, ...], dist.ProcessGroup],
    backend: str,
    timeout: timedelta,
) -> Axis:
    """This rank's axis. All ranks make all groups in the same order; equal lists of ranks share one group."""
    mine = Axis(name, ranks=(rank,))
    for ranks in lists:
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        if rank in ranks:
            mine = Axis(name, len(ranks), ranks.index(rank), ranks, made.get(ranks))
    return mine
