"""Watch: what ends a run, on which rank it was noticed, and what is put back afterwards."""

import gc
import json
import math
import os
import signal
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity

from megatron.core.config.settings.run import LogConfig, TrainConfig
from megatron.training.health.exit_conditions import ExitConditions, NonFiniteError, TorchProfile
from megatron.training.report.metrics import StepMetrics


def train(**fields):
    return TrainConfig(**{"exit_signal_handler": False, **fields})


def step(iteration, loss=1.0, **fields):
    return StepMetrics(
        iteration=iteration, consumed_samples=0, batch_size=1, learning_rate=0.0, losses={"lm loss": loss}, **fields
    )


def test_a_run_goes_on_without_a_reason():
    with ExitConditions(TrainConfig()) as watch:
        assert [watch.reason_to_stop(iteration) for iteration in range(5)] == [""] * 5


def test_exit_interval_stops_at_its_multiples_and_not_at_the_start():
    with ExitConditions(train(exit_interval=3)) as watch:
        stops = [iteration for iteration in range(8) if watch.reason_to_stop(iteration)]
    assert stops == [3, 6]


def test_exit_duration_counts_from_the_start_of_the_job():
    config = train(exit_duration_in_mins=10)
    with ExitConditions(config, started=time.monotonic() - 599) as watch:
        assert watch.reason_to_stop(1) == ""
    with ExitConditions(config, started=time.monotonic() - 601) as watch:
        assert "after 10.0 minutes" in watch.reason_to_stop(1)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_stops_the_run_and_the_old_handler_comes_back(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with ExitConditions(TrainConfig(exit_signal=name)) as watch:
        assert watch.reason_to_stop(1) == ""
        os.kill(os.getpid(), number)
        assert name in watch.reason_to_stop(1)
        assert name in watch.reason_to_stop(2), "a stop stays a stop"
    assert signal.getsignal(number) is before


def test_without_the_handler_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    with ExitConditions(train()):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_loop_in_another_thread_gets_no_handler_and_no_error():
    results = []

    def loop():
        with ExitConditions(TrainConfig()) as watch:
            results.append(watch.reason_to_stop(1))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert results == [""]


def test_all_ranks_stop_when_one_of_them_got_the_signal():
    """Two ranks that vote in step, played by hand: rank 0 got SIGTERM, rank 1 did not."""
    votes = []

    def agree_as_the_other(vote):
        votes.append(vote)
        return len(votes) % 3 > 0 or vote  # rank 0 says yes to both questions, and that it was not Ctrl-C

    with ExitConditions(train(exit_signal_handler=True), agree=agree_as_the_other, poll=agree_as_the_other) as watch:
        assert "SIGTERM" in watch.reason_to_stop(1)
    assert votes == [False, False, False]


def test_a_quiet_step_polls_the_other_ranks_once_and_waits_for_no_answer():
    votes, waits = [], []
    with ExitConditions(
        train(exit_duration_in_mins=10),
        agree=lambda vote: waits.append(vote) or vote,
        poll=lambda vote: votes.append(vote) or vote,
    ) as watch:
        watch.reason_to_stop(1)
    assert votes == [False] and not waits


def test_no_rank_is_asked_where_no_flag_could_end_the_run_on_one_of_them():
    votes = []
    with ExitConditions(train(exit_signal_handler=False), poll=lambda vote: votes.append(vote) or vote) as watch:
        watch.reason_to_stop(1)
    assert not votes


@pytest.mark.parametrize(
    "bad, words",
    [
        (step(7, math.nan), "lm loss is nan in iteration 7"),
        (step(8, -math.inf), "lm loss is -inf in iteration 8"),
        (step(9, grad_norm=math.inf), "gradient norm is inf in iteration 9"),
    ],
)
def test_numbers_that_are_not_finite_end_the_run(bad, words):
    with ExitConditions(train()) as watch:
        watch.require_finite([step(6, grad_norm=1.0)])
        with pytest.raises(NonFiniteError, match=words):
            watch.require_finite([step(6), bad])


def test_a_rank_that_saw_nothing_fails_with_the_others():
    with ExitConditions(train(), agree=lambda vote: True) as watch, pytest.raises(NonFiniteError, match="another rank"):
        watch.require_finite([step(1)])


def test_a_skipped_step_a_loss_scale_and_the_switch_are_no_failure():
    bad = step(1, math.nan, grad_norm=math.inf)
    ExitConditions(train()).require_finite([step(1, math.nan, skipped=True)])
    ExitConditions(train(), tolerates_overflow=True).require_finite([bad])
    ExitConditions(train(check_for_nan_in_loss_and_grad=False)).require_finite([bad])


def test_manual_collection_runs_at_its_interval_only(monkeypatch):
    calls = []
    monkeypatch.setattr(gc, "collect", lambda *generation: calls.append(None))
    assert gc.isenabled()
    with ExitConditions(train(manual_gc=True, manual_gc_interval=2)) as watch:
        assert not gc.isenabled() and len(calls) == 1
        for iteration in range(1, 6):
            watch.profile_and_collect_garbage(iteration)
        assert len(calls) == 3
        watch.collect_evaluation_garbage()
        assert len(calls) == 4
    assert gc.isenabled()


def test_automatic_collection_is_left_alone_by_default(monkeypatch):
    with ExitConditions(train()) as watch:
        monkeypatch.setattr(gc, "collect", lambda *generation: pytest.fail("nobody asked"))
        watch.profile_and_collect_garbage(1)
        watch.collect_evaluation_garbage()
        assert gc.isenabled()


def profiled(tmp_path, steps, **fields):
    log = LogConfig(profile=True, profile_step_start=2, profile_step_end=4, **fields)
    profile = TorchProfile.build(log, rank=1, activities=[ProfilerActivity.CPU], folder=tmp_path / "traces")
    with ExitConditions(train(), profile=profile) as watch:
        for iteration in range(steps):
            watch.start_profiler_if_due(iteration)
            with torch.profiler.record_function(f"step {iteration}"):
                torch.ones(2) + 1
            watch.profile_and_collect_garbage(iteration + 1)
    return profile, sorted(tmp_path.glob("traces/*"))


def names_in(path):
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["name"].startswith("step ")}


def test_a_profile_covers_its_window(tmp_path):
    _, (path,) = profiled(tmp_path, 6, profile_ranks=(0, 1))
    assert path.name == "profile_rank1_iterations2-4.json" and names_in(path) == {"step 2", "step 3"}


def test_a_run_that_ends_inside_the_window_keeps_its_profile(tmp_path):
    _, (path,) = profiled(tmp_path, 3, profile_ranks=(1,))
    assert names_in(path) == {"step 2"}


def test_other_ranks_record_no_profile(tmp_path):
    profile, files = profiled(tmp_path, 6, profile_ranks=(0,))
    assert profile is None and files == []
