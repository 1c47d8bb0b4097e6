"""A connection to the server: it may say nothing for so long only, and there are so many of them at most.

A connection waits while no request of its is being answered: before the first, between two, and while a client goes on sending a
body that was answered already. One that waits too long is closed. When there are too many, the one that has waited longest makes
room; only when all of them wait for answers is a new one refused (503). So clients that open connections and send half a request
(300 of them, or as many as they like) keep nobody out. How long a body may take, and how large it may be, is app.py's affair.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.inference.server.app import RequestFilter
from megatron.inference.server.serving import Limits

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """uvicorn's, within the limits that the app has (`RequestFilter.limits`)."""

    _waits: asyncio.TimerHandle | None = None

    @property
    def _server_limits(self) -> Limits:
        assert isinstance(self.config.app, RequestFilter), "Server serves nothing else"
        return self.config.app.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, if there is room."""
        super().connection_made(transport)
        if len(self.connections) > self._server_limits.connections and not self._make_room():
            self._respond_and_close(_BUSY)
        else:
            self._set_time_limit()

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        super().data_received(data)
        self._set_time_limit()

    def on_response_complete(self) -> None:
        """An answer is given; the next request may be there already."""
        super().on_response_complete()
        self._set_time_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._wait_no_longer()
        super().connection_lost(exc)

    def _set_time_limit(self) -> None:
        """Set the time limit where nothing is being answered, and none where something is."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_no_longer()
        elif self._waits is None:
            self._waits = self.loop.call_later(self._server_limits.header_seconds, self._too_slow)

    def _wait_no_longer(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _too_slow(self) -> None:
        self._respond_and_close(_TOO_SLOW if self.cycle is None else b"")

    def _make_room(self) -> bool:
        """Close the connection that has waited longest; whether there is one."""
        waiting = {
            other: other._waits.when()
            for other in self.connections
            if isinstance(other, Connection) and other._waits is not None
        }
        if waiting:
            min(waiting, key=waiting.__getitem__)._too_slow()
        return bool(waiting)

    def _respond_and_close(self, response: bytes) -> None:
        """Say this and close; some time later also if the client has not read what it was told."""
        self._wait_no_longer()
        self.connections.discard(self)  # at once, and not when the system has closed it
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self.transport.write(response)
            self.transport.close()
            self.loop.call_later(self._server_limits.header_seconds, self.transport.abort)
