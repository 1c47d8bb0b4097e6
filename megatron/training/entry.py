"""What stands around the main function of an entry script: errors that reach the user, on one rank or on thousands.

    @entry
    def main() -> None: ...

A rank that fails says so in the launcher's store before it dies. Every other rank looks there once a second, and ends
itself shortly after the first failure: it may sit in a collective that will never complete, and would otherwise only
end at the time-out. The launcher then shows the error of the rank that failed first.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.core.config.flags import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.training.initialize import shut_down
from megatron.training.place import Place, launcher_place
from megatron.training.watch import NotFinite

USER_ERRORS = (ConfigError, DataError, CheckpointError, NotFinite)
_KEY = "megatron/first-failure"
_LOOK_EVERY, _GRACE = 1.0, 3.0  # seconds
# What the transports say when another rank is gone.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)", re.IGNORECASE)


class Alarm:
    """Tells the other ranks of a failure, and ends this one when another failed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._over = threading.Event()
        self._store = self._connect()
        self._watching = threading.Thread(target=self._watch, name="first-failure", daemon=True)
        if self._store is not None:
            self._watching.start()

    def sound(self, error: BaseException) -> None:
        """This rank is about to die of `error`."""
        self.silence()
        try:
            client = self._connect()
            if client is not None and not client.check([_KEY]):
                client.set(_KEY, f"{self.place.rank}: {type(error).__name__}")
        except (RuntimeError, dist.DistError):
            pass  # the store is gone: so is the launcher, and with it the other ranks

    def silence(self) -> None:
        """All went well. A thread that came back from the store while Python ends would abort the process."""
        self._over.set()
        if self._watching.is_alive():
            self._watching.join(_GRACE)

    def _connect(self) -> dist.TCPStore | None:
        if self.place.size == 1 or not self.place.store:
            return None
        host, _, port = self.place.store.rpartition(":")
        try:
            return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        except (RuntimeError, dist.DistError):
            return None

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            try:
                failed = self._store.check([_KEY])
            except (RuntimeError, dist.DistError):
                return
            if failed:
                # Long enough for this rank's own error, if it has one, and for the launcher to see who was first.
                if not self._over.wait(_GRACE):
                    os._exit(1)
                return


def _patient(main: Callable[[], None]) -> Callable[[], None]:
    """Let the rank that failed first be seen first: one that merely lost its connection waits before it fails too.

    The launcher notices a killed rank by looking now and then; without the wait, the complaint of a neighbour would
    carry the earlier time, and be shown as the cause.
    """
    def attempt() -> None:
        try:
            main()
        except USER_ERRORS as error:
            raise error.with_traceback(None) from None  # the message says it all
        except (RuntimeError, dist.DistError) as error:
            if _LOST.search(str(error)):
                time.sleep(_GRACE)
            raise

    return attempt


def entry(main: Callable[[], None]) -> Callable[[], None]:
    """Run `main` so that every error ends all ranks and is shown once. User errors are shown without a traceback."""
    recorded = record(_patient(main))

    @functools.wraps(main)
    def wrapped() -> None:
        place = launcher_place()
        alarm = Alarm(place)
        try:
            recorded()
        except SystemExit as leaving:
            if leaving.code:
                alarm.sound(leaving)
            raise
        except USER_ERRORS as error:
            alarm.sound(error)
            if place.size > 1:
                raise
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            raise SystemExit(1) from None
        except BaseException as error:
            alarm.sound(error)
            raise
        alarm.silence()
        shut_down()

    return wrapped
