"""Computes which ranks form the groups of each mesh axis; pure arithmetic, without torch.

Ranks are numbered like digits, the leftmost axis of `order` varying fastest. Dense layers see the world as tensor x
context x data x pipeline. Expert layers see the ranks of each pipeline stage, in ascending order, as expert-tensor x
expert x expert-data. Both views therefore agree on the pipeline, at whichever position of the order it is.
"""

from __future__ import annotations

from itertools import product

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import parse_pipeline_layout, stage_rank_and_chunk
from megatron.core.config.settings.parallel import ParallelConfig

RankLists = tuple[tuple[int, ...], ...]


def groups_along_axes(sizes: dict[str, int], order: tuple[str, ...], along: tuple[str, ...]) -> RankLists:
    """Return all groups of ranks that differ only in their coordinates on the axes `along`.

    sizes: axis -> size. order: axes, fastest varying first. Groups and their members are in ascending order.
    """
    strides, step = {}, 1
    for axis in order:
        strides[axis], step = step, step * sizes[axis]
    others = [axis for axis in order if axis not in along]
    inside = [axis for axis in order if axis in along]
    groups = []
    for fixed in product(*(range(sizes[axis]) for axis in reversed(others))):
        base = sum(place * strides[axis] for place, axis in zip(fixed, reversed(others), strict=True))
        members = [
            base + sum(place * strides[axis] for place, axis in zip(free, reversed(inside), strict=True))
            for free in product(*(range(sizes[axis]) for axis in reversed(inside)))
        ]
        groups.append(tuple(members))
    return tuple(sorted(groups))


def hierarchical_cp_sizes(parallel: ParallelConfig) -> tuple[int, int]:
    """Return the inner and the outer size of hierarchical context parallelism; (1, size) if no sizes are given.

    Raises ConfigError if the two sizes do not multiply to --context-parallel-size.
    """
    size = parallel.context_parallel_size
    given = parallel.hierarchical_context_parallel_sizes or (1, size)
    if len(given) != 2 or given[0] * given[1] != size:
        raise ConfigError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, given))} must be two sizes whose product is "
            f"--context-parallel-size {size}"
        )
    return given


def hybrid_cp_rank_groups(parallel: ParallelConfig, world_size: int) -> dict[str, RankLists]:
    """Return the groups of 2, 4, 8, ... data-parallel ranks of --hybrid-context-parallel, by axis name; else {}."""
    result: dict[str, RankLists] = {}
    lines = axis_rank_groups(parallel, world_size)["dp_cp"]
    size = 2
    while parallel.hybrid_context_parallel and size <= len(lines[0]):
        result[f"block{size}"] = tuple(
            line[first : first + size] for line in lines for first in range(0, len(line) - size + 1, size)
        )
        size *= 2
    return result


def axis_rank_groups(parallel: ParallelConfig, world_size: int) -> dict[str, RankLists]:
    """Return every axis of the mesh with all its groups of global ranks.

    Axes: tp, cp, dp, pp, ep, etp, edp; cp_inner and cp_outer, whose product is cp; and the merged ones: dp_cp, tp_cp,
    tp_dp_cp (all ranks of a pipeline stage), model (tensor and pipeline), world, embed (the pipeline ranks that hold a copy of a tied output matrix: first stage,
    last stage, and the stage of multi-token prediction) and mtp_embed (the ranks that hold the embedding: first stage
    and that of multi-token prediction). Raises ConfigError if the parallel sizes do not divide `world_size`.
    """
    tp, pp, cp, ep = parallel.tp, parallel.pp, parallel.context_parallel_size, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if world_size % (tp * pp * cp):
        raise ConfigError(
            f"{world_size} ranks cannot be divided into tensor {tp} x pipeline {pp} x context {cp} = "
            f"{tp * pp * cp}; choose a world size that is a multiple of it"
        )
    if world_size % (etp * ep * pp):
        raise ConfigError(
            f"{world_size} ranks cannot be divided into expert-tensor {etp} x expert {ep} x pipeline {pp} "
            f"= {etp * ep * pp}; choose sizes whose product divides the number of ranks"
        )
    inner = hierarchical_cp_sizes(parallel)[0]
    outer_axes = ("pp", "dp") if parallel.use_tp_pp_dp_mapping else ("dp", "pp")
    dense = {"tp": tp, "cp_inner": inner, "cp_outer": cp // inner, "pp": pp, "dp": world_size // (tp * pp * cp)}
    expert = {"etp": etp, "ep": ep, "edp": world_size // (etp * ep * pp)}
    dense_order = ("tp", "cp_inner", "cp_outer", *outer_axes)
    context = ("cp_inner", "cp_outer")
    pipelines = groups_along_axes(dense, dense_order, ("pp",))
    result = {
        name: groups_along_axes(dense, dense_order, along)
        for name, along in {
            "tp": ("tp",),
            "cp": context,
            "cp_inner": ("cp_inner",),
            "cp_outer": ("cp_outer",),
            "dp": ("dp",),
            "dp_cp": (*context, "dp"),
            "tp_cp": ("tp", *context),
            "tp_dp_cp": ("tp", *context, "dp"),
            "model": ("tp", "pp"),
            "world": dense_order,
        }.items()
    }
    result["pp"] = pipelines
    last_rank = stage_rank_and_chunk(2 * pp - 1, pp, parallel.stage_placement)[0]
    mtp_rank = _mtp_pipeline_rank(parallel, last_rank)
    result["embed"] = tuple(tuple(dict.fromkeys((line[0], line[mtp_rank], line[last_rank]))) for line in pipelines)
    result["mtp_embed"] = tuple(tuple(dict.fromkeys((line[0], line[mtp_rank]))) for line in pipelines)
    stages = groups_along_axes(dense, dense_order, ("tp", *context, "dp"))
    result |= {
        name: tuple(
            sorted(
                tuple(stage[place] for place in places)
                for stage in stages
                for places in groups_along_axes(expert, tuple(expert), (name,))
            )
        )
        for name in expert
    }
    return result


def _mtp_pipeline_rank(parallel: ParallelConfig, last_rank: int) -> int:
    """Return the pipeline rank of the multi-token prediction layers: by the layout, or that of the last stage."""
    stages = parse_pipeline_layout(parallel.pipeline_model_parallel_layout or "")
    return next(
        (
            stage_rank_and_chunk(index, parallel.pp, parallel.stage_placement)[0]
            for index, stage in enumerate(stages)
            if "m" in stage
        ),
        last_rank,
    )
