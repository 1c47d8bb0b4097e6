"""The curves against Megatron's published formulas, written out here case by case."""

import dataclasses
import json
import math

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.optim import OptimizerConfig, ScheduleConfig
from megatron.core.config.settings.run import TrainConfig
from megatron.core.optimizer.schedule import OptimizerParamSchedule, resolve_resumed_schedule

MAX, MIN, WARMUP, HORIZON = 3e-4, 3e-5, 80, 800  # samples: 10 and 100 iterations of 8


def build(schedule=None, optimizer=None, train=None):
    chosen = {"lr": MAX, "min_lr": MIN, "lr_warmup_iters": 10, **(schedule or {})}
    length = {"train_iters": 100, "global_batch_size": 8, **(train or {})}
    return OptimizerParamSchedule.build(
        ScheduleConfig(**chosen), OptimizerConfig(**(optimizer or {})), TrainConfig(**length)
    )


def progress(samples):
    return (samples - WARMUP) / (HORIZON - WARMUP)


DECAYS = {
    "constant": lambda samples: MAX,
    "linear": lambda samples: MAX - (MAX - MIN) * progress(samples),
    "cosine": lambda samples: MIN + (MAX - MIN) * 0.5 * (math.cos(math.pi * progress(samples)) + 1),
    "inverse-square-root": lambda samples: max(MIN, MAX * math.sqrt(WARMUP) / math.sqrt(samples)),
}
ANNEALS = {
    "exponential": lambda ratio: 2 * 0.5**ratio - 1,
    "linear": lambda ratio: 1 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1),
    "minus_sqrt": lambda ratio: 1 - math.sqrt(ratio),
}


@pytest.mark.parametrize("style", DECAYS)
def test_decay_styles_follow_their_formulas(style):
    schedule = build({"lr_decay_style": style})
    for samples in range(WARMUP + 1, HORIZON + 1):
        assert schedule.lr(samples) == pytest.approx(DECAYS[style](samples), rel=1e-12), samples


