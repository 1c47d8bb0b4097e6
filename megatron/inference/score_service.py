"""A network that scores texts, in a thread of its own, for a server: texts that wait are scored together.

    service = ScoreService(score)          score: lists of ids -> a number each
    service.start()
    service.submit([ids, ...]).result()

On ranks other than the first no service is made; they take part in what `score` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from megatron.inference.liveness import RankLiveness
from megatron.inference.requests import EngineBusyError, EngineMetrics, Ids
from megatron.inference.service_thread import ServiceStoppedError, ServiceThread

_TOGETHER = 64  # texts of several calls that are scored at once
_MOST_WAITING = 1024  # texts

Scores = Future[list[float]]


class ScoreService(ServiceThread):
    """Scores the texts of several calls together, in a thread. close: called at the end, for other ranks."""

    def __init__(
        self,
        score: Callable[[Sequence[Ids]], list[float]],
        *,
        close: Callable[[], None] = lambda: None,
        device: torch.device = torch.device("cpu"),
        liveness: RankLiveness | None = None,
    ) -> None:
        super().__init__("texts", device, liveness, heartbeat=lambda: score(()), close=close)
        self._score = score
        self._waiting: deque[tuple[Sequence[Ids], Scores]] = deque()
        self._running, self._steps, self._texts, self._tokens = 0, 0, 0, 0

    @property
    def is_idle(self) -> bool:
        """Whether no text waits or is scored."""
        return not (self._waiting or self._running)

    def submit(self, texts: Sequence[Ids]) -> Scores:
        """Queue texts; return a future of their scores, which can be cancelled while it waits. Raises `EngineBusyError`, and
        `ServiceStoppedError` when no more are accepted.
        """
        scores: Scores = Future()
        with self._lock:
            self._require_open()
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

    def _serve_once(self) -> bool:
        """Score the calls that wait, as many as go together."""
        calls = self._take_queued_calls()
        if calls:
            self._score_calls(calls)
        return bool(calls)

    def _fail_pending(self, why: str) -> None:
        """Set an exception on all waiting calls."""
        while self._waiting:
            _, scores = self._waiting.popleft()
            if scores.set_running_or_notify_cancel():
                scores.set_exception(ServiceStoppedError(why))

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
