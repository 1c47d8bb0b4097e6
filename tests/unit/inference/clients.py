"""A server on loopback, and what asks it: the standard library's client, which sends just what it is told."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.inference.engine import Engine
from megatron.inference.server.app import LOCAL, RequestFilter, build_app
from megatron.inference.server.chat import ChatPromptEncoder
from megatron.inference.server.http_server import DrainingServer, bind_socket
from megatron.inference.server.serving import GenerationServing, RequestLimits
from megatron.inference.service import EngineService
from tests.unit.inference.serving import engine_of, stages_on

POSITIONS = 256
NAME = "tiny"


@cache
def bytes_network() -> GPTModel:
    """A network whose words are bytes."""
    return stages_on(1, 257, max_position_embeddings=POSITIONS, seq_length=POSITIONS)[0]


def bytes_engine(**changes: Any) -> Engine:
    """An engine over it."""
    return engine_of(bytes_network(), ByteTokenizer(), **changes)


@dataclass
class Answer:
    """status, headers in lower case, and body of an HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    """A server in a thread."""

    port: int
    service: EngineService
    server: DrainingServer
    thread: threading.Thread

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One call. body: bytes as they are, all else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def api(self, **body: Any) -> Answer:
        """PUT /api."""
        return self.ask("PUT", "/api", body)

    def complete(self, **body: Any) -> Answer:
        """POST /v1/completions."""
        return self.ask("POST", "/v1/completions", body)

    def converse(self, **body: Any) -> Answer:
        """POST /v1/chat/completions."""
        return self.ask("POST", "/v1/chat/completions", body)

    def begin(self, path: str, body: Any) -> socket.socket:
        """Send a POST and read nothing."""
        data = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return sock

    def settle(self) -> None:
        """Wait until the engine has nothing to do."""
        until(lambda: self.service.engine.is_idle)


def until(true: Any, seconds: float = 300.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


@contextmanager
def serving(
    engine: Engine,
    *,
    limits: RequestLimits = RequestLimits(),
    token: str = "",
    chat: str = "chatml",
    drain_seconds: float = 30.0,
    **adapters: Any,
) -> Iterator[Running]:
    """A server over an engine, which ends as after a signal."""
    service = EngineService(engine)
    service.start()
    sock = bind_socket("127.0.0.1", 0)
    app = build_app(
        GenerationServing(service, NAME, limits, **adapters),
        chat=ChatPromptEncoder(engine.tokenizer, chat) if chat else None,
        token=token,
        hosts=LOCAL,
    )
    with running(app, service, sock, drain_seconds) as server:
        yield server


@contextmanager
def running(app: RequestFilter, service: Any, sock: socket.socket, drain_seconds: float = 30.0) -> Iterator[Running]:
    """A server of an app in a thread. service: has been started."""
    server = DrainingServer(app, service, drain_seconds)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield Running(sock.getsockname()[1], service, server, thread)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
