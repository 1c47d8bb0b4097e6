"""An engine in a thread of its own, for programs that submit requests from many threads or from an event loop.

    with Service(engine) as service:
        stream = service.submit(Request(prompt))
        for event in stream: ...             # tokens and text as they come
        reply = stream.reply()               # or all at once
        stream.cancel()

An event loop gives a listener instead, which hands each event over: `lambda event: loop.call_soon_threadsafe(queue.put_nowait,
event)`. On ranks other than the first no service is made; they call `engine.run_as_follower`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from megatron.core.config.flags import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.parallel.device import set_current_device
from megatron.inference.engine import Engine
from megatron.inference.liveness import RankLiveness
from megatron.inference.requests import GenerationEvent, GenerationReply, GenerationRequest, Listener

T = TypeVar("T")

_HEARTBEAT_SECONDS = 60.0  # well below the time after which ranks give up on each other
_EXPLAINED_SECONDS = 1.0  # after a failure, for the news that a rank is lost
_STUCK_SECONDS = 3.0  # after that news, for a collective to fail; some never do


class ServiceStoppedError(Exception):
    """The service accepts no more requests; the message says why."""


class DecodingRankLostError(Exception):
    """Another rank of the engine has ended; the message says which."""


class RequestStream:
    """The events of one request; iterate over it once, in one thread."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
        self._reply: GenerationReply | None = None
        self.ticket = -1

    def __iter__(self) -> Iterator[GenerationEvent]:
        while self._reply is None:
            event = self._events.get()
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

    def on_event(self, event: GenerationEvent) -> None:
        """Queue an event; called by the engine."""
        self._events.put(event)


class EngineService:
    """Runs an engine's steps in a thread. Listeners are called in that thread; they must be quick and never raise.
    liveness: tells when another rank is lost.
    """

    def __init__(self, engine: Engine, liveness: RankLiveness | None = None) -> None:
        self.engine, self._liveness = engine, liveness or RankLiveness()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._calls: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._closing, self._ending, self._failure = "", False, ""
        self._thread = threading.Thread(target=self._engine_loop, name="decoding", daemon=True)

    def __enter__(self) -> EngineService:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def failure_reason(self) -> str:
        """Why the engine failed; "" while it works."""
        return self._failure or ("" if self._ending else self._liveness.lost_rank_text)

    @property
    def closing_reason(self) -> str:
        """Why no more requests are accepted; "" while they are."""
        return self._closing

    def start(self) -> None:
        """Start the thread. From now on CUDA graphs are captured only while no request runs."""
        self.engine.runner.on_demand = False
        self._thread.start()

    def submit(self, request: GenerationRequest, listener: Listener | None = None) -> RequestStream:
        """Submit a request; return the stream of its events. With a listener the stream stays empty, and only serves to
        cancel.
        Raises `ConfigError`, `EngineBusyError`, and `ServiceStoppedError` when no more requests are accepted.
        """
        stream = RequestStream(self)
        with self._lock:
            if self.failure_reason or self._closing:
                raise ServiceStoppedError(self.failure_reason or self._closing)
            stream.ticket = self.engine.submit(request, listener or stream.on_event)
        self._news.set()
        return stream

    def cancel(self, ticket: int) -> None:
        """Cancel a request."""
        self.engine.cancel(ticket)
        self._news.set()

    def run_between_steps(self, work: Callable[[], T]) -> T:
        """Run a function between steps, in the thread that steps; return its result, or raise its `ConfigError` or
        `CheckpointError`.
        Raises `ServiceStoppedError` as `submit` does.
        """
        result: Future[T] = Future()

        def run_and_set_result() -> None:
            try:
                result.set_result(work())
            except (ConfigError, CheckpointError) as error:
                result.set_exception(error)

        with self._lock:
            if self.failure_reason or self._closing:
                raise ServiceStoppedError(self.failure_reason or self._closing)
            self._calls.append((run_and_set_result, result))
        self._news.set()
        return result.result()

    def submit_and_wait_all(self, requests: Sequence[GenerationRequest]) -> list[GenerationReply]:
        """Submit these requests and wait for all replies, in their order."""
        streams = [self.submit(request) for request in requests]
        return [stream.wait_for_reply() for stream in streams]

    def drain(self, seconds: float | None = None) -> bool:
        """Accept no more requests, and wait up to so many seconds for the running ones; return whether all have ended."""
        with self._lock:
            self._closing = self._closing or "no more requests are taken: the service is about to end"
        end = None if seconds is None else time.monotonic() + seconds
        while (
            self._thread.is_alive()
            and not (self.engine.is_idle or self.failure_reason)
            and (end is None or time.monotonic() < end)
        ):
            time.sleep(0.01)
        return self.engine.is_idle

    def stop(self) -> None:
        """Accept no more requests, cancel the running ones, end `run_as_follower` on the other ranks, and wait for the
        thread.
        """
        with self._lock:
            self._closing = self._closing or "no more requests are taken: the service has ended"
        lost = self.failure_reason and self._liveness.lost_rank_text
        self._ending = not lost
        self._news.set()
        self._thread.join(_STUCK_SECONDS if lost else None)

    def _engine_loop(self) -> None:
        """Thread: step the engine until stopped or failed; while idle capture graphs, and send heartbeats to the other
        ranks.
        """
        set_current_device(self.engine.mesh.device)
        try:
            while not self._ending:
                if self._liveness.lost_rank_text:
                    raise DecodingRankLostError(self._liveness.lost_rank_text)
                while self._calls:
                    self._calls[0][0]()
                    self._calls.popleft()
                if self.engine.step() or self.engine.capture_next_graph():
                    continue
                if not self._news.wait(_HEARTBEAT_SECONDS):
                    self.engine.heartbeat()
                self._news.clear()
            self.engine.close()
            self._fail_pending_calls(self._closing)
        except BaseException as error:  # noqa: BLE001 - every waiting request must get an answer
            lost = self._liveness.wait_for_loss(_EXPLAINED_SECONDS)
            with self._lock:
                self._failure = lost or f"{type(error).__name__}: {error}"
                self.engine.fail_all_requests(self._failure)
                self._fail_pending_calls(self._failure)
            if not lost:  # which says it all
                raise

    def _fail_pending_calls(self, why: str) -> None:
        """Raise `ServiceStoppedError` in all pending `run_between_steps`."""
        for _, result in self._calls:
            if not result.done():
                result.set_exception(ServiceStoppedError(why))
        self._calls.clear()
