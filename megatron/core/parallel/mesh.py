"""This rank's coordinate on every mesh axis, and the process groups of the axes.

A `Mesh` is built once and passed as an argument; no rank information is module state. An axis of size 1 has no group, and
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
from megatron.core.parallel.device import process_group_backend, set_sched_batch_policy
from megatron.core.parallel.flight_recorder import FlightRecorder
from megatron.core.parallel.grid import axis_rank_groups, hybrid_cp_rank_groups
from megatron.core.parallel.overlap import OverlappedComputation

_PATIENCE = timedelta(days=7)  # of ranks that wait for work


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the device mesh.

    size: number of ranks on it. rank: this rank's coordinate. ranks: their global ranks, in order. group: the process
    group, None at size 1. flight_recorder: records the collectives over the axis. overlap: computation that runs during
    waits. All axes of a mesh share the last two.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    flight_recorder: FlightRecorder = field(default_factory=FlightRecorder, compare=False, repr=False)
    overlap: OverlappedComputation = field(default_factory=OverlappedComputation, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the axis."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last of the axis."""
        return self.rank == self.size - 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """The device mesh as one rank sees it: its device, and an `Axis` for each parallelism and merged group.

    pp_backward: the pipeline ranks again, with a separate group for gradients. cp_inner, cp_outer: the two levels of
    hierarchical context parallelism. hybrid_cp: groups of 2, 4, 8, ... neighbouring ranks that may share a sequence
    under --hybrid-context-parallel.
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
    tp_dp_cp: Axis
    model: Axis
    embed: Axis
    mtp_embed: Axis
    world: Axis
    hybrid_cp: tuple[Axis, ...] = ()

    @staticmethod
    def single_process(device: torch.device | None = None) -> Mesh:
        """Return the mesh of a single process, without torch.distributed."""
        flight_recorder, overlap = FlightRecorder(), OverlappedComputation()
        axes: dict[str, Any] = {
            field.name: Axis(field.name, flight_recorder=flight_recorder, overlap=overlap)
            for field in fields(Mesh)
            if field.name not in ("device", "hybrid_cp")
        }
        return Mesh(device=device or torch.device("cpu"), **axes)

    @staticmethod
    def build(parallel: ParallelConfig, device: torch.device, *, ranks: range | None = None) -> Mesh:
        """Create all process groups and return this rank's mesh.

        ranks: those of the mesh; None: all. Collective: every rank of the default group calls it with the same
        arguments; one that is not in the mesh gets axes of size 1.
        """
        set_sched_batch_policy(device)
        rank = dist.get_rank()
        ranks = range(dist.get_world_size()) if ranks is None else ranks
        backend = process_group_backend(device, parallel.distributed_backend)
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        lists = {
            name: _shift_ranks_of_groups(groups, ranks.start)
            for name, groups in axis_rank_groups(parallel, len(ranks)).items()
        }
        lists["pp_backward"] = lists["pp"]
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        axes, flight_recorder, overlap = {}, FlightRecorder(), OverlappedComputation()

        def create_axis(name: str, lists: tuple[tuple[int, ...], ...]) -> Axis:
            this_axis = _create_axis(name, lists, rank, groups, backend, timeout)
            return replace(this_axis, flight_recorder=flight_recorder, overlap=overlap)

        for mesh_field in fields(Mesh):
            if mesh_field.name in ("device", "hybrid_cp"):
                continue
            if mesh_field.name == "pp_backward":
                groups = {}
            axes[mesh_field.name] = create_axis(mesh_field.name, lists[mesh_field.name])
        groups = {}
        hybrid_cp = tuple(
            create_axis(name, _shift_ranks_of_groups(each, ranks.start))
            for name, each in hybrid_cp_rank_groups(parallel, len(ranks)).items()
        )
        return Mesh(device=device, hybrid_cp=hybrid_cp, **axes)

    @property
    def flight_recorder(self) -> FlightRecorder:
        """The recorder of this rank's collectives, shared by all axes."""
        return self.world.flight_recorder

    @property
    def overlap(self) -> OverlappedComputation:
        """The computation that this rank runs during waits, shared by all axes."""
        return self.world.overlap

    def context_axis_of_size(self, size: int) -> Axis:
        """Return the axis of this rank and the others over which a sequence is split into `size` shards."""
        return next(axis for axis in (self.cp, *self.hybrid_cp) if axis.size == size)

    def with_axes(self, axes: Mapping[str, Axis]) -> Mesh:
        """Return a copy of the mesh with the axes of these names replaced."""
        changes: dict[str, Any] = dict(axes)
        return replace(self, **changes)

    def axis(self, name: str) -> Axis:
        """Return the axis called `name`."""
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class SplitMeshJob:
    """A job whose first ranks form one mesh and whose last ranks another, such as training and generation.

    mesh: this rank's. training: number of ranks of the first. tensors, objects: axes of all ranks, for tensors and for
    picklable values; on the latter ranks may wait for each other for days.
    """

    mesh: Mesh
    training: int
    tensors: Axis
    objects: Axis

    @staticmethod
    def build(first: ParallelConfig, last: ParallelConfig, device: torch.device, *, last_ranks: int) -> SplitMeshJob:
        """Create the process groups of both meshes, and of two axes over all ranks.

        last_ranks: number of ranks of the second mesh. Collective: every rank of the default group calls it with the
        same arguments.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        training = size - last_ranks
        meshes = (
            Mesh.build(first, device, ranks=range(training)),
            Mesh.build(last, device, ranks=range(training, size)),
        )
        ranks, timeout = tuple(range(size)), timedelta(minutes=first.distributed_timeout_minutes)
        backend = process_group_backend(device, first.distributed_backend)
        tensor_group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        object_group = dist.new_group(list(ranks), backend="gloo", timeout=_PATIENCE)
        tensors = Axis("job", size, rank, ranks, tensor_group)
        objects = Axis("job objects", size, rank, ranks, object_group)
        return SplitMeshJob(meshes[rank >= training], training, tensors, objects)


def _shift_ranks_of_groups(groups: tuple[tuple[int, ...], ...], first: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups with `first` added to every rank."""
    return tuple(tuple(first + rank for rank in group) for group in groups)


def _create_axis(
    name: str,
    lists: tuple[tuple[int, ...], ...],
    rank: int,
    groups: dict[tuple[int, ...], dist.ProcessGroup],
    backend: str,
    timeout: timedelta,
) -> Axis:
    """Return this rank's axis, creating the process groups of all ranks.

    lists: the ranks of every group of the axis. groups: process groups created so far, by their ranks; equal lists
    share one group. All ranks create all groups in the same order, as torch.distributed requires.
    """
    result = Axis(name, ranks=(rank,))
    for ranks in lists:
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        if rank in ranks:
            result = Axis(name, len(ranks), ranks.index(rank), ranks, groups.get(ranks))
    return result
