"""The process that serves: from the first request to the last.

SIGTERM or SIGINT: no more is taken, which /health and every new call are told; what runs goes on for some seconds, and is then
given as far as it is. A second SIGINT ends at once. When the engine fails, as when a rank has died, everyone who waits hears of it,
and the process ends with the error.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from megatron.core.config.flags import ConfigError
from megatron.inference.server.app import RequestFilter
from megatron.inference.server.connections import LimitedHTTPConnection
from megatron.inference.service_thread import ServiceThread

logger = logging.getLogger(__name__)

_LEAVING_SECONDS = 5  # for answers that are there to reach who asked


class ServerFailed(Exception):
    """The engine has failed; the message says why."""


class DrainingServer(uvicorn.Server):
    """uvicorn server that also ends when the engine fails, and stops the engine at shutdown. service: already started.
    drain_seconds: how long running requests may go on after a signal. ready: called with the address once it listens.
    """

    def __init__(
        self,
        app: RequestFilter,
        service: ServiceThread,
        drain_seconds: float,
        ready: Callable[[str], None] = lambda address: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                http=LimitedHTTPConnection,
                timeout_graceful_shutdown=_LEAVING_SECONDS,
            )
        )
        self._service, self._drain_seconds, self._ready = service, drain_seconds, ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at a signal, which is no failure and not raised again as by uvicorn. A second SIGINT ends at once."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, log the address, and call `ready`."""
        await super().startup(sockets)
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            logger.info("serving at %s", address)
            self._ready(address)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; return whether to end."""
        return bool(await super().on_tick(counter) or self._service.failure_reason)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the service while new requests are refused, stop it, then close connections."""
        draining = asyncio.create_task(asyncio.to_thread(self._service.drain, self._drain_seconds))
        while not (draining.done() or self.force_exit or self._service.failure_reason):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self._service.stop)
        await draining
        await super().shutdown(sockets)


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not listening yet. port 0: a free one. `ConfigError` if that fails."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        sock = socket.socket(family, kind)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port} cannot be had: {error}; give others") from error
    return sock


def serve_on_socket(
    app: RequestFilter,
    service: ServiceThread,
    sock: socket.socket,
    *,
    drain_seconds: float,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve on a socket until a signal. The service must be started; it is stopped on return. ready: called with the
    address once it listens. Raises `ServerFailed`.
    """
    try:
        DrainingServer(app, service, drain_seconds, ready).run([sock])
    finally:
        service.stop()
    if service.failure_reason:
        raise ServerFailed(service.failure_reason)


def run_follower_ignoring_signals(
    follow: Callable[[], None], signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT)
) -> None:
    """On every rank but the first: call `follow`, which returns when the first rank ends, with these signals ignored. A
    launcher sends its signals to all ranks; the first drains with the help of the others.
    """
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        follow()
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
