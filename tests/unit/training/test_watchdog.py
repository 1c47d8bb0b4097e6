"""Whom the others wait for, and what ranks say of each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.training.health import watchdog
from megatron.training.health.failures import error_location_text, error_text
from megatron.training.health.watchdog import HangDetector, RankLostError, RankStatus, blocking_ranks
from megatron.training.launch.launch_info import LaunchInfo
from megatron.training.launch.rendezvous import FIRST_FAILURE, RendezvousStore, missing_launcher_store_warning
from megatron.training.report.run_log import RunLog, read_run_log_events
from megatron.training.state.run import TerminationSignalState
from tests.helpers import tiny


def answer(group: str, counts: Mapping[str, int]) -> RankStatus:
    return RankStatus("node", 0.0, "training", "", group, counts)


def test_the_rank_that_has_begun_fewer_collectives_is_the_one_that_others_wait_for() -> None:
    everyone = "world (0, 1, 2)"
    answers = {
        0: answer(everyone, {everyone: 5}),
        1: answer(everyone, {everyone: 5}),
        2: answer(everyone, {everyone: 4}),
    }
    assert blocking_ranks(answers, 3) == [2]


def test_who_is_silent_is_waited_for() -> None:
    everyone = "world (0, 1, 2)"
    assert blocking_ranks({0: answer(everyone, {everyone: 5}), 2: answer(everyone, {everyone: 5})}, 3) == [1]


def test_a_chain_of_waits_ends_at_its_cause() -> None:
    # Rank 0 waits for 1 over tp, 1 waits for 3 over dp, 3 is in no collective that others have not reached.
    pair, column = "tp (0, 1)", "dp (1, 3)"
    answers = {
        0: answer(pair, {pair: 7}),
        1: answer(column, {pair: 6, column: 3}),
        2: answer("tp (2, 3)", {"tp (2, 3)": 6}),
        3: answer("tp (2, 3)", {"tp (2, 3)": 6, column: 2}),
    }
    assert blocking_ranks(answers, 4) == [3]


def test_ranks_that_stand_still_together_blame_nobody() -> None:
    everyone = "world (0, 1)"
    assert blocking_ranks({rank: answer(everyone, {everyone: 5}) for rank in range(2)}, 2) == []


def test_the_first_to_claim_a_key_keeps_it_and_a_restart_begins_afresh() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    first, second, restarted = (
        RendezvousStore.connect(LaunchInfo(rank, 0, 2, f"127.0.0.1:{store.port}", "", attempt))
        for rank, attempt in ((0, "0"), (1, "0"), (0, "1"))
    )
    assert first.read(FIRST_FAILURE) is None
    assert first.write_if_absent(FIRST_FAILURE, "rank 0") and not second.write_if_absent(FIRST_FAILURE, "rank 1")
    assert second.read(FIRST_FAILURE) == "rank 0" and restarted.read(FIRST_FAILURE) is None
    assert RendezvousStore.connect(LaunchInfo(0, 0, 1, f"127.0.0.1:{store.port}", "")) is None, (
        "one rank has nobody to tell"
    )


def test_a_rank_that_moves_is_left_alone_and_one_that_does_not_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    monkeypatch.setattr(watchdog, "_LOOK_EVERY", 0.05)
    monkeypatch.setattr(watchdog, "_PATIENCE", {"hang": 0.5, "lost": 0.5})
    place = LaunchInfo(0, 0, 2, f"127.0.0.1:{store.port}", "")
    board, ended = RendezvousStore.connect(place), threading.Event()
    run = tiny.run_of(tiny.config(hang_timeout_minutes=0.6 / 60.0))
    with HangDetector(run, place):
        for number in range(10):
            run.mesh.flight_recorder.begin_activity("training", number + 1)
            ended.wait(0.1)
        assert board.read(FIRST_FAILURE) is None
        for _ in range(100):
            if board.read(FIRST_FAILURE) is not None:
                break
            ended.wait(0.1)
    said = board.read(FIRST_FAILURE)
    assert (
        "has not moved for" in said
        and "the others wait for rank 1" in said
        and "rank 1 DOES NOT ANSWER: it was never seen" in said
    )
    assert "rank 0 on node" in said and "training, iteration 10" in said
    assert "ended.wait(0.1)" in capfd.readouterr().err, "the stacks are shown"


def test_a_run_that_ends_with_another_rank_says_so_once_in_its_ledger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    monkeypatch.setattr(watchdog, "_LOOK_EVERY", 0.05)
    place, run_log = LaunchInfo(0, 0, 2, f"127.0.0.1:{store.port}", ""), RunLog(tmp_path / "run_log.jsonl")
    run = replace(tiny.run_of(tiny.config(hang_timeout_minutes=0.0)), run_log=run_log)
    with HangDetector(run, place):
        RendezvousStore.connect(place).write_if_absent(
            FIRST_FAILURE, "rank 1 on node b: ValueError: wrong\non node b, in training"
        )
        deadline = time.monotonic() + 300
        while not run_log.path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    run_log.add("end", reason="RuntimeError: connection closed")
    (end,) = read_run_log_events(run_log.path)
    assert end["reason"] == "first failure: rank 1 on node b: ValueError: wrong" and end["failed"]


@pytest.mark.parametrize("signal, raised", [("SIGTERM", RankLostError), ("", RuntimeError)])
def test_a_rank_that_lost_another_and_was_told_to_end_needs_no_patience(signal: str, raised: type[Exception]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    place = LaunchInfo(0, 0, 2, f"127.0.0.1:{store.port}", "")
    RendezvousStore.connect(place).write_if_absent(FIRST_FAILURE, "rank 1 is gone")
    run = replace(tiny.run_of(tiny.config(hang_timeout_minutes=0.0)), ending=TerminationSignalState(signal))
    with pytest.raises(Exception) as caught, HangDetector(run, place):
        raise RuntimeError("Connection closed by peer")
    assert caught.type is raised and signal in str(caught.value)


def test_ranks_without_a_launchers_store_are_told_what_they_cannot_do() -> None:
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in missing_launcher_store_warning(
        LaunchInfo(0, 0, 2, "", "", meeting="127.0.0.1:29500")
    )
    assert not missing_launcher_store_warning(
        LaunchInfo(0, 0, 2, "127.0.0.1:29500", "")
    ) and not missing_launcher_store_warning(LaunchInfo(0, 0, 1, "", ""))


def test_an_error_is_described_with_its_place_and_notes() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        error.add_note("on rank 3")
        assert error_text(error) == "ValueError: wrong\non rank 3"
        assert error_location_text(error).startswith("unit/training/test_watchdog.py:")
        assert error_location_text(error).endswith("in test_an_error_is_described_with_its_place_and_notes")
