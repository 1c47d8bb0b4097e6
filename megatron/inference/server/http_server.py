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
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.core.config.flags.declare import ConfigError
from megatron.inference.server.app import RequestFilter
from megatron.inference.server.serving import RequestLimits
from megatron.inference.service_thread import ServiceThread

logger = logging.getLogger(__name__)

_LEAVING_SECONDS = 5  # for answers that are there to reach who asked
_SEND_BUFFER = 2**18  # bytes of a connection that the system holds for a client that is behind
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class EngineFailed(Exception):
    """The engine has failed; the message says why."""


class LimitedHTTPConnection(H11Protocol):
    """uvicorn's HTTP connection, within the limits of the app (`RequestFilter.limits`).

    A connection waits while no request of its is being answered: before the first, between two, and while a client goes on sending a
    body that was answered already. One that waits too long is closed. When there are too many, the one that has waited longest makes
    room; only when all of them wait for answers is a new one refused (503). So clients that open connections and send half a request
    (300 of them, or as many as they like) keep nobody out. How long a body may take, and how large it may be, is app.py's affair.

    One whose client does not read what it is sent is closed, too, in the middle of an answer or after it: within each
    `write_seconds` something must go out. What the system holds of it is bounded (`_SEND_BUFFER`).
    """

    _waits: asyncio.TimerHandle | None = None
    _reads: asyncio.TimerHandle | None = None  # the next look at whether the client reads

    @property
    def _server_limits(self) -> RequestLimits:
        assert isinstance(self.config.app, RequestFilter), "Server serves nothing else"
        return self.config.app.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for a request, or close the connection if there are too many."""
        super().connection_made(transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if len(self.connections) > self._server_limits.connections and not self._close_longest_waiting():
            self._respond_and_close(_BUSY)
        else:
            self._update_idle_timer()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        super().data_received(data)
        self._update_idle_timer()

    def on_response_complete(self) -> None:
        """Restart the time limit after a response."""
        super().on_response_complete()
        self._update_idle_timer()
        self._watch_reading()

    def pause_writing(self) -> None:
        """Start the time limit for a client that is behind; nothing more is written until it has read."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """Cancel the time limit of a client that has read."""
        super().resume_writing()
        self._cancel_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limits."""
        self._cancel_idle_timer()
        self._cancel_read_timer()
        super().connection_lost(exc)

    def _watch_reading(self) -> None:
        """Start the time limit for the client to read something, if anything is left to read."""
        self._cancel_read_timer()
        if left := self.transport.get_write_buffer_size():
            self._reads = self.loop.call_later(self._server_limits.write_seconds, self._close_if_unread, left)

    def _close_if_unread(self, before: int) -> None:
        """Close the connection if the client has read nothing since `before` bytes were left; else go on watching."""
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_reading()

    def _cancel_read_timer(self) -> None:
        if self._reads is not None:
            self._reads.cancel()
            self._reads = None

    def _update_idle_timer(self) -> None:
        """Start the time limit if no request is being answered; cancel it otherwise."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_idle_timer()
        elif self._waits is None:
            self._waits = self.loop.call_later(self._server_limits.header_seconds, self._close_as_timed_out)

    def _cancel_idle_timer(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _close_as_timed_out(self) -> None:
        """Close the connection, with 408 if no request was answered on it; not while its client reads the last answer."""
        self._waits = None
        if self.cycle is not None and self.transport.get_write_buffer_size():
            self._update_idle_timer()
        else:
            self._respond_and_close(_TOO_SLOW if self.cycle is None else b"")

    def _close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for a request; return whether there was one."""
        waiting = {
            other: other._waits.when()
            for other in self.connections
            if isinstance(other, LimitedHTTPConnection) and other._waits is not None
        }
        if waiting:
            longest = min(waiting, key=waiting.__getitem__)
            longest._respond_and_close(_TOO_SLOW if longest.cycle is None else b"")
        return bool(waiting)

    def _respond_and_close(self, response: bytes) -> None:
        """Send a response and close; abort some time later if the client has not read it."""
        self._cancel_idle_timer()
        self.connections.discard(self)  # at once, and not when the system has closed it
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self.transport.write(response)
            self.transport.close()
            self.loop.call_later(self._server_limits.header_seconds, self.transport.abort)


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
    address once it listens. Raises `EngineFailed`.
    """
    try:
        DrainingServer(app, service, drain_seconds, ready).run([sock])
    finally:
        service.stop()
    if service.failure_reason:
        raise EngineFailed(service.failure_reason)


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
