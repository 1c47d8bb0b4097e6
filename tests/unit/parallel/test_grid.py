from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.parallel.grid import axis_rank_groups, hybrid_cp_rank_groups

SIZES = [
    (tp, cp, dp, pp) for tp, cp, dp, pp in product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3)) if tp * cp * dp * pp <= 36
]
ALONG = {
    "tp": {"tp"},
    "cp": {"cp"},
    "dp": {"dp"},
    "pp": {"pp"},
    "dp_cp": {"dp", "cp"},
    "tp_cp": {"tp", "cp"},
    "tp_dp_cp": {"tp", "cp", "dp"},
    "model": {"tp", "pp"},
    "world": {"tp", "cp", "dp", "pp"},
}


def config(tp: int, cp: int, pp: int, **more: object) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp, **more
    )


def groups_by_enumeration(
    sizes: dict[str, int], fastest_first: tuple[str, ...], along: set[str]
) -> set[tuple[int, ...]]:
    """Count through all places, fastest axis first; ranks that agree everywhere but along the axes make a group."""
    found = defaultdict(list)
    places = product(*(range(sizes[axis]) for axis in reversed(fastest_first)))
    for rank, place in enumerate(places):
        named = dict(zip(reversed(fastest_first), place, strict=True))
        found[tuple(sorted((axis, at) for axis, at in named.items() if axis not in along))].append(rank)
    return {tuple(ranks) for ranks in found.values()}


@pytest.mark.parametrize("pipeline_first", [False, True])
def test_every_axis_is_what_counting_through_the_places_gives(pipeline_first: bool) -> None:
    order = ("tp", "cp", "pp", "dp") if pipeline_first else ("tp", "cp", "dp", "pp")
    for tp, cp, dp, pp in SIZES:
        found = axis_rank_groups(config(tp, cp, pp, use_tp_pp_dp_mapping=pipeline_first), tp * cp * dp * pp)
        for name, along in ALONG.items():
            expected = groups_by_enumeration({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, order, along)
            assert set(found[name]) == expected and len(found[name]) == len(expected), (name, tp, cp, dp, pp)


def test_sixteen_ranks_are_laid_out_as_in_megatron() -> None:
    found = axis_rank_groups(config(2, 1, 4), 16)
    assert found["tp"] == tuple((first, first + 1) for first in range(0, 16, 2))
    assert found["dp"] == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert found["pp"] == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert found["embed"] == ((0, 12), (1, 13), (2, 14), (3, 15))
    assert found["model"] == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))


@pytest.mark.parametrize("pipeline_first", [False, True])
def test_experts_see_the_same_ranks_in_another_order_inside_each_stage(pipeline_first: bool) -> None:
    for etp, ep, tp, pp in product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2)):
        parallel = config(
            tp,
            1,
            pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            use_tp_pp_dp_mapping=pipeline_first,
        )
        world = 8 * pp
        found = axis_rank_groups(parallel, world)
        sizes = {"etp": etp, "ep": ep, "edp": 8 // (etp * ep)}
        stages = [sorted(line[stage] for line in found["pp"]) for stage in range(pp)]
        for name in sizes:
            inside = groups_by_enumeration(sizes, ("etp", "ep", "edp"), {name})
            assert set(found[name]) == {
                tuple(stage[place] for place in places) for stage in stages for places in inside
            }


def test_where_megatron_has_an_expert_grid_it_is_the_same() -> None:
    for pipeline_first, (etp, ep, tp, pp) in product((False, True), product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2))):
        parallel = config(
            tp,
            1,
            pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            use_tp_pp_dp_mapping=pipeline_first,
        )
        if pipeline_first and etp * ep != tp:
            continue  # there its two views have different pipelines, and it refuses
        order = ("etp", "ep", "pp", "edp") if pipeline_first else ("etp", "ep", "edp", "pp")
        sizes = {"etp": etp, "ep": ep, "edp": 8 // (etp * ep), "pp": pp}
        found = axis_rank_groups(parallel, 8 * pp)
        assert all(set(found[name]) == groups_by_enumeration(sizes, order, {name}) for name in ("etp", "ep", "edp"))


def test_context_ranks_are_neighbours_and_blocks_of_neighbours() -> None:
    sizes = {"context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
    found = axis_rank_groups(ParallelConfig(tensor_model_parallel_size=2, **sizes), 8)
    assert found["cp"] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert found["cp_inner"] == ((0, 2), (1, 3), (4, 6), (5, 7)) and found["cp_outer"] == (
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    )
    plain = axis_rank_groups(config(1, 4, 1), 4)
    assert plain["cp_inner"] == ((0,), (1,), (2,), (3,)) and plain["cp_outer"] == plain["cp"] == ((0, 1, 2, 3),)
    with pytest.raises(ConfigError, match="2 3 must be two sizes whose product is --context-parallel-size 4"):
        axis_rank_groups(ParallelConfig(context_parallel_size=4, hierarchical_context_parallel_sizes=(2, 3)), 4)


def test_blocks_are_neighbours_on_the_data_axis_for_every_power_of_two() -> None:
    found = hybrid_cp_rank_groups(ParallelConfig(tensor_model_parallel_size=2, hybrid_context_parallel=True), 12)
    assert found == {
        "block2": ((0, 2), (4, 6), (8, 10), (1, 3), (5, 7), (9, 11)),
        "block4": ((0, 2, 4, 6), (1, 3, 5, 7)),
    }
    assert hybrid_cp_rank_groups(config(2, 1, 1), 12) == {}


def test_a_line_of_one_stage_embeds_and_predicts_on_one_rank() -> None:
    assert axis_rank_groups(config(2, 1, 1), 4)["embed"] == ((0,), (1,), (2,), (3,))


def test_a_world_that_cannot_be_divided_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="6 ranks cannot be divided into tensor 2 x pipeline 2 x context 1 = 4"):
        axis_rank_groups(config(2, 1, 2), 6)
    with pytest.raises(ConfigError, match="expert 3"):
        axis_rank_groups(config(1, 1, 1, expert_model_parallel_size=3), 8)
