"""Cutting layers into pipeline stages: every layer lands somewhere, or the cut is refused with a remedy."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import (
    LayerPlan,
    StageSpec,
    mtp_depth_layer_plans,
    parse_pipeline_layout,
    partition_into_stages,
    uniform_layer_plans,
    virtual_pipeline_size,
)
from tests.helpers import tiny


def counts(stages: tuple[StageSpec, ...]) -> list[int]:
    """Layers a stage."""
    return [len(stage.layers) for stage in stages]


def refused(*args: object, **options: object) -> str:
    """The message with which `partition` refuses."""
    with pytest.raises(ConfigError) as caught:
        partition_into_stages(*args, **options)
    return str(caught.value)


def test_every_accepted_cut_has_each_layer_once_and_in_order() -> None:
    accepted = 0
    ends = (None, 1, 2, 4)
    for num_layers, pp, vpp, first, last in product(range(1, 17), (1, 2, 3, 4), (1, 2, 3), ends, ends):
        try:
            stages = partition_into_stages(uniform_layer_plans(num_layers), pp=pp, vpp=vpp, ends=(first, last))
        except ConfigError:
            continue
        accepted += 1
        assert [layer.index for stage in stages for layer in stage.layers] == list(range(num_layers))
        assert all(stage.layers for stage in stages)
        assert [(stage.rank, stage.chunk) for stage in stages] == [(s % pp, s // pp) for s in range(pp * vpp)]
        on_rank = [sum(len(stage.layers) for stage in stages if stage.rank == rank) for rank in range(pp)]
        assert first in (None, on_rank[0]) and last in (None, on_rank[-1])
        middle = on_rank[first is not None : pp - (last is not None)]
        assert len(set(middle)) <= 1, "the ranks without a count of their own share evenly"
    assert accepted > 100


def test_the_even_cut_is_refused_exactly_when_it_does_not_divide() -> None:
    for num_layers, pp, vpp in product(range(1, 25), (1, 2, 3, 4), (1, 2, 3)):
        if num_layers % (pp * vpp) == 0:
            assert counts(partition_into_stages(uniform_layer_plans(num_layers), pp=pp, vpp=vpp)) == [
                num_layers // (pp * vpp)
            ] * (pp * vpp)
        else:
            refused(uniform_layer_plans(num_layers), pp=pp, vpp=vpp)


def test_only_the_first_stage_embeds_and_only_the_last_has_the_head() -> None:
    stages = partition_into_stages(uniform_layer_plans(8), pp=2, vpp=2)
    assert [stage.has_embedding for stage in stages] == [True, False, False, False]
    assert [stage.has_output for stage in stages] == [False, False, False, True]
    assert [(stage.index, stage.count) for stage in stages] == [(index, 4) for index in range(4)]
    (whole,) = partition_into_stages(uniform_layer_plans(3), pp=1)
    assert (whole.has_embedding, whole.has_output, len(whole.layers)) == (True, True, 3)


def test_layers_keep_what_their_rows_say() -> None:
    rows = (LayerPlan(0, window=(4, 0)), LayerPlan(1, rope=False))
    assert tuple(stage.layers for stage in partition_into_stages(rows, pp=2)) == ((rows[0],), (rows[1],))


def test_windows_and_rotations_of_prediction_depths_are_those_of_the_first_layers() -> None:
    changes = {"window_size": "4,0", "window_attn_skip_freq": "[0,1,1,0]", "mtp_num_layers": 2}
    model = tiny.config(1, position_embedding_type="rope", no_rope_freq="[1,0,0,0]", **changes).model
    rows = [mtp_depth_layer_plans(model, depth)[0] for depth in (0, 1)]
    assert [(row.index, row.window, row.rope) for row in rows] == [(4, None, False), (5, (4, 0), True)]


def test_uneven_ends_are_counted_over_all_chunks_of_their_rank() -> None:
    assert counts(partition_into_stages(uniform_layer_plans(16), pp=4, vpp=2, ends=(2, 6))) == [1, 2, 2, 3] * 2
    assert counts(partition_into_stages(uniform_layer_plans(7), pp=3, ends=(1, None))) == [1, 3, 3]
    assert counts(partition_into_stages(uniform_layer_plans(7), pp=2, ends=(None, 2))) == [5, 2]


def test_embedding_and_loss_take_a_layers_place_if_asked() -> None:
    assert counts(
        partition_into_stages(uniform_layer_plans(6), pp=4, account_for_embedding=True, account_for_loss=True)
    ) == [1, 2, 2, 1]
    assert counts(partition_into_stages(uniform_layer_plans(7), pp=4, account_for_embedding=True)) == [1, 2, 2, 2]
    assert counts(partition_into_stages(uniform_layer_plans(7), pp=2, vpp=2, account_for_loss=True)) == [2, 2, 2, 1]
    assert counts(
        partition_into_stages(uniform_layer_plans(2), pp=4, account_for_embedding=True, account_for_loss=True)
    ) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|(tt|)*29L", ("Ettt", *["tt"] * 29, "L")),
        ("E,t|t, t|L", ("Et", "tt", "L")),
        ("E|(t|(tt|)*2)*2t L", ("E", "t", "tt", "tt", "t", "tt", "tt", "tL")),
        ("E||tL", ("E", "", "tL")),
        ("Et*3|(tt|)*29m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("E|*3tL", ("E", "", "", "tL")),
        ("(E(t)*12L)", ("EttttttttttttL",)),
    ],
)
def test_a_layout_string_is_unrolled(layout: str, stages: tuple[str, ...]) -> None:
    assert parse_pipeline_layout(layout) == stages


def test_a_layout_says_what_each_stage_holds() -> None:
    stages = partition_into_stages(uniform_layer_plans(6), pp=2, vpp=2, layout="Et|(tt|)*2tL")
    assert counts(stages) == [1, 2, 2, 1]
    assert counts(partition_into_stages(uniform_layer_plans(2), pp=4, layout="E|t||tL")) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("Etx|L", "'x' has no meaning there"),
        ("*2Et|L", r"'\*2' has no meaning there"),
        ("Et*|L", r"'\*' has no meaning there"),
        ("Et)|L", r"'\)' has no meaning there"),
        ("E(t|L", r"a '\(' is never closed"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(layout: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_pipeline_layout(layout)


def test_the_stage_behind_the_last_layer_is_that_of_m_or_else_the_last() -> None:
    def behind(**said: Any) -> list[bool]:
        return [stage.has_mtp for stage in partition_into_stages(uniform_layer_plans(4), **said)]

    assert behind(pp=2) == [False, True]
    assert behind(pp=4, layout="Et|tt|t|L") == behind(pp=4, layout="Et|tt|t|mmL") == [False, False, False, True]
    assert behind(pp=4, layout="Et|tt|tmm|L") == [False, False, True, False]
    assert behind(pp=3, vpp=2, layout="E|t|t|t|tm|L") == [False] * 4 + [True, False]
    assert behind(pp=2, layout="Ettttm|L") == [True, False]


def test_a_layout_that_is_no_cut_of_the_network_is_refused_with_every_reason() -> None:
    message = refused(uniform_layer_plans(4), pp=2, layout="t|Et|t|L|")
    assert "4 settings" in message
    assert "E must stand once, at the very beginning" in message
    assert "L must stand once, at the very end" in message
    assert "it has 3 t, but --num-layers is 4" in message
    assert "5 stages are not a multiple of --pipeline-model-parallel-size 2; write 4 or 6 stages" in message
    assert "4 stages, but 2 pipeline ranks make 2" in refused(uniform_layer_plans(2), pp=2, layout="E|t|t|L")


def test_a_refusal_names_flags_numbers_and_the_nearest_that_work() -> None:
    message = refused(uniform_layer_plans(30), pp=4)
    assert "--num-layers 30 cannot be divided over 4 pipeline ranks; choose 28 or 32 layers" in message
    message = refused(uniform_layer_plans(30), pp=4, vpp=2, account_for_loss=True)
    assert "4 pipeline ranks with 2 chunks each; choose 23 or 31 layers" in message
    message = refused(uniform_layer_plans(12), pp=4, ends=(2, 3))
    assert "leave 7 of --num-layers 12" in message and "choose --num-layers 11 or 13" in message
    message = refused(uniform_layer_plans(12), pp=4, vpp=2, ends=(3, 0))
    assert "--decoder-first-pipeline-num-layers 3 cannot be divided over 2 chunks" in message
    assert "of at least one layer; choose 2 or 4" in message
    assert "--decoder-last-pipeline-num-layers 0" in message and "leave 9 of" in message
    message = refused(uniform_layer_plans(8), pp=4, ends=(8, 8))
    assert "leave -8 of --num-layers 8" in message and "choose --num-layers 18 or 20" in message
    assert "--num-layers 0 is not a positive number" in refused((), pp=2)


@pytest.mark.parametrize(("pp", "first", "last"), [(1, 2, None), (1, None, 2), (1, 2, 2), (2, 2, 3)])
def test_counts_that_cover_all_ranks_must_cover_all_layers(pp: int, first: int | None, last: int | None) -> None:
    assert "--decoder-" in refused(uniform_layer_plans(4), pp=pp, ends=(first, last))


def test_what_the_message_suggests_is_accepted() -> None:
    suggested = 0
    for num_layers, pp, vpp, embedding in product(range(1, 20), (2, 3, 4), (1, 2), (False, True)):
        options = {"pp": pp, "vpp": vpp, "account_for_embedding": embedding}
        if (num_layers + embedding) % (pp * vpp):
            advice = re.search("choose (.*) layers,", refused(uniform_layer_plans(num_layers), **options))
            for number in re.findall(r"\d+", advice[1]):
                partition_into_stages(uniform_layer_plans(int(number)), **options)
                suggested += 1
    assert suggested > 100


def test_a_split_is_given_one_way_only() -> None:
    assert "more than once" in refused(uniform_layer_plans(4), pp=2, ends=(2, None), account_for_loss=True)
    assert "more than once" in refused(uniform_layer_plans(4), pp=2, ends=(2, None), layout="Ett|ttL")
    assert "more than once" in refused(uniform_layer_plans(4), pp=2, account_for_embedding=True, layout="Ett|ttL")


def test_chunks_a_rank_follow_from_any_of_the_three_flags() -> None:
    assert virtual_pipeline_size(24, pp=4) == 1
    assert virtual_pipeline_size(24, pp=4, chunks_per_rank=3) == 3
    assert virtual_pipeline_size(24, pp=4, layers_per_chunk=2) == 3
    assert virtual_pipeline_size(22, pp=4, layers_per_chunk=2, account_for_embedding=True, account_for_loss=True) == 3
    assert virtual_pipeline_size(24, pp=4, layout="Et*3|(t*3|)*6t*3L") == 2


def test_a_number_of_chunks_that_does_not_come_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="--num-layers-per-virtual-pipeline-stage 5 .* choose 20 or 40 layers"):
        virtual_pipeline_size(24, pp=4, layers_per_chunk=5)
    with pytest.raises(ConfigError, match="each say how many chunks"):
        virtual_pipeline_size(24, pp=4, layers_per_chunk=2, chunks_per_rank=3)
    with pytest.raises(ConfigError, match="--num-virtual-stages-per-pipeline-rank 0 is not a positive number"):
        virtual_pipeline_size(24, pp=4, chunks_per_rank=0)
    with pytest.raises(ConfigError, match="3 stages are not a multiple"):
        virtual_pipeline_size(2, pp=2, layout="Et|t|L")


def test_planning_does_not_load_torch() -> None:
    program = "import sys; import megatron.core.config.plan.layers; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
