"""Timers: which run, what they add up to, and the exact text that other programs parse."""

import pytest

import megatron.training.report.timers as timers_module
from megatron.training.report.timers import STEP_TIMERS, Timers, max_times_by_tag, timer_report_text


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves by hand."""
    now = [100.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: now[0])
    return now


def test_only_timers_up_to_the_chosen_level_run(clock):
    timers = Timers(level=1)
    for level in (0, 1, 2):
        with timers(f"level {level}", level=level):
            clock[0] += 2.0
    assert timers.collect_times_of_all_ranks(["level 0", "level 1", "level 2"]) == {"level 0": [2.0], "level 1": [2.0]}


def test_times_add_up_until_they_are_taken_and_are_divided_by_the_steps(clock):
    timers = Timers(level=2)
    for seconds in (1.0, 3.0):
        with timers("optimizer"):
            clock[0] += seconds
        clock[0] += 50.0
    assert timers.collect_times_of_all_ranks(["optimizer"], steps=2) == {"optimizer": [2.0]}
    assert timers.collect_times_of_all_ranks(["optimizer"]) == {}


def test_a_running_timer_is_taken_without_losing_time(clock):
    interval = Timers(level=0)("interval-time", level=0)
    interval.start()
    taken = []
    for seconds in (1.0, 2.0, 4.0):
        clock[0] += seconds
        taken.append(interval.elapsed())
    assert taken == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    "level, barrier_with_level_1, expected",
    [
        (0, True, ["barrier", "device"]),
        (0, False, ["barrier", "device"]),
        (1, True, ["barrier", "device"]),
        (1, False, ["device"]),
        (2, True, ["device"]),
    ],
)
def test_a_timer_waits_for_the_device_and_at_low_levels_for_the_other_ranks(level, barrier_with_level_1, expected):
    calls = []
    timers = Timers(
        level=2,
        synchronize=lambda: calls.append("device"),
        barrier=lambda: calls.append("barrier"),
        barrier_with_level_1=barrier_with_level_1,
    )
    timers("some", level=level).start()
    assert calls == expected


def test_a_timer_above_the_level_never_waits():
    def fail():
        raise AssertionError("a silent timer must not stall the device")

    with Timers(level=0, synchronize=fail, barrier=fail)("forward-compute", level=2):
        pass


def test_an_error_inside_a_timer_does_not_wait_for_other_ranks():
    waits = []
    timers = Timers(level=2, barrier=lambda: waits.append(1))
    with pytest.raises(RuntimeError, match="boom"), timers("step", level=1):
        raise RuntimeError("boom")
    assert len(waits) == 1
    timers("step", level=1).start()  # and it can be used again


def test_collect_gathers_one_row_of_all_names_from_every_rank(clock):
    def three_ranks(row):
        return [row, [5.0, 0.0], [0.0, 0.0]]

    timers = Timers(level=2, gather=three_ranks)
    with timers("forward-compute"):
        clock[0] += 1.0
    assert timers.collect_times_of_all_ranks(["forward-compute", "forward-recv"]) == {
        "forward-compute": [1.0, 5.0, 0.0]
    }


def test_misuse_is_an_error():
    timers = Timers(level=2)
    timers("a").start()
    with pytest.raises(AssertionError, match="running already"):
        timers("a").start()
    with pytest.raises(AssertionError, match="not running"):
        timers("b").stop()
    with pytest.raises(AssertionError, match="made with level 2"):
        timers("a", level=1)


TIMES = {"forward-backward": [0.0104321, 0.0120004, 0.0], "optimizer": [0.002, 0.001, 0.003]}


def test_minmax_text_is_megatrons():
    assert timer_report_text(TIMES, "minmax") == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (10.43, 12.00)\n"
        "    optimizer ......................................: (1.00, 3.00)"
    )


def test_max_text_is_megatrons():
    assert timer_report_text(TIMES, "max") == (
        "max time across ranks (ms):\n"
        "    forward-backward ...............................: 12.00\n"
        "    optimizer ......................................: 3.00"
    )


def test_all_text_is_megatrons():
    assert timer_report_text(TIMES, "all") == (
        "times across ranks (ms):\n"
        "  forward-backward:\n     rank  0: 10.43\n     rank  1: 12.00\n"
        "  optimizer:\n     rank  0: 2.00\n     rank  1: 1.00\n     rank  2: 3.00"
    )


def test_nothing_timed_is_no_text():
    assert timer_report_text(Timers(level=0).collect_times_of_all_ranks(STEP_TIMERS), "minmax") is None


def test_scalars_are_the_slowest_rank_in_seconds():
    assert max_times_by_tag(TIMES) == {"forward-backward-time": 0.0120004, "optimizer-time": 0.003}
