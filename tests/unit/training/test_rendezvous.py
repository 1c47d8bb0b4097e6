"""What a rank makes of the launcher's store: of one that is gone, and of what strangers leave in it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.training import entry
from megatron.training.health.watchdog import _parse_rank_status
from megatron.training.launch.launch_info import LaunchInfo
from megatron.training.launch.rendezvous import FIRST_FAILURE, RendezvousStore, printable_text


def master() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a rank ends itself."""
    event = threading.Event()
    monkeypatch.setattr(entry.os, "_exit", lambda code: event.set())
    monkeypatch.setattr(entry, "_LOOK_EVERY", 0.02)
    monkeypatch.setattr(entry, "_SILENCE", 0.2)
    monkeypatch.setattr(entry, "_AGAIN", 0.1)
    return event


def test_a_rank_ends_when_its_launchers_store_stays_gone(
    ended: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    store = master()
    alarm = entry.FailureReporter(LaunchInfo(rank=1, local_rank=1, size=2, store=f"127.0.0.1:{store.port}", job=""))
    assert not ended.wait(0.5), "while it answers, nothing happens"
    del store
    assert ended.wait(60)
    alarm.stop_watching()
    said = capfd.readouterr().err
    assert (
        "rank 1 on node" in said
        and "the store of its launcher at 127.0.0.1:" in said
        and "has not answered for" in said
    )


def test_a_connection_that_breaks_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    store = master()
    board = RendezvousStore.connect(LaunchInfo(0, 0, 2, f"127.0.0.1:{store.port}", ""))
    sound, board._store = board._store, Broken()
    assert board.read(FIRST_FAILURE) is None and board.seconds_without_answer > 0.0
    board.reconnect(5.0)
    board.write(FIRST_FAILURE, "text")
    assert board.seconds_without_answer == 0.0 and board.read(FIRST_FAILURE) == "text" and sound is not None


class Broken:
    """A store whose connection was cut."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_rank_of_torchrun_ends_with_its_parent_and_another_process_does_not(
    is_launched: bool, ended: threading.Event, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    parents = iter([4711])
    monkeypatch.setattr(entry.os, "getppid", lambda: next(parents, 1))
    alarm = entry.FailureReporter(LaunchInfo(rank=0, local_rank=0, size=1, store="", job="", is_launched=is_launched))
    assert ended.wait(60 if is_launched else 0.3) == is_launched
    alarm.stop_watching()
    assert ("its launcher, process 4711, is gone" in capfd.readouterr().err) == is_launched


def test_what_a_stranger_left_in_the_store_is_neither_printed_nor_believed() -> None:
    store = master()
    board = RendezvousStore.connect(LaunchInfo(0, 0, 2, f"127.0.0.1:{store.port}", ""))
    store.set("megatron/0/first-failure", b"\x80\x04\x95\x1b[2J\x07end")
    store.get("megatron/0/first-failure")  # set() returns before the server has the value; an answer means that it has
    assert board.read(FIRST_FAILURE) == "\ufffd?\ufffd?[2J?end"
    assert printable_text(b"a\n\tb\r" * 100_000).count("\n") < 20_000
    for text in ("{}", "[1]", "", '["a", "b", "c", "d", "e", "f"]', '["a", 1.0, "c", "d", "e", 7]', "\x00"):
        assert _parse_rank_status(text) is None, text
