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
from megatron.inference.server.serving import RequestLimits

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LimitedHTTPConnection(H11Protocol):
    """uvicorn's HTTP connection, within the limits of the app (`RequestFilter.limits`)."""

    _waits: asyncio.TimerHandle | None = None

    @property
    def _server_limits(self) -> RequestLimits:
        assert isinstance(self.config.app, RequestFilter), "Server serves nothing else"
        return self.config.app.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for a request, or close the connection if there are too many."""
        super().connection_made(transport)
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

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        self._cancel_idle_timer()
        super().connection_lost(exc)

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
        """Close the connection, with 408 if no request was answered on it."""
        self._respond_and_close(_TOO_SLOW if self.cycle is None else b"")

    def _close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for a request; return whether there was one."""
        waiting = {
            other: other._waits.when()
            for other in self.connections
            if isinstance(other, LimitedHTTPConnection) and other._waits is not None
        }
        if waiting:
            min(waiting, key=waiting.__getitem__)._close_as_timed_out()
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
