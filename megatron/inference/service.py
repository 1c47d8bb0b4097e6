"""An engine in a thread of its own, for programmes that ask from many threads or from an event loop.

    with Service(engine) as service:
        stream = service.submit(Request(prompt))
        for event in stream: ...             # tokens and text as they come
        reply = stream.reply()               # or all at once
        stream.cancel()

An event loop gives a listener instead, which hands each event over: `lambda event: loop.call_soon_threadsafe(queue.put_nowait,
event)`. On ranks other than the first no service is made; they call `engine.follow`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from megatron.core.parallel.device import claim
from megatron.inference.engine import Engine
from megatron.inference.requests import Event, Listener, Reply, Request

_BEAT_SECONDS = 60.0  # well below the time after which ranks give up on each other


class Stopped(Exception):
    """The service takes no more requests; the message says why."""


class Stream:
    """The events of one request, to be walked through once by one thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reply: Reply | None = None
        self.ticket = -1

    def __iter__(self) -> Iterator[Event]:
        while self._reply is None:
            event = self._events.get()
            self._reply = event.reply
            yield event

    def reply(self) -> Reply:
        """Wait for the end. What comes before is passed over."""
        for _ in self:
            pass
        assert self._reply is not None, "the last event brings the reply"
        return self._reply

    def cancel(self) -> None:
        """Want no more. The reply comes soon, with what there is."""
        self._service.cancel(self.ticket)

    def hear(self, event: Event) -> None:
        """The engine's news."""
        self._events.put(event)


class Service:
    """Runs an engine's steps in a thread. listeners are called in that thread; they must be quick and never raise."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closing, self._ending, self._failure = "", False, ""
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def failure(self) -> str:
        """What ended the engine; empty while it works."""
        return self._failure

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request, listener: Listener | None = None) -> Stream:
        """Ask for a continuation. With a listener the stream stays empty, and serves to cancel.

        Raises `ConfigError`, `Busy`, and `Stopped` when nothing is taken any more.
        """
        stream = Stream(self)
        with self._lock:
            if self._failure or self._closing:
                raise Stopped(self._failure or self._closing)
            stream.ticket = self.engine.submit(request, listener or stream.hear)
        self._news.set()
        return stream

    def cancel(self, ticket: int) -> None:
        """Let a request go."""
        self.engine.cancel(ticket)
        self._news.set()

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """Wait for the replies to all of these, in their order."""
        streams = [self.submit(request) for request in requests]
        return [stream.reply() for stream in streams]

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests, and wait so long for those that are there; whether all have ended."""
        with self._lock:
            self._closing = self._closing or "no more requests are taken: the service is about to end"
        end = None if seconds is None else time.monotonic() + seconds
        while self._thread.is_alive() and not self.engine.idle and (end is None or time.monotonic() < end):
            time.sleep(0.01)
        return self.engine.idle

    def stop(self) -> None:
        """Take no more requests, cancel those that are there, let the other ranks go, and wait until that is done."""
        with self._lock:
            self._closing = self._closing or "no more requests are taken: the service has ended"
        self._ending = True
        self._news.set()
        self._thread.join()

    def _work(self) -> None:
        claim(self.engine.mesh.device)
        try:
            while not self._ending:
                if self.engine.step():
                    continue
                if not self._news.wait(_BEAT_SECONDS):
                    self.engine.beat()
                self._news.clear()
            self.engine.close()
        except BaseException as error:  # noqa: BLE001 - whoever waits for an answer must hear of it
            with self._lock:
                self._failure = f"{type(error).__name__}: {error}"
                self.engine.fail(self._failure)
            raise
