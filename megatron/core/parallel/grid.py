"""Which ranks share which axis: pure arithmetic, no torch.

Ranks are laid out like digits of a number, the leftmost axis of `order` turning fastest. Dense layers see
tensor x context x data x pipeline; experts see the same ranks as expert-tensor x expert x expert-data x pipeline, and
both views agree on the pipeline.
"""

from __future__ import annotations

from itertools import product

from megatron.core.config.flags import ConfigError
from megatron.core.config.parallel import ParallelConfig

RankLists = tuple[tuple[int, ...], ...]


def rank_lists(sizes: dict[str, int], order: tuple[str, ...], along: tuple[str, ...]) -> RankLists:
    """All groups of ranks that differ only along the axes `along`.

    sizes: axis -> size. order: axes, fastest first. Groups and their members come in ascending order.
    """
    strides, step = {}, 1
    for axis in order:
        strides[axis], step = step, step * sizes[axis]
    others = [axis for axis in order if axis not in along]
    inside = [axis for axis in order if axis in along]
    groups = []
    for fixed in product(*(range(sizes[axis]) for axis in reversed(others))):
        base = sum(place * strides[axis] for place, axis in zip(fixed, reversed(others), strict=True))
        members = [base + sum(place * strides[axis] for place, axis in zip(free, reversed(inside), strict=True))
                   for free in product(*(range(sizes[axis]) for axis in reversed(inside)))]
        groups.append(tuple(members))
    return tuple(sorted(groups))


def axis_ranks(parallel: ParallelConfig, world_size: int) -> dict[str, RankLists]:
    """Every axis of the mesh -> all its groups of global ranks.

    Axes: tp, cp, dp, pp, ep, etp, edp, and the merged dp_cp, tp_cp, model (tensor and pipeline), embed (first and last
    pipeline stage) and world.
    """
    tp, pp, cp, ep = parallel.tp, parallel.pp, parallel.context_parallel_size, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if world_size % (tp * pp * cp):
        raise ConfigError(f"{world_size} ranks cannot be divided into tensor {tp} x pipeline {pp} x context {cp} = "
                          f"{tp * pp * cp}; choose a world size that is a multiple of it")
    if world_size % (etp * ep * pp):
        raise ConfigError(f"{world_size} ranks cannot be divided into expert-tensor {etp} x expert {ep} x pipeline {pp} "
                          f"= {etp * ep * pp}; choose sizes whose product divides the number of ranks")
    last = ("pp", "dp") if parallel.use_tp_pp_dp_mapping else ("dp", "pp")
    dense = {"tp": tp, "cp": cp, "pp": pp, "dp": world_size // (tp * pp * cp)}
    expert = {"tp": etp, "ep": ep, "pp": pp, "dp": world_size // (etp * ep * pp)}
    dense_order, expert_order = ("tp", "cp", *last), ("tp", "ep", *last)
    pipelines = rank_lists(dense, dense_order, ("pp",))
    found = {name: rank_lists(dense, dense_order, along) for name, along in {
        "tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "dp_cp": ("cp", "dp"), "tp_cp": ("tp", "cp"),
        "model": ("tp", "pp"), "world": ("tp", "cp", "dp", "pp")}.items()}
    found["pp"] = pipelines
    found["embed"] = tuple(tuple(dict.fromkeys((line[0], line[-1]))) for line in pipelines)
    found |= {name: rank_lists(expert, expert_order, along) for name, along in {
        "etp": ("tp",), "ep": ("ep",), "edp": ("dp",)}.items()}
    return found
