"""The engine requests of one HTTP call.

    call = HTTPCallRequests(service, requests)      # from the event loop
    replies = await call.wait_for_replies()         # or: async for place, event in call.events()

The engine sends events in its own thread; they are handed over to the event loop. Those that nobody takes are joined, so that
at most one of each request waits. Leaving the iteration cancels the requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from megatron.core.config.flags.declare import ConfigError
from megatron.inference.requests import EngineBusyError, GenerationEvent, GenerationReply, GenerationRequest
from megatron.inference.server.body_fields import RequestRefused
from megatron.inference.service import EngineService, RequestStream
from megatron.inference.service_thread import ServiceStoppedError

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class HTTPCallRequests:
    """The engine requests of one HTTP request. Submits all of them on creation, or none and raises `RequestRefused`."""

    def __init__(self, service: EngineService, requests: Sequence[GenerationRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, GenerationEvent] = {}
        self._news = asyncio.Event()
        self._streams: list[RequestStream] = []
        self._ended = [False] * len(requests)
        try:
            for place, request in enumerate(requests):
                self._streams.append(service.submit(request, partial(self._queue_in_event_loop, place)))
        except (EngineBusyError, ServiceStoppedError, ConfigError) as error:
            self.cancel_all()
            raise refusal_for_error(error) from error

    async def events(self) -> AsyncIterator[tuple[int, GenerationEvent]]:
        """Yield (index of the request, event) until all have their reply."""
        try:
            while not all(self._ended):
                await self._news.wait()
                place = next(iter(self._waiting))
                event = self._waiting.pop(place)
                if not self._waiting:
                    self._news.clear()
                self._ended[place] = event.reply is not None
                yield place, event
        finally:
            self.cancel_all()

    async def wait_for_replies(self) -> list[GenerationReply]:
        """Wait for all replies; returned in the order of the requests. Raises `RequestRefused` if the engine fails."""
        replies: dict[int, GenerationReply] = {}
        try:
            async for place, event in self.events():
                if event.reply is not None:
                    replies[place] = event.reply
        finally:
            self.cancel_all()  # a task that is cancelled leaves `events` to the garbage collector
        for reply in replies.values():
            if reply.reason == "error":
                raise RequestRefused(reply.problem, 500)
        return [replies[place] for place in sorted(replies)]

    def cancel_all(self) -> None:
        """Cancel the requests that have not ended."""
        for place, stream in enumerate(self._streams):
            if not self._ended[place]:
                self._ended[place] = True
                stream.cancel()

    def _queue_in_event_loop(self, place: int, event: GenerationEvent) -> None:
        """From the engine's thread: hand an event over to the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._add_event, place, event)
        except RuntimeError:  # the loop is closed, and nobody listens
            pass

    def _add_event(self, place: int, event: GenerationEvent) -> None:
        """Add an event to those that wait, joined with one of the same request."""
        before = self._waiting.pop(place, None)
        if before is not None:
            event = replace(event, tokens=(*before.tokens, *event.tokens), text=before.text + event.text)
        self._waiting[place] = event
        self._news.set()


def refusal_for_error(error: EngineBusyError | ServiceStoppedError | ConfigError) -> RequestRefused:
    """Return the refusal (HTTP error) for an exception with which the engine rejects a request."""
    if isinstance(error, EngineBusyError):
        return RequestRefused(str(error), 429, {"Retry-After": "1"})
    if isinstance(error, ServiceStoppedError):
        return RequestRefused(str(error), 503, {"Retry-After": "10"})
    lines = str(error).splitlines()
    return RequestRefused("; ".join(line.strip() for line in lines[1:]) or lines[0])


async def until_disconnected(work: Awaitable[T], receive: Callable[[], Awaitable[object]]) -> T:
    """Await `work`; if the client leaves, cancel it and raise `ClientDisconnected`. receive: ASGI's."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnected
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return


class BeamSearchThreadPool:
    """Runs work that submits many rounds of requests (beam search) in threads: at most `most` at once, more are refused."""

    def __init__(self, service: EngineService, most: int) -> None:
        self._service, self._most, self._running = service, most, 0
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="search")

    async def run_search(
        self, search: Callable[[Callable[[Sequence[GenerationRequest]], list[GenerationReply]]], T]
    ) -> T:
        """Run `search` in a thread; it gets a function that runs engine requests, which raises `ClientDisconnected`
        once the caller is cancelled. Raises `RequestRefused` if too many searches run.
        """
        if self._running >= self._most:
            raise RequestRefused(f"{self._running} searches are running; ask again later", 429, {"Retry-After": "1"})
        over = threading.Event()

        def run_requests_unless_abandoned(requests: Sequence[GenerationRequest]) -> list[GenerationReply]:
            if over.is_set():
                raise ClientDisconnected
            return self._service.submit_and_wait_all(requests)

        self._running += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, search, run_requests_unless_abandoned
            )
        except (EngineBusyError, ServiceStoppedError, ConfigError) as error:
            raise refusal_for_error(error) from error
        finally:
            over.set()
            self._running -= 1
