"""What a layout builds, against the network on one rank: layers of all stages, and parameters of every rank and of the whole.

Nothing runs and nothing takes memory: each rank's place is a mesh without process groups, and parameters lie on the meta device.
Ranks that differ only in their data are alike, so one of them is built. Two things are compared:

    the boxes of all ranks  with the true shape of every named parameter: each element is somewhere
    all named parameters    with those of one rank that has everything
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.stages import StageSpec, stage_specs_of_run
from megatron.core.config.settings.run import RunConfig
from megatron.core.models.describe import count_parameters, global_parameter_shapes
from megatron.core.models.on_meta import build_stage_on_meta
from megatron.core.parallel.grid import RankLists, axis_rank_groups
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import ParamSpec, local_shard_boxes, param_spec_of


@dataclass(frozen=True, slots=True)
class LayoutParameterCheckResult:
    """Result of `check_layout_parameters`. ranks: that were built. layers, parameters: of the whole network."""

    ranks: int
    layers: int
    parameters: int
    problems: tuple[str, ...]


def check_layout_parameters(
    config: RunConfig, world_size: int, *, true_vocab_size: int = 50257, most: int = 64
) -> LayoutParameterCheckResult:
    """Build the stages of a layout on the meta device and compare them with the network on one rank. Raises nothing for
    what differs. most: ranks to build; of more, the first and the last.
    """
    model = config.model.with_vocabulary(true_vocab_size, config.parallel.tp)
    # A vocabulary without padding.
    config = replace(config, model=replace(model, true_vocab_size=model.padded_vocab_size))
    stages, problems = stage_specs_of_run(config), []
    layers = sum(len(stage.layers) for stage in stages)
    expected = len(network_layer_plans(config.model))
    if layers != expected:
        problems.append(f"the stages have {layers} layers, and the network {expected}")
    places = _representative_rank_meshes(config, world_size)
    built = places if len(places) <= most else places[: most // 2] + places[-(most // 2) :]
    boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for spec, mesh in _parameter_specs(config, stages, built):
        shapes[spec.name] = spec.shape
        boxes.setdefault(spec.name, set()).update(
            (shard.box.offset, shard.box.shape) for shard in local_shard_boxes(spec, mesh) if shard.is_first_replica
        )
    counted = count_parameters(config.model).total
    if len(built) == len(places):
        problems += [
            f"{name} is {shape}, and the ranks hold {size:,} of its elements"
            for name, shape in sorted(shapes.items())
            if (size := sum(math.prod(box) for _, box in boxes[name])) != math.prod(shape)
        ]
        problems += _shape_mismatches_with_serial(shapes, config)
    return LayoutParameterCheckResult(len(built), layers, counted, tuple(problems))


def _parameter_specs(
    config: RunConfig, stages: Sequence[StageSpec], places: Sequence[Mesh]
) -> Iterator[tuple[ParamSpec, Mesh]]:
    """Yield (spec, mesh) of the parameters that ranks at these places build; a tied one counts once a rank."""
    for mesh in places:
        networks = [build_stage_on_meta(config.model, mesh, stage) for stage in stages if stage.rank == mesh.pp.rank]
        for param in {id(param): param for network in networks for param in network.parameters()}.values():
            yield param_spec_of(param), mesh


def mesh_without_groups(lists: dict[str, RankLists], rank: int) -> Mesh:
    """Return a rank's mesh without process groups. lists: of `axis_rank_groups`, and those of blocks if any."""

    def axis_without_group(name: str) -> Axis:
        """Return this rank's `Axis` of this name, without a process group."""
        groups = lists["pp" if name == "pp_backward" else name]
        ranks = next((group for group in groups if rank in group), (rank,))
        return Axis(name, len(ranks), ranks.index(rank), ranks)

    axes = {
        field.name: axis_without_group(field.name)
        for field in fields(Mesh)
        if field.name not in ("device", "hybrid_cp")
    }
    return Mesh(
        device=torch.device("cpu"),
        hybrid_cp=tuple(axis_without_group(name) for name in lists if name.startswith("block")),
        **axes,
    )


def _representative_rank_meshes(config: RunConfig, world_size: int) -> list[Mesh]:
    """Return one mesh for each kind of rank that holds other parameters."""
    lists = axis_rank_groups(config.parallel, world_size)
    meshes: dict[tuple[int, ...], Mesh] = {}
    for mesh in (mesh_without_groups(lists, rank) for rank in range(world_size)):
        meshes.setdefault((mesh.pp.rank, mesh.tp.rank, mesh.ep.rank, mesh.etp.rank), mesh)
    return list(meshes.values())


def _shape_mismatches_with_serial(shapes: dict[str, tuple[int, ...]], config: RunConfig) -> list[str]:
    """Return what is wrong with the parameters of all ranks together, against one rank that has everything."""
    alone, problems = global_parameter_shapes(config.model), []
    if alone != shapes:
        odd = sorted(name for name in alone.keys() | shapes.keys() if alone.get(name) != shapes.get(name))
        problems.append(f"one rank alone has other parameters: {', '.join(odd[:5])}")
    total, counted = sum(map(math.prod, shapes.values())), count_parameters(config.model).total
    if total != counted:
        problems.append(f"the ranks hold {total:,} parameters in all, and one rank alone {counted:,}")
    return problems
