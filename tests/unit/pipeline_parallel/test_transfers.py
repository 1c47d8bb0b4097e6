"""The order of messages: complete, causal, and safe even if every message blocks both ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.core.pipeline_parallel.schedules import (
    Action,
    can_overlap_pair,
    forward_only_plan,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    one_f_one_b_dual_batch,
    with_reduction_actions,
    zero_bubble_v,
)
from megatron.core.pipeline_parallel.transfers import RankScript, Transfer, build_rank_script, plan_pipeline_transfers

PLANS = {
    **{f"1f1b {pp} {m}": one_f_one_b(pp, m) for pp in (1, 2, 3, 4, 8) for m in (1, 2, 5, 16)},
    **{f"gpipe {pp} {m}": gpipe(pp, m) for pp in (2, 4) for m in (1, 5)},
    **{
        f"interleaved {pp} {vpp} {m} {group}": with_reduction_actions(interleaved_1f1b(pp, vpp, m, group))
        for pp, vpp, m, group in [(2, 2, 4, 2), (2, 3, 8, 4), (3, 3, 7, 4), (4, 2, 8, 4), (4, 3, 13, 5), (8, 2, 16, 8)]
    },
    **{
        f"there and back {pp} {m}": with_reduction_actions(zero_bubble_v(pp, m))
        for pp in (2, 3, 4, 8)
        for m in (1, 2, 5, 16)
    },
    **{f"forward there and back {pp} {m}": forward_only_plan(pp, 2, m, "v") for pp in (2, 3, 4) for m in (1, 5)},
    **{f"forward {pp} {vpp} {m}": forward_only_plan(pp, vpp, m) for pp, vpp, m in [(2, 1, 3), (4, 2, 5), (3, 3, 4)]},
}


def last_blocked(scripts: Sequence[RankScript]) -> list[Action | Transfer]:
    """Walk all scripts with messages that block both ends until they meet; where each rank is stuck in the end."""
    place = [0] * len(scripts)

    def at(rank: int) -> Action | Transfer | None:
        return scripts[rank].steps[place[rank]] if place[rank] < len(scripts[rank].steps) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(scripts)):
            while (step := at(rank)) is not None:
                ends = {step.src, step.dst} if isinstance(step, Transfer) else {rank}
                if any(at(end) != step for end in ends):
                    break
                for end in ends:
                    place[end] += 1
                moved = True
    return [step for rank in range(len(scripts)) if (step := at(rank)) is not None]


@pytest.mark.parametrize("name", PLANS)
def test_each_boundary_between_stages_is_crossed_once_in_each_direction(name: str) -> None:
    plan = PLANS[name]
    actions = {action for row in plan for action in row}
    rank_of = {action.stage: rank for rank, row in enumerate(plan) for action in row}
    wanted = {
        Transfer(rank_of[a.stage], rank_of[a.stage + way], a)
        for a in actions
        for op, way in (("F", 1), ("B", -1))
        if a.op == op and 0 <= a.stage + way < len(rank_of)
    }
    found = plan_pipeline_transfers(plan)
    assert len(found) == len(set(found))
    assert set(found) == {t for t in wanted if t.src != t.dst}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_never_wait_in_a_circle_even_if_every_message_blocks(name: str, overlap: bool) -> None:
    plan = PLANS[name]
    scripts = [build_rank_script(plan, rank, overlap=overlap) for rank in range(len(plan))]
    assert last_blocked(scripts) == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pp, m", [(2, 1), (2, 5), (3, 7), (4, 16), (8, 9)])
def test_passes_that_are_together_stand_side_by_side_and_never_wait_in_a_circle(pp: int, m: int, overlap: bool) -> None:
    plan = with_reduction_actions(one_f_one_b_dual_batch(pp, m))
    scripts = [build_rank_script(plan, rank, overlap=overlap, dual_batch_overlap=True) for rank in range(pp)]
    for own, row in zip(scripts, plan, strict=True):
        assert tuple(step for step in own.steps if isinstance(step, Action)) == row
        pairs = [part for part in own.instructions() if not isinstance(part, Transfer) and len(part) == 2]
        assert len(pairs) == sum(can_overlap_pair(row, place, pp) for place in range(len(row)))
    # A pair that waits for two messages at once is two actions one after the other, each of which may wait for a message before it.
    assert last_blocked(scripts) == []


def test_the_walk_finds_a_circle_where_there_is_one() -> None:
    there, back = Transfer(0, 1, Action("F", 0)), Transfer(1, 0, Action("B", 1))
    circle = [RankScript(0, 2, 2, (there, back), True), RankScript(1, 2, 2, (back, there), True)]
    assert last_blocked(circle) == [there, back]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_a_script_is_its_row_with_receives_before_and_sends_after(name: str, overlap: bool) -> None:
    plan, order = PLANS[name], plan_pipeline_transfers(PLANS[name])
    for rank, row in enumerate(plan):
        steps = build_rank_script(plan, rank, overlap=overlap).steps
        assert tuple(step for step in steps if isinstance(step, Action)) == row
        own = [transfer for transfer in order if rank in (transfer.src, transfer.dst)]
        assert [step for step in steps if isinstance(step, Transfer)] == own
        place = {step: where for where, step in enumerate(steps)}
        for step in steps:
            if isinstance(step, Transfer) and step.dst == rank:
                assert place[step] < place[step.consumer]
            elif isinstance(step, Transfer):
                assert place[step] > place[step.producer]


def test_overlapping_receives_travel_during_the_action_before() -> None:
    plan, message, meanwhile = one_f_one_b(2, 3), Transfer(0, 1, Action("F", 0, 1)), Action("B", 1, 0)
    in_turn, early = build_rank_script(plan, 1, overlap=False).steps, build_rank_script(plan, 1).steps
    assert in_turn.index(message) == in_turn.index(meanwhile) + 1
    assert early.index(message) == early.index(meanwhile) - 1


def test_a_pipeline_of_one_rank_sends_nothing() -> None:
    assert plan_pipeline_transfers(interleaved_1f1b(1, 3, 4, 1)) == ()
