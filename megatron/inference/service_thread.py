"""A thread that serves what is submitted to it, for a server: the part that an engine and a reward model have in common.

It ends when it is stopped, when its work fails, and when another rank is lost. Everyone who waits then gets an answer.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from megatron.core.parallel.device import set_current_device
from megatron.inference.liveness import RankLiveness

_HEARTBEAT_SECONDS = 60.0  # well below the time after which ranks give up on each other
_EXPLAINED_SECONDS = 1.0  # after a failure, for the news that a rank is lost
_STUCK_SECONDS = 3.0  # after that news, for a collective to fail; some never do


class ServiceStoppedError(Exception):
    """The service accepts no more; the message says why."""


class ServiceThread(ABC):
    """A network in a thread of its own. noun: what is submitted to it, in messages. heartbeat: an empty collective, so
    that those of other ranks do not time out while nothing is submitted. close: ends what runs, and lets the other ranks
    go. liveness: tells when another rank is lost. closing_reason: why no more is accepted; "" while it is.
    """

    def __init__(
        self,
        noun: str,
        device: torch.device,
        liveness: RankLiveness | None,
        *,
        heartbeat: Callable[[], object],
        close: Callable[[], None],
    ) -> None:
        self._noun, self._device, self._liveness = noun, device, liveness or RankLiveness()
        self._heartbeat, self._close = heartbeat, close
        self._lock, self._news = threading.Lock(), threading.Event()
        self.closing_reason, self._ending, self._failure = "", False, ""
        self._thread = threading.Thread(target=self._serve_until_stopped, name=f"serving {noun}", daemon=True)

    @property
    def failure_reason(self) -> str:
        """Why the work failed; "" while it succeeds."""
        return self._failure or ("" if self._ending else self._liveness.lost_rank_text)

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""

    @abstractmethod
    def _serve_once(self) -> bool:
        """Do the next piece of work; False if there was none."""

    @abstractmethod
    def _fail_pending(self, why: str) -> None:
        """Answer everyone who waits with `why`."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def drain(self, seconds: float | None = None) -> bool:
        """Accept no more, and wait up to so many seconds for what was accepted; return whether all of it is finished."""
        with self._lock:
            self.closing_reason = self.closing_reason or f"no more {self._noun} are taken: the service is about to end"
        end = None if seconds is None else time.monotonic() + seconds
        while (
            self._thread.is_alive()
            and not (self.is_idle or self.failure_reason)
            and (end is None or time.monotonic() < end)
        ):
            time.sleep(0.01)
        return self.is_idle

    def stop(self) -> None:
        """Accept no more, end what runs, let the other ranks go, and wait for the thread."""
        with self._lock:
            self.closing_reason = self.closing_reason or f"no more {self._noun} are taken: the service has ended"
        lost = self.failure_reason and self._liveness.lost_rank_text
        self._ending = not lost
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(_STUCK_SECONDS if lost else None)

    def _require_open(self) -> None:
        """Raise `ServiceStoppedError` if no more is accepted."""
        if why := self.failure_reason or self.closing_reason:
            raise ServiceStoppedError(why)

    def _serve_until_stopped(self) -> None:
        """Thread: work until stopped or failed, with a heartbeat to the other ranks while idle."""
        set_current_device(self._device)
        try:
            while not self._ending:
                if self._liveness.lost_rank_text:
                    raise ServiceStoppedError(self._liveness.lost_rank_text)
                if self._serve_once():
                    continue
                if not self._news.wait(_HEARTBEAT_SECONDS):
                    self._heartbeat()
                self._news.clear()
            self._close()
            with self._lock:
                self._fail_pending(self.closing_reason)
        except BaseException as error:  # noqa: BLE001 - everyone who waits must get an answer
            lost = self._liveness.wait_for_loss(_EXPLAINED_SECONDS)
            with self._lock:
                self._failure = lost or f"{type(error).__name__}: {error}"
                self._fail_pending(self._failure)
            if not lost:  # which says it all
                raise