@pytest.mark.parametrize("style", ANNEALS)
def test_wsd_stays_flat_and_then_anneals(style):
    schedule = build({"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 25})
    assert {schedule.lr(samples) for samples in range(WARMUP, HORIZON - 200 + 1)} == {MAX}
    for samples in range(HORIZON - 199, HORIZON + 1):
        expected = MIN + (MAX - MIN) * ANNEALS[style]((samples - 600) / 200)
        assert schedule.lr(samples) == pytest.approx(expected, rel=1e-12), samples


def test_warm_up_is_linear_and_includes_its_last_sample():
    schedule = build({"lr_warmup_init": 1e-5, "lr_decay_style": "inverse-square-root"})
    assert schedule.lr(0) == 1e-5
    assert schedule.lr(20) == pytest.approx(1e-5 + (MAX - 1e-5) / 4)
    assert schedule.lr(80) == MAX


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert build({"lr_warmup_iters": 0}).lr(0) == MAX
    assert build({"lr_warmup_iters": 0, "lr_decay_style": "inverse-square-root"}).lr(4) == pytest.approx(MAX / 2)


@pytest.mark.parametrize(
    "style, after", [("constant", MAX), ("linear", MIN), ("cosine", MIN), ("inverse-square-root", MIN), ("WSD", MIN)]
)
def test_after_the_horizon_only_the_constant_style_keeps_its_rate(style, after):
    schedule = build({"lr_decay_style": style, "lr_wsd_decay_iters": 10, "lr_decay_iters": 50})
    assert schedule.lr(401) == schedule.lr(10**9) == after
    assert style in ("constant", "inverse-square-root") or schedule.lr(399) > after


def test_a_warm_up_fraction_is_a_share_of_the_decay_horizon():
    schedule = build({"lr_warmup_iters": 0, "lr_warmup_fraction": 0.0031, "lr_decay_iters": 50})
    assert schedule.warmup_samples == pytest.approx(1.24)
    assert schedule.lr(1) == pytest.approx(MAX / 1.24)


def test_sample_based_training_counts_samples_without_the_batch_size():
    schedule = build(
        {"lr_warmup_iters": 0, "lr_warmup_samples": 80, "lr_decay_samples": 800, "lr_decay_style": "cosine"},
        train={"train_iters": None, "train_samples": 1000},
    )
    assert schedule.lr(300) == build({"lr_decay_style": "cosine"}).lr(300)
    assert schedule.weight_decay_samples == 1000


def test_another_group_follows_the_same_curve_between_its_own_bounds():
    schedule = build({"lr_decay_style": "cosine"})
    assert schedule.lr_between(440, max_lr=2e-3, min_lr=0.0) == pytest.approx(1e-3)
    assert schedule.lr_between(40, max_lr=2e-3, min_lr=0.0) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "style, half, quarter",
    [("linear", 0.055, 0.0325), ("cosine", 0.055, 0.01 + 0.09 * 0.5 * (math.cos(math.pi * 0.75) + 1))],
)
def test_weight_decay_moves_from_start_to_end(style, half, quarter):
    schedule = build(optimizer={"start_weight_decay": 0.01, "end_weight_decay": 0.1, "weight_decay_incr_style": style})
    assert schedule.weight_decay(0) == pytest.approx(0.01)
    assert schedule.weight_decay(200) == pytest.approx(quarter)
    assert schedule.weight_decay(400) == pytest.approx(half)
    assert schedule.weight_decay(800) == pytest.approx(0.1)
    assert schedule.weight_decay(801) == 0.1


def test_weight_decay_is_constant_unless_asked_otherwise():
    assert {build(optimizer={"weight_decay": 0.3}).weight_decay(samples) for samples in (0, 400, 900)} == {0.3}


def test_skipped_steps_do_not_move_the_rate():
    """The argument is the schedule's own counter: a loop that does not advance it asks the same question again."""
    schedule, counter, rates = build(), 0, []
    for skipped in (False, True, True, False):
        rates.append(schedule.lr(counter))
        counter += 0 if skipped else 8
    assert rates == [0.0, MAX / 10, MAX / 10, MAX / 10]


@pytest.mark.parametrize(
    "schedule, optimizer, train, words",
    [
        ({"min_lr": 1.0}, {}, {}, "--min-lr 1.0 must lie between"),
        ({"lr_warmup_init": 1.0}, {}, {}, "--lr-warmup-init 1.0 is above"),
        ({"lr_decay_samples": 5}, {}, {}, "say it as --lr-decay-iters"),
        ({"lr_warmup_fraction": 0.1}, {}, {}, "say the warm-up twice"),
        ({"lr_decay_style": "WSD"}, {}, {}, "give --lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, {}, {}, "does not fit into the decay horizon"),
        ({"lr_warmup_iters": 100}, {}, {}, "does not end before the decay horizon"),
        ({}, {"start_weight_decay": 0.0}, {}, "cannot go from 0.0 to 0.01"),
    ],
)
def test_settings_that_draw_no_curve_are_refused(schedule, optimizer, train, words):
    with pytest.raises(ConfigError, match=words):
        build(schedule, optimizer, train)


def test_all_unfit_settings_are_named_in_one_error():
    with pytest.raises(ConfigError) as error:
        build({"min_lr": 1.0, "lr_decay_style": "WSD", "lr_decay_samples": 5})
    assert str(error.value).count("\n") == 3


def test_the_state_survives_json():
    schedule = build({"lr_warmup_iters": 0, "lr_warmup_fraction": 0.123, "lr_decay_style": "cosine"})
    assert OptimizerParamSchedule.from_state(json.loads(json.dumps(schedule.state()))) == schedule
    assert schedule.differences_from_saved(json.loads(json.dumps(schedule.state()))) == []


def test_differences_name_both_values():
    lines = build().differences_from_saved(build({"lr": 6e-4}).state())
    assert lines == ["max lr is 0.0003 now and was 0.0006 in the checkpoint"]


def test_resume_needs_equal_schedules_unless_a_side_is_chosen():
    mine, saved = build(), build({"lr_decay_style": "cosine"}).state()
    with pytest.raises(ConfigError, match="decay style is linear now and was cosine in the checkpoint"):
        resolve_resumed_schedule(mine, saved, override=False, use_checkpoint=False)
    with pytest.raises(ConfigError, match="contradict"):
        resolve_resumed_schedule(mine, saved, override=True, use_checkpoint=True)
    assert resolve_resumed_schedule(mine, saved, override=True, use_checkpoint=False) is mine
    assert resolve_resumed_schedule(mine, saved, override=False, use_checkpoint=True).decay_style == "cosine"
    assert resolve_resumed_schedule(mine, mine.state(), override=False, use_checkpoint=False) == mine


def test_every_number_of_the_schedule_is_compared_on_resume():
    schedule = build(
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 25},
        {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"},
    )
    for name, value in schedule.state().items():
        other = {**schedule.state(), name: "other" if isinstance(value, str) else 12345}
        assert len(schedule.differences_from_saved(other)) == 1, name
    assert dataclasses.is_dataclass(schedule)


@pytest.mark.parametrize("style", DECAYS)
def test_a_longer_run_is_another_curve_only_where_a_point_of_it_moves(style):
    mine, saved = build({"lr_decay_style": style}, train={"train_iters": 200}), build({"lr_decay_style": style})
    points = range(0, 801, 8)
    moved = [n for n in points if mine.lr(n) != saved.lr(n) or mine.weight_decay(n) != saved.weight_decay(n)]
    assert (
        bool(mine.differences_from_saved(saved.state())) == bool(moved) or style == "inverse-square-root"
    )  # whose end alone moves
    if style == "constant":
        assert resolve_resumed_schedule(mine, saved.state(), override=False, use_checkpoint=False) == mine


def test_a_longer_run_is_told_both_ways_to_go_on_and_their_rates():
    mine, saved = build({"lr_decay_style": "cosine"}, train={"train_iters": 200}), build({"lr_decay_style": "cosine"})
    with pytest.raises(ConfigError) as caught:
        resolve_resumed_schedule(
            mine,
            saved.state(),
            override=False,
            use_checkpoint=False,
            longer="--train-iters was 100 and is 200",
            samples=400,
        )
    (line,) = str(caught.value).splitlines()[1:]
    assert (
        "--train-iters was 100 and is 200, and the decay follows it (decay samples is 1600 now and was 800" in line
    ), line
    assert f"a learning rate of {mine.lr(400):.6g}, where it would have been {DECAYS['cosine'](400):.6g}" in line, line
    assert "--override-opt-param-scheduler" in line and f"at whose end the rate is {MIN:.6g}" in line, line
    kept = build({"lr_decay_style": "cosine", "lr_decay_iters": 100}, train={"train_iters": 200})
    assert resolve_resumed_schedule(kept, saved.state(), override=False, use_checkpoint=False) == kept
