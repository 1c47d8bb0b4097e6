"""Clients that connect and then say nothing, or half of something: they are closed, and keep nobody out."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.inference.requests import GenerationEvent, GenerationReply, TokenLogprob
from megatron.inference.server import http_server
from megatron.inference.server.request_handling import HTTPCallRequests
from megatron.inference.server.serving import RequestLimits
from tests.unit.inference.clients import Running, bytes_engine, serving, until

HEADERS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n"
)
STREAM = {"prompt": ["a"] * 8, "max_tokens": 40, "stream": True, "logprobs": 20, "ignore_eos": True}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
EVER = 3600.0


@contextmanager
def connected(server: Running, *said: bytes) -> Iterator[list[socket.socket]]:
    """Clients, each of which says this first."""
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=120) for _ in said]
    try:
        for client, words in zip(clients, said, strict=True):
            client.sendall(words)
        yield clients
    finally:
        for client in clients:
            client.close()


def rest(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while part := client.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize(
    "said, answer",
    [
        (b"", b"HTTP/1.1 408 "),
        (HEADERS[:20], b"HTTP/1.1 408 "),
        (HEADERS, b"HTTP/1.1 408 "),
        (HEADERS + b"\r\n{", b"HTTP/1.1 408 "),
        (HEALTH + b"\r\n" + HEALTH, b"HTTP/1.1 200 "),
        (HEALTH + b"Content-Length: 9\r\n\r\n123", b"HTTP/1.1 200 "),
    ],
    ids=[
        "nothing",
        "half a line",
        "half the headers",
        "half a body",
        "half of a second call",
        "a body that goes on after the answer",
    ],
)
def test_who_says_half_of_something_is_closed(said: bytes, answer: bytes) -> None:
    with (
        serving(bytes_engine(), limits=RequestLimits(header_seconds=0.2, read_seconds=0.2)) as server,
        connected(server, said) as (client,),
    ):
        found = rest(client)
        assert found.startswith(answer) and found.count(b"HTTP/1.1") == 1, found
        until(lambda: not server.server.server_state.connections)


def test_three_hundred_half_sent_headers_keep_nobody_out() -> None:
    limits = RequestLimits(connections=8, header_seconds=EVER)
    with serving(bytes_engine(), limits=limits) as server, connected(server, *[HEADERS] * 300) as clients:
        assert server.ask("GET", "/health").status == 200
        assert server.complete(prompt="a", max_tokens=2).status == 200
        assert len(server.server.server_state.connections) <= 8
        assert {rest(client)[:12] for client in clients[:100]} <= {b"HTTP/1.1 408", b""}, "the first of them made room"


def test_where_all_wait_for_answers_a_new_connection_is_told_to_come_again() -> None:
    limits = RequestLimits(connections=2, header_seconds=EVER, read_seconds=EVER)
    with (
        serving(bytes_engine(), limits=limits) as server,
        connected(server, HEADERS + b"\r\n", HEADERS + b"\r\n") as calls,
    ):
        until(lambda: len(server.server.server_state.tasks) == 2)
        with connected(server, HEALTH) as (client,):
            assert rest(client).startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
        calls[0].sendall(b" " * 50)
        assert calls[0].recv(1 << 16).startswith(b"HTTP/1.1 400 "), "the calls that there are go on"
        assert server.ask("GET", "/health").status == 200, "and one that was answered makes room"


def test_who_leaves_in_the_middle_of_a_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with serving(bytes_engine()) as server:
        with connected(server, HEADERS + b"\r\n{"):
            until(lambda: server.server.server_state.tasks)
        until(lambda: not server.server.server_state.tasks)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


@contextmanager
def deaf_client(server: Running, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client that asks and reads nothing; the system takes as little for it as it may."""
    data = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        client.sendall(
            HEADERS.replace(b" /v1/completions ", f" {path} ".encode()).replace(b"50", b"%d" % len(data))
            + b"\r\n"
            + data
        )
        yield client


@pytest.mark.parametrize("streams", [True, False], ids=["a stream", "a whole answer"])
def test_who_never_reads_is_closed_and_decoded_no_further(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    monkeypatch.setattr(http_server, "_SEND_BUFFER", 4096)
    limits = RequestLimits(write_seconds=0.5, header_seconds=EVER)
    with serving(bytes_engine(), limits=limits) as server:
        with deaf_client(server, "/v1/completions", {**STREAM, "stream": streams}):
            until(lambda: server.server.server_state.connections)
            until(lambda: not server.server.server_state.connections)
            server.settle()
        assert server.complete(prompt="a", max_tokens=2).status == 200
        assert server.service.engine.metrics().blocks_used == 0


def test_who_reads_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the time within which something must be read, and than connections may be idle."""
    monkeypatch.setattr(http_server, "_SEND_BUFFER", 4096)
    limits = RequestLimits(write_seconds=0.3, header_seconds=0.3)
    with (
        serving(bytes_engine(), limits=limits) as server,
        deaf_client(server, "/v1/completions", {**STREAM, "stream": False, "seed": 1}) as client,
    ):
        answer, length = b"", 0
        while (head := answer.find(b"\r\n\r\n")) < 0 or len(answer) < head + 4 + length:
            time.sleep(0.001)
            answer += client.recv(1 << 13)
            if b"\r\n\r\n" in answer:
                length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert length > 100_000 and len(json.loads(answer[head + 4 :])["choices"]) == 8


def test_events_that_nobody_takes_are_joined() -> None:
    async def collect() -> tuple[int, list[tuple[int, str, int]]]:
        call = HTTPCallRequests(SimpleNamespace(submit=lambda request, listener: listeners.append(listener)), [1, 2])  # type: ignore[arg-type, list-item]
        for number in range(500):
            for place, listener in enumerate(listeners):
                reply = GenerationReply("length") if number == 499 else None
                listener(GenerationEvent(place, (TokenLogprob(number),), "x", reply))
        await asyncio.sleep(0)
        waiting = len(call._waiting)
        return waiting, [(place, event.text, len(event.tokens)) async for place, event in call.events()]

    listeners: list[Any] = []
    assert asyncio.run(collect()) == (2, [(0, "x" * 500, 500), (1, "x" * 500, 500)])
