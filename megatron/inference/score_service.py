"""A network that scores texts, in a thread of its own, for a server: texts that wait are scored together.

    service = ScoreService(score)          score: lists of ids -> a number each
    service.start()
    service.submit([ids, ...]).result()

On ranks other than the first no service is made; they take part in what `score` does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from megatron.core.parallel.device import set_current_device
from megatron.inference.liveness import RankLiveness
from megatron.inference.requests import EngineBusyError, EngineMetrics, Ids
from megatron.inference.service import ServiceStoppedError

_TOGETHER = 64  # texts of several calls that are scored at once
_MOST_WAITING = 1024  # texts
_HEARTBEAT_SECONDS = 60.0  # well below the time after which ranks give up on each other
_EXPLAINED_SECONDS = 1.0  # after a failure, for the news that a rank is lost

Scores = Future[list[float]]


class ScoreService:
    """Runs `score` (reward model) in a thread, on the texts of several calls together. close: called at the end, to let
    other ranks go.
    liveness: tells when another rank is lost.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Ids]], list[float]],
        *,
        close: Callable[[], None] = lambda: None,
        device: torch.device = torch.device("cpu"),
        liveness: RankLiveness | None = None,
    ) -> None:
        self._score, self._close, self._device, self._liveness = score, close, device, liveness or RankLiveness()
        self._lock, self._news = threading.Lock(), threading.Event()
        self._waiting: deque[tuple[Sequence[Ids], Scores]] = deque()
        self._running, self._steps, self._texts, self._tokens = 0, 0, 0, 0
        self._closing, self._ending, self._failure = "", False, ""
        self._thread = threading.Thread(target=self._scoring_loop, name="scoring", daemon=True)

    @property
    def failure_reason(self) -> str:
        """Why scoring failed; "" while it works."""
        return self._failure or ("" if self._ending else self._liveness.lost_rank_text)

    @property
    def closing_reason(self) -> str:
        """Why no more texts are accepted; "" while they are."""
        return self._closing

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, texts: Sequence[Ids]) -> Scores:
        """Queue texts; return a future of their scores, which can be cancelled while it waits. Raises `EngineBusyError`, and
        `ServiceStoppedError` when no more are accepted.
        """
        scores: Scores = Future()
        with self._lock:
            if self.failure_reason or self._closing:
                raise ServiceStoppedError(self.failure_reason or self._closing)
            if (waiting := sum(len(one) for one, _ in self._waiting)) + len(texts) > _MOST_WAITING:
                raise EngineBusyError(f"{waiting} texts wait already, and {_MOST_WAITING} may; try again later")
            self._waiting.append((texts, scores))
        self._news.set()
        return scores

    def metrics(self) -> EngineMetrics:
        """Return counters of the service."""
        with self._lock:
            waiting = sum(len(one) for one, _ in self._waiting)
        return EngineMetrics(
            waiting=waiting,
            running=self._running,
            requests=self._texts + self._running + waiting,
            steps=self._steps,
            prompt_tokens=self._tokens,
            finished={"score": self._texts},
        )

    def drain(self, seconds: float | None = None) -> bool:
        """Accept no more texts, and wait up to so many seconds for the accepted ones; return whether all are finished."""
        with self._lock:
            self._closing = self._closing or "no more texts are taken: the service is about to end"
        end = None if seconds is None else time.monotonic() + seconds
        while self._thread.is_alive() and not (self._is_idle or self.failure_reason):
            if end is not None and time.monotonic() >= end:
                break
            time.sleep(0.01)
        return self._is_idle

    def stop(self) -> None:
        """Accept no more texts, fail those that wait, let the other ranks go, and wait for the thread."""
        with self._lock:
            self._closing = self._closing or "no more texts are taken: the service has ended"
        lost = self.failure_reason and self._liveness.lost_rank_text
        self._ending = not lost
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(_EXPLAINED_SECONDS if lost else None)

    @property
    def _is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def _scoring_loop(self) -> None:
        """Thread: score queued calls until stopped or failed, with a heartbeat to other ranks while idle."""
        set_current_device(self._device)
        try:
            while not self._ending:
                if self._liveness.lost_rank_text:
                    raise RuntimeError(self._liveness.lost_rank_text)
                if calls := self._take_queued_calls():
                    self._score_calls(calls)
                elif not self._news.wait(_HEARTBEAT_SECONDS):
                    self._score(())
                else:
                    self._news.clear()
            self._close()
            self._fail_queued_calls(ServiceStoppedError(self._closing))
        except BaseException as error:  # noqa: BLE001 - every waiting call must get an answer
            lost = self._liveness.wait_for_loss(_EXPLAINED_SECONDS)
            with self._lock:
                self._failure = lost or f"{type(error).__name__}: {error}"
            self._fail_queued_calls(ServiceStoppedError(self._failure))
            if not lost:  # which says it all
                raise

    def _take_queued_calls(self) -> list[tuple[Sequence[Ids], Scores]]:
        """Take the calls to score together from the queue: at least one, if any waits."""
        calls: list[tuple[Sequence[Ids], Scores]] = []
        with self._lock:
            while self._waiting and (not calls or self._running + len(self._waiting[0][0]) <= _TOGETHER):
                call = self._waiting.popleft()
                if call[1].set_running_or_notify_cancel():
                    calls.append(call)
                    self._running += len(call[0])
        return calls

    def _score_calls(self, calls: Sequence[tuple[Sequence[Ids], Scores]]) -> None:
        """Score the texts of these calls and set their futures."""
        texts = [ids for one, _ in calls for ids in one]
        try:
            numbers = iter(self._score(texts))
        except BaseException as error:
            for _, scores in calls:
                scores.set_exception(ServiceStoppedError(f"{type(error).__name__}: {error}"))
            raise
        for one, scores in calls:
            scores.set_result([next(numbers) for _ in one])
        self._steps, self._texts = self._steps + 1, self._texts + len(texts)
        self._tokens, self._running = self._tokens + sum(map(len, texts)), 0

    def _fail_queued_calls(self, why: ServiceStoppedError) -> None:
        """Set an exception on all waiting calls."""
        with self._lock:
            while self._waiting:
                _, scores = self._waiting.popleft()
                if scores.set_running_or_notify_cancel():
                    scores.set_exception(why)
