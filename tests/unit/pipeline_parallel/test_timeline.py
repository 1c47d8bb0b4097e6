"""Playing a plan: its times, and the plans it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.picture import draw_pipeline_timeline
from megatron.core.pipeline_parallel.schedules import (
    Action,
    Plan,
    ScheduleError,
    interleaved_1f1b,
    one_f_one_b,
    with_reduction_actions,
)
from megatron.core.pipeline_parallel.timeline import draw_text_timeline, simulate_pipeline_plan

F00, F01, F10, F11 = (Action("F", stage, i) for stage in (0, 1) for i in (0, 1))
B00, B01, B10, B11 = (Action("B", stage, i) for stage in (0, 1) for i in (0, 1))

DESIGN = """\
r0  0  1  2  3  .  .  .  .  .  .  0' 0' 4  1' 1' 5  2' 2' .  3' 3' .  4' 4' .  5' 5'
r1  .  0  1  2  .  .  .  .  0' 0' 3  1' 1' 4  2' 2' 5  3' 3' .  4' 4' .  5' 5' .  .
r2  .  .  0  1  .  .  0' 0' 2  1' 1' 3  2' 2' 4  3' 3' 5  4' 4' .  5' 5' .  .  .  .
r3  .  .  .  0  0' 0' 1  1' 1' 2  2' 2' 3  3' 3' 4  4' 4' 5  5' 5' .  .  .  .  .  ."""


def test_the_picture_of_1f1b_is_the_one_drawn_by_hand() -> None:
    plan = one_f_one_b(4, 6)
    assert draw_text_timeline(plan, simulate_pipeline_plan(plan)) == DESIGN


def test_chunks_are_told_apart_in_the_picture() -> None:
    plan = with_reduction_actions(interleaved_1f1b(2, 2, 2, 2))
    lines = draw_text_timeline(plan, simulate_pipeline_plan(plan, reduce=1)).splitlines()
    assert lines[0].split() == "r0 a0 a1 b0 b1 . . b0' b0' . b1' b1' R a0' a0' a1' a1' R".split()


def test_times_follow_uneven_stages_and_slow_messages() -> None:
    plan = ((F00, B00), (F10, B10))
    timeline = simulate_pipeline_plan(plan, forward=(1, 4), backward=(2, 8), message=10)
    assert timeline.start == ((0, 33), (11, 15))
    assert timeline.end == ((1, 35), (15, 23))
    assert timeline.bubble == pytest.approx(1 - 15 / 70)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (((F00, B00, F01), (F10, B10, F11, B11)), r"B0\.1 is missing"),
        (((F00, F00, B00), (F10, B10)), r"F0\.0 occurs 2 times"),
        (((F00, B00, F10, B10), ()), r"rank 0 has F1\.0, which belongs to rank 1"),
        (((F00, B00), (B10, F10)), r"B1\.0 comes before its forward pass"),
        (((F00, Action("R", 0), B00), (F10, B10, Action("R", 1))), "R0 comes before the stage's last backward"),
        (((F00, B00, Action("R", 0)), (F10, B10)), "R1 is missing"),
        (((F00, B00), ()), "1 stages cannot be divided over 2 ranks"),
        (((Action("X", 0, 0), F00, B00),), r"X0\.0 does not belong in this plan"),
        (((F00, F01, B01, B00), (F11, F10, B10, B11)), None),
        (((F00, B00, F01, B01), (F10, F11, B10, B11)), r"rank 0 waits at B0\.0 for B1\.0, rank 1 waits at F1\.1 for"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_actions_at_fault(plan: Plan, reason: str | None) -> None:
    if reason is None:
        simulate_pipeline_plan(plan)
    else:
        with pytest.raises(ScheduleError, match=reason):
            simulate_pipeline_plan(plan)


def test_a_long_list_of_faults_is_cut() -> None:
    twice = tuple(row + row for row in one_f_one_b(2, 20))  # all 80 actions stand there twice
    with pytest.raises(ScheduleError, match="and 72 more"):
        simulate_pipeline_plan(twice)


def test_the_drawing_has_a_box_for_every_action(tmp_path: Path) -> None:
    plan = with_reduction_actions(interleaved_1f1b(2, 2, 4, 2))
    with (tmp_path / "plan.svg").open("wb") as file:
        draw_pipeline_timeline(plan, simulate_pipeline_plan(plan, reduce=1), file, "svg")
    drawn = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert [action for row in plan for action in row if f'id="{action}"' not in drawn] == []
    with (tmp_path / "plan.png").open("wb") as file:
        draw_pipeline_timeline(plan, simulate_pipeline_plan(plan), file, "png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
