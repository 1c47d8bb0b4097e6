"""What stands around the main function of an entry script: errors that reach the user, on one rank or on thousands.

    @entry
    def main() -> None: ...

A rank that fails says so in the launcher's store before it dies. Every other rank looks there once a second, says what it
read, and ends itself shortly after the first failure: it may sit in a collective that will never complete, and would
otherwise only end at the time-out. The launcher then shows the error of the rank that failed first.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.core.config.flags import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.training.board import FIRST_FAILURE, Board
from megatron.training.failures import described, name_of_rank
from megatron.training.guard import BadStep
from megatron.training.initialize import shut_down
from megatron.training.place import Place, launcher_place
from megatron.training.sentinel import ReplicasDiffer
from megatron.training.watch import NotFinite
from megatron.training.watchdog import LOST, RankLost

USER_ERRORS = (ConfigError, DataError, CheckpointError, NotFinite, BadStep, ReplicasDiffer, RankLost)
_LOOK_EVERY, _GRACE = 1.0, 3.0  # seconds
_SHOWN = 6  # lines of another rank's failure


class Alarm:
    """Tells the other ranks of a failure, and ends this one when another failed."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._over = threading.Event()
        self._board = Board.connect(place)
        self._watching = threading.Thread(target=self._watch, name="first-failure", daemon=True)
        if self._board is not None:
            self._watching.start()

    def sound(self, error: BaseException) -> bool:
        """This rank is about to die of `error`. Returns whether it is the first, as far as it can know."""
        self.silence()
        board = Board.connect(self.place)
        if board is None:
            return True
        return board.claim(FIRST_FAILURE, f"{name_of_rank(self.place.rank)}: {described(error)}") or board.read(FIRST_FAILURE) is None

    def silence(self) -> None:
        """All went well. A thread that came back from the store while Python ends would abort the process."""
        self._over.set()
        if self._watching.is_alive():
            self._watching.join(_GRACE)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            failed = self._board.read(FIRST_FAILURE)
            if failed is not None:
                said = "\n  ".join(failed.splitlines()[:_SHOWN])
                sys.stderr.write(f"{name_of_rank(self.place.rank)} ends, since this failed first: {said}\n")
                sys.stderr.flush()
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
            if LOST.search(str(error)):
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
            alarm.silence()
            raise
        except USER_ERRORS as error:
            # What all ranks found together, one says; the launcher and each rank's own file have it of all.
            if alarm.sound(error):
                who = f"{name_of_rank(place.rank)}: " if place.size > 1 else ""
                sys.stderr.write(f"{who}{type(error).__name__}: {error}\n")
            raise SystemExit(getattr(error, "exit_code", 1)) from None
        except BaseException as error:
            alarm.sound(error)
            raise
        alarm.silence()
        shut_down()

    return wrapped
