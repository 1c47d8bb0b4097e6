"""Every schedule, played over a grid of sizes, against the formulas of the literature."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.pipeline_parallel.schedules import (
    Action,
    Plan,
    ScheduleError,
    can_overlap_pair,
    forward_only_plan,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    pipeline_training_plan,
    with_reduction_actions,
    zero_bubble_h1,
    zero_bubble_v,
)
from megatron.core.pipeline_parallel.timeline import simulate_pipeline_plan

PIPELINES = (1, 2, 3, 4, 8)
MICROBATCHES = range(1, 17)


def warmup(row: tuple[Action, ...]) -> int:
    """Forwards before the first backward, less the one that is paired with it, unless no forward was left for that."""
    first = next(place for place, action in enumerate(row) if action.op == "B")
    return first if all(action.op == "B" for action in row[first:]) and first > 1 else first - 1


@pytest.mark.parametrize("pp", PIPELINES)
def test_bubble_of_1f1b_and_gpipe_is_the_textbook_one(pp: int) -> None:
    for m in MICROBATCHES:
        theory = float(Fraction(pp - 1, m + pp - 1))
        for plan in (one_f_one_b(pp, m), gpipe(pp, m)):
            assert simulate_pipeline_plan(plan).bubble == pytest.approx(theory, abs=1e-12), f"m={m}"
            assert simulate_pipeline_plan(plan, forward=3, backward=3).bubble == pytest.approx(theory, abs=1e-12), (
                f"m={m}"
            )


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("vpp", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(pp: int, vpp: int) -> None:
    for m in range(pp, 17, pp):
        theory = float(Fraction(pp - 1, vpp * m + pp - 1))
        assert simulate_pipeline_plan(interleaved_1f1b(pp, vpp, m, pp)).bubble == pytest.approx(theory, abs=1e-12), (
            f"m={m}"
        )


@pytest.mark.parametrize("pp", PIPELINES)
def test_forward_only_idles_just_while_the_pipeline_fills_and_drains(pp: int) -> None:
    for m in MICROBATCHES:
        assert simulate_pipeline_plan(forward_only_plan(pp, 1, m)).bubble == pytest.approx(
            float(Fraction(pp - 1, m + pp - 1)), abs=1e-12
        )
        assert max(simulate_pipeline_plan(forward_only_plan(pp, 2, m)).peak) == 0, (
            "evaluation keeps nothing for a backward pass"
        )
        assert simulate_pipeline_plan(forward_only_plan(pp, 2, m, "v")).bubble == pytest.approx(
            float(Fraction(pp - 1, m + pp - 1)), abs=1e-12
        )


@pytest.mark.parametrize("pp", PIPELINES)
def test_a_rank_of_1f1b_keeps_no_more_activations_than_ranks_follow_it(pp: int) -> None:
    for m in MICROBATCHES:
        assert simulate_pipeline_plan(one_f_one_b(pp, m)).peak == tuple(min(m, pp - rank) for rank in range(pp))
        assert simulate_pipeline_plan(gpipe(pp, m)).peak == (m,) * pp


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("times", [(1, 2, 1), (3, 5, 2), (3, 7, 2)], ids=str)
def test_weights_that_wait_fill_the_bubble_as_the_paper_says_and_no_rank_holds_more_than_the_first_one_did(
    pp: int, times: tuple[int, int, int]
) -> None:
    forward, backward, weight = times
    for m in range(pp, 17):
        played = simulate_pipeline_plan(
            with_reduction_actions(zero_bubble_h1(pp, m)), forward=forward, backward=backward, weight=weight
        )
        lost = max(row[-1] for row in played.end) - m * (forward + backward)
        assert lost == (pp - 1) * (forward + (backward - weight) - weight), f"m={m}"
        assert max(played.peak) <= max(simulate_pipeline_plan(one_f_one_b(pp, m)).peak)


@pytest.mark.parametrize("pp", PIPELINES[1:])
@pytest.mark.parametrize("time", [1, 3])
def test_there_and_back_a_rank_idles_only_before_its_first_microbatch_and_after_its_last_gradient(
    pp: int, time: int
) -> None:
    for m in range(2 * pp - 1, 4 * pp):
        played = simulate_pipeline_plan(
            with_reduction_actions(zero_bubble_v(pp, m)), forward=time, backward=2 * time, weight=time
        )
        assert [row[0] for row in played.start] == [rank * time for rank in range(pp)]
        assert [row[-1] - first[0] for row, first in zip(played.end, played.start)] == [6 * m * time] * pp, f"m={m}"
        assert played.peak == (2 * pp,) * pp, f"m={m}"
        one_way = simulate_pipeline_plan(
            with_reduction_actions(zero_bubble_h1(pp, m)), forward=2 * time, backward=4 * time, weight=2 * time
        )  # of twice the layers
        lost = [max(row[-1] for row in found.end) - 6 * m * time for found in (played, one_way)]
        assert lost == [(pp - 1) * time, (pp - 1) * 2 * time], f"m={m}"


@pytest.mark.parametrize("pp", PIPELINES[1:])
@pytest.mark.parametrize("times", [(1, 2, 1), (3, 5, 2), (3, 7, 2), (2, 9, 4)], ids=str)
def test_there_and_back_ends_for_any_number_of_microbatches_and_holds_no_more_than_two_chunks_a_rank(
    pp: int, times: tuple[int, int, int]
) -> None:
    forward, backward, weight = times
    for m in MICROBATCHES:
        played = simulate_pipeline_plan(zero_bubble_v(pp, m), forward=forward, backward=backward, weight=weight)
        assert max(played.peak) <= 2 * min(pp, m), f"m={m}"
        assert max(row[-1] for row in played.end) <= max(
            row[-1] for row in simulate_pipeline_plan(gpipe(pp, m), forward=2 * forward, backward=2 * backward).end
        ), f"m={m}"


@pytest.mark.parametrize("pp", PIPELINES)
def test_two_by_two_every_forward_after_the_warm_up_stands_beside_another_microbatchs_backward_and_no_rank_waits_longer(
    pp: int,
) -> None:
    for m in MICROBATCHES:
        plan = with_reduction_actions(pipeline_training_plan(pp, 1, m, dual_batch_overlap=True))
        played = simulate_pipeline_plan(plan, dual_batch_overlap=True)
        for rank, row in enumerate(plan):
            beside = [place for place in range(len(row)) if can_overlap_pair(row, place, pp)]
            assert len(beside) == max(0, m - 2 * (pp - rank) + 1), f"m={m}"
            assert all(
                (played.start[rank][place], played.end[rank][place])
                == (played.start[rank][place + 1], played.end[rank][place + 1])
                for place in beside
            )
        assert played.peak == tuple(min(m, 2 * (pp - rank)) for rank in range(pp))
        alone = simulate_pipeline_plan(with_reduction_actions(one_f_one_b(pp, m)))
        assert max(row[-1] for row in played.end) == max(row[-1] for row in alone.end), f"m={m}"


def test_a_plan_whose_weights_come_before_their_backward_pass_or_after_the_reduction_is_refused() -> None:
    first, second = zero_bubble_h1(2, 2)
    early = tuple(sorted(second, key=lambda action: (action.op != "F", action.op != "W")))
    with pytest.raises(ScheduleError, match=r"W1\.0 comes before its backward pass"):
        simulate_pipeline_plan((first, early))
    with pytest.raises(ScheduleError, match=r"R1 comes before the stage's last backward pass"):
        simulate_pipeline_plan((first + (Action("R", 0),), second[:-1] + (Action("R", 1), second[-1])))
    with pytest.raises(ScheduleError, match=r"W1\.1 is missing"):
        simulate_pipeline_plan((first, second[:-1]))


def test_interleaved_ranks_warm_up_by_megatrons_count() -> None:
    for pp, vpp, m, group in [(2, 2, 4, 2), (4, 2, 8, 4), (4, 3, 12, 6), (3, 2, 10, 7), (8, 2, 16, 8), (4, 2, 2, 4)]:
        counts = [warmup(row) for row in interleaved_1f1b(pp, vpp, m, group)]
        assert counts == [min(vpp * m, 2 * (pp - rank - 1) + (vpp - 1) * group) for rank in range(pp)]


def test_a_chunk_runs_one_group_of_microbatches_before_the_next_chunk_begins() -> None:
    forwards = [(action.stage, action.microbatch) for action in interleaved_1f1b(2, 2, 5, 3)[1] if action.op == "F"]
    assert forwards == [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1), (3, 2), (1, 3), (1, 4), (3, 3), (3, 4)]
    backwards = [(action.stage, action.microbatch) for action in interleaved_1f1b(2, 2, 5, 3)[1] if action.op == "B"]
    assert backwards == [(4 - stage, i) for stage, i in forwards]


def test_whatever_the_flags_accept_can_be_played() -> None:
    refused = 0
    for pp, vpp, m, group in product((1, 2, 3, 4), (2, 3), range(1, 13), range(1, 13)):
        try:
            plan = pipeline_training_plan(pp, vpp, m, group=group)
        except ConfigError:
            refused += 1
        else:
            simulate_pipeline_plan(plan)
    assert refused > 0, "the grid has groups that leave a short tail"


def test_a_tail_group_smaller_than_the_pipeline_deadlocks_and_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 waits at F8\.8 for F7\.8, rank 3 waits at B7\.4 for B8\.4"):
        simulate_pipeline_plan(interleaved_1f1b(4, 3, 9, 4))
    with pytest.raises(ConfigError, match=r"last group of 1 of 9.*has 8 or 12 microbatches"):
        pipeline_training_plan(4, 3, 9)


def test_flags_choose_the_schedule() -> None:
    assert pipeline_training_plan(4, 1, 6) == one_f_one_b(4, 6)
    assert pipeline_training_plan(4, 1, 6, name="gpipe") == gpipe(4, 6)
    assert pipeline_training_plan(4, 1, 6, name="zb-h1") == zero_bubble_h1(4, 6)
    assert pipeline_training_plan(4, 2, 6, name="zb-v") == zero_bubble_v(4, 6)
    assert pipeline_training_plan(1, 1, 6, name="zb-v") == zero_bubble_h1(1, 6)
    assert pipeline_training_plan(2, 3, 4) == interleaved_1f1b(2, 3, 4, 2)
    assert pipeline_training_plan(2, 3, 4, group=4) == interleaved_1f1b(2, 3, 4, 4)
    assert pipeline_training_plan(1, 1, 2) == (
        (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)),
    )
    with pytest.raises(ConfigError, match="--pipeline-schedule zigzag"):
        pipeline_training_plan(2, 1, 4, name="zigzag")
    with pytest.raises(ConfigError, match="smaller than --pipeline-model-parallel-size 4"):
        pipeline_training_plan(4, 2, 8, group=3)


@pytest.mark.parametrize("plan", [one_f_one_b(3, 4), interleaved_1f1b(2, 2, 4, 2), gpipe(2, 3)])
def test_each_stage_reduces_once_right_after_its_last_backward(plan: Plan) -> None:
    reduced = with_reduction_actions(plan)
    assert tuple(tuple(a for a in row if a.op != "R") for row in reduced) == plan
    for row in reduced:
        stages = {action.stage for action in row}
        assert sorted(action.stage for action in row if action.op == "R") == sorted(stages)
        for place, action in enumerate(row):
            if action.op == "R":
                assert (row[place - 1].op, row[place - 1].stage) == ("B", action.stage)
                assert all(later.stage != action.stage or later.op != "B" for later in row[place:])
