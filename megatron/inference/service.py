"""An engine in a thread of its own, for programs that submit requests from many threads or from an event loop.

    with EngineService(engine) as service:
        stream = service.submit(GenerationRequest(prompt))
        for event in stream: ...             # tokens and text as they come
        reply = stream.wait_for_reply()      # or all at once
        stream.cancel()

An event loop gives a listener instead, which hands each event over: `lambda event: loop.call_soon_threadsafe(queue.put_nowait,
event)`. On ranks other than the first no service is made; they call `engine.run_as_follower`.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.inference.engine import Engine
from megatron.inference.liveness import RankLiveness
from megatron.inference.requests import GenerationEvent, GenerationReply, GenerationRequest, Listener
from megatron.inference.service_thread import ServiceStoppedError, ServiceThread

T = TypeVar("T")


class RequestStream:
    """The events of one request; iterate over it once, in one thread. events: where the engine puts them."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self.events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
        self._reply: GenerationReply | None = None
        self.ticket = -1

    def __iter__(self) -> Iterator[GenerationEvent]:
        while self._reply is None:
            event = self.events.get()
            self._reply = event.reply
            yield event

    def wait_for_reply(self) -> GenerationReply:
        """Wait for the reply; events before it are discarded."""
        for _ in self:
            pass
        assert self._reply is not None, "the last event brings the reply"
        return self._reply

    def cancel(self) -> None:
        """Cancel the request; it completes with the tokens generated so far."""
        self._service.cancel(self.ticket)


class EngineService(ServiceThread):
    """Runs an engine's steps in a thread. Listeners are called in that thread; they must be quick and never raise."""

    def __init__(self, engine: Engine, liveness: RankLiveness | None = None) -> None:
        super().__init__("requests", engine.mesh.device, liveness, heartbeat=engine.heartbeat, close=engine.close)
        self.engine = engine
        self._calls: deque[tuple[Callable[[], None], Future[Any]]] = deque()

    def __enter__(self) -> EngineService:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return self.engine.is_idle

    def start(self) -> None:
        """Start the thread. From now on CUDA graphs are captured only while no request runs."""
        self.engine.runner.on_demand = False
        super().start()

    def submit(self, request: GenerationRequest, listener: Listener | None = None) -> RequestStream:
        """Submit a request; return the stream of its events. With a listener the stream stays empty, and only serves to
        cancel. Raises `ConfigError`, `EngineBusyError`, and `ServiceStoppedError` when no more requests are accepted.
        """
        stream = RequestStream(self)
        with self._lock:
            self._require_open()
            stream.ticket = self.engine.submit(request, listener or stream.events.put)
        self._news.set()
        return stream

    def cancel(self, ticket: int) -> None:
        """Cancel a request."""
        self.engine.cancel(ticket)
        self._news.set()

    def run_between_steps(self, work: Callable[[], T]) -> T:
        """Run a function between steps, in the thread that steps; return its result, or raise its `ConfigError` or
        `CheckpointError`. Raises `ServiceStoppedError` as `submit` does.
        """
        result: Future[T] = Future()

        def run_and_set_result() -> None:
            try:
                result.set_result(work())
            except (ConfigError, CheckpointError) as error:
                result.set_exception(error)

        with self._lock:
            self._require_open()
            self._calls.append((run_and_set_result, result))
        self._news.set()
        return result.result()

    def submit_and_wait_all(self, requests: Sequence[GenerationRequest]) -> list[GenerationReply]:
        """Submit these requests and wait for all replies, in their order."""
        streams = [self.submit(request) for request in requests]
        return [stream.wait_for_reply() for stream in streams]

    def _serve_once(self) -> bool:
        """Step the engine; capture graphs while it is idle."""
        while self._calls:
            self._calls[0][0]()
            self._calls.popleft()
        return self.engine.step() or self.engine.capture_next_graph()

    def _fail_pending(self, why: str) -> None:
        """End all requests with an error, and raise `ServiceStoppedError` in all pending `run_between_steps`."""
        self.engine.fail_all_requests(why)
        for _, result in self._calls:
            if not result.done():
                result.set_exception(ServiceStoppedError(why))
        self._calls.clear()
