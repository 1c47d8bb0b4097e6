"""Ranks that end are named, by whoever waits for them, whatever they were about."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.parallel.mesh import Mesh
from megatron.inference.liveness import RankLiveness, accept_rank_connections, watch_ranks
from megatron.inference.service import EngineService
from megatron.inference.service_thread import ServiceStoppedError
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.inference.serving import engine_of, greedy, network

NAME = "rank 1 of 2 (process 7 on there)"


@contextmanager
def watched() -> Iterator[tuple[RankLiveness, socket.socket]]:
    """A roll of one other rank, and that rank's end of the connection."""
    liveness = RankLiveness()
    with ExitStack() as stack:
        ours, theirs, here, there = (stack.enter_context(end) for _ in range(2) for end in socket.socketpair())
        watching = threading.Thread(target=liveness.watch, args=({ours: NAME}, there))
        watching.start()
        yield liveness, theirs
        here.close()
        watching.join(30)
        assert not watching.is_alive()


def wait_for(service: EngineService) -> str:
    """What a service fails of."""
    end = time.monotonic() + 300
    while not service.failure_reason and time.monotonic() < end:
        time.sleep(0.005)
    return service.failure_reason


def test_a_service_without_work_ends_when_a_rank_is_lost() -> None:
    with watched() as (liveness, rank), EngineService(engine_of(network()), liveness) as service:
        assert (
            service.submit_and_wait_all([greedy((3, 1, 4), 2)])[0].reason == "length" and service.failure_reason == ""
        )
        rank.close()
        assert wait_for(service) == f"{NAME} has ended"
        with pytest.raises(ServiceStoppedError, match="has ended"):
            service.submit(greedy((3, 1, 4), 2))


def test_the_lost_rank_explains_a_pass_that_fails() -> None:
    engine = engine_of(network())
    with watched() as (liveness, rank), EngineService(engine, liveness) as service:

        def broken(*_: Any) -> None:
            threading.Timer(0.1, rank.close).start()  # the news may come after the failure
            raise RuntimeError("Connection closed by peer")

        engine.runner.launch = broken  # type: ignore[method-assign]
        reply = service.submit(greedy((3, 1, 4), 2)).wait_for_reply()
        assert reply.reason == "error" and reply.problem == f"{NAME} has ended" == wait_for(service)


def test_ranks_that_leave_after_the_end_are_not_lost() -> None:
    with watched() as (liveness, rank):
        with EngineService(engine_of(network()), liveness) as service:
            pass
        rank.close()
        while not liveness.lost_rank_text:
            time.sleep(0.001)
        assert service.failure_reason == ""


def test_a_stranger_is_no_rank() -> None:
    told: list[tuple[int, str]] = []

    def join() -> None:
        while not told:
            time.sleep(0.001)
        port, secret = told[0]
        for line in ("GET / HTTP/1.1", "wrong rank 1", f"{secret} rank 1"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(f"{line}\n".encode())

    with ExitStack() as stack:
        threading.Thread(target=join).start()
        assert list(accept_rank_connections(2, told.append, stack).values()) == ["rank 1"]


def called(leaves: bool) -> str:
    """On every rank: a roll call, from which the second goes early or not."""
    mesh = Mesh.build(tiny.config(2, tensor_model_parallel_size=2).parallel, tiny.run_of(tiny.config()).mesh.device)
    with watch_ranks(mesh, "localhost") as liveness:
        if leaves and not mesh.world.is_first:
            return ""
        lost = liveness.wait_for_loss(60.0 if leaves else 0.2)
        if not leaves:
            dist.barrier()
        return lost


def test_a_roll_call_tells_the_first_rank_who_has_gone(world: Worlds) -> None:
    assert world(2).run(called, True)[0].startswith("rank 1 of 2 (process ")
    assert world(2).run(called, False) == ["", ""]
