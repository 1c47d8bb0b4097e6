"""The engine requests of one HTTP call.

    call = Call(service, requests)            # from the event loop
    replies = await call.replies()            # or: async for place, event in call.events()

The engine sends events in its own thread; they are handed over to the event loop. Leaving the iteration cancels the requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megatron.core.config.flags import ConfigError
from megatron.inference.requests import Busy, Event, Listener, Reply, Request
from megatron.inference.server.fields import Refused
from megatron.inference.service import Service, Stopped, Stream

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed the connection."""


class PendingRequests:
    """Submits requests to the engine: all of them, or none and raises `Refused`."""

    def __init__(self, service: Service, requests: Sequence[Request]) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._streams: list[Stream] = []
        self._ended = [False] * len(requests)
        try:
            for place, request in enumerate(requests):
                self._streams.append(service.submit(request, self._event_listener(place)))
        except (Busy, Stopped, ConfigError) as error:
            self.cancel()
            raise error_response(error) from error

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(index of the request, event), until all have their reply."""
        try:
            while not all(self._ended):
                place, event = await self._news.get()
                self._ended[place] = event.reply is not None
                yield place, event
        finally:
            self.cancel()

    async def replies(self) -> list[Reply]:
        """All replies, in the order of the requests. Raises `Refused` if the engine fails."""
        replies: dict[int, Reply] = {}
        try:
            async for place, event in self.events():
                if event.reply is not None:
                    replies[place] = event.reply
        finally:
            self.cancel()  # a task that is cancelled leaves `events` to the garbage collector
        for reply in replies.values():
            if reply.reason == "error":
                raise Refused(reply.problem, 500)
        return [replies[place] for place in sorted(replies)]

    def cancel(self) -> None:
        """Cancel the requests that have not ended."""
        for place, stream in enumerate(self._streams):
            if not self._ended[place]:
                self._ended[place] = True
                stream.cancel()

    def _event_listener(self, place: int) -> Listener:
        return lambda event: self._hand_over(place, event)

    def _hand_over(self, place: int, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, (place, event))
        except RuntimeError:  # the loop is closed, and nobody listens
            pass


def error_response(error: Busy | Stopped | ConfigError) -> Refused:
    """The HTTP response to a request that the engine does not accept."""
    if isinstance(error, Busy):
        return Refused(str(error), 429, {"Retry-After": "1"})
    if isinstance(error, Stopped):
        return Refused(str(error), 503, {"Retry-After": "10"})
    lines = str(error).splitlines()
    return Refused("; ".join(line.strip() for line in lines[1:]) or lines[0])


async def until_disconnected(work: Awaitable[T], receive: Callable[[], Awaitable[object]]) -> T:
    """Await `work`; cancel it and raise `ClientDisconnected` if the client disconnects. receive: of ASGI, after the body was read."""
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


class BeamSearchPool:
    """Runs work that submits many rounds of requests (beam search) in threads: at most `most` at once, more are refused."""

    def __init__(self, service: Service, most: int) -> None:
        self._service, self._most, self._running = service, most, 0
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="search")

    async def run(self, search: Callable[[Callable[[Sequence[Request]], list[Reply]]], T]) -> T:
        """Run `search`, which gets a function that submits requests; that raises `ClientDisconnected` once nobody waits any more."""
        if self._running >= self._most:
            raise Refused(f"{self._running} searches are running; ask again later", 429, {"Retry-After": "1"})
        over = threading.Event()

        def ask(requests: Sequence[Request]) -> list[Reply]:
            if over.is_set():
                raise ClientDisconnected
            return self._service.submit_and_wait(requests)

        self._running += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, search, ask)
        except (Busy, Stopped, ConfigError) as error:
            raise error_response(error) from error
        finally:
            over.set()
            self._running -= 1
