from __future__ import annotations

from dataclasses import fields

import torch

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.parallel.grid import axis_rank_groups
from megatron.core.parallel.mesh import Mesh
from tests.helpers.world import Worlds
from tests.unit.parallel import ranks


def test_the_mesh_of_one_process_has_only_axes_of_one_and_no_groups() -> None:
    mesh = Mesh.single_process()
    axes = [mesh.axis(field.name) for field in fields(Mesh) if field.name not in ("device", "hybrid_cp")]
    assert all((axis.size, axis.rank, axis.ranks, axis.group) == (1, 0, (0,), None) for axis in axes)
    assert mesh.device == torch.device("cpu") and mesh.tp.is_first and mesh.tp.is_last


def test_every_rank_stands_where_the_grid_says(world: Worlds) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    lists = axis_rank_groups(ParallelConfig(**sizes), 4)
    for rank, found in enumerate(world(4).run(ranks.places, sizes)):
        for name, (called, size, place, members, groupless) in found.items():
            expected = next((group for group in lists[name.removesuffix("_backward")] if rank in group), (rank,))
            assert (called, members, size, place) == (name, expected, len(expected), expected.index(rank))
            assert groupless == (size == 1), f"{name} of size {size}"
