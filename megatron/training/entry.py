"""What stands around the main function of an entry script: errors that reach the user, on one rank or on thousands.

    @entry
    def main() -> None: ...

A rank that fails says so in the launcher's store before it dies. Every other rank looks there once a second, says what it
read, and ends itself shortly after the first failure: it may sit in a collective that will never complete, and would
otherwise only end at the time-out. The launcher then shows the error of the rank that failed first.

A rank whose launcher is gone (killed, or cut off) ends too, since nobody else would end it, and the next start of the job may already
write into the same folder: it looks whether its parent is still there, and whether the launcher's store still answers.
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

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.training.health.bad_steps import BadStepError
from megatron.training.health.exit_conditions import NonFiniteError
from megatron.training.health.failures import error_text, rank_and_node_text
from megatron.training.health.replica_check import ReplicaMismatchError
from megatron.training.health.watchdog import LOST, RankLostError
from megatron.training.initialize import leave_process_group
from megatron.training.launch.launch_info import LaunchInfo, install_interrupt_excepthook, read_launch_info
from megatron.training.launch.rendezvous import FIRST_FAILURE, RendezvousStore

USER_ERRORS = (
    ConfigError,
    DataError,
    CheckpointError,
    NonFiniteError,
    BadStepError,
    ReplicaMismatchError,
    RankLostError,
)
_LOOK_EVERY, _GRACE = 1.0, 3.0  # seconds
_SHOWN = 6  # lines of another rank's failure
_SILENCE, _AGAIN = 30.0, 5.0  # seconds: how long a store may not answer, and how long each new connection is tried


class FailureReporter:
    """Reports this rank's failure in the launcher's store, and ends it when others fail or the launcher is gone."""

    def __init__(self, place: LaunchInfo) -> None:
        self.place = place
        self._over = threading.Event()
        self._board = RendezvousStore.connect(place)
        self._parent = os.getppid()
        self._watching = threading.Thread(target=self._watch_launcher, name="first-failure", daemon=True)
        if self._board is not None or place.is_launched:
            self._watching.start()

    def report_failure(self, error: BaseException) -> bool:
        """Report that this rank dies of `error`. Return whether it is the first to fail, as far as it can know."""
        self.stop_watching()
        board = RendezvousStore.connect(self.place)
        if board is None:
            return True
        text = f"{rank_and_node_text(self.place.rank)}: {error_text(error)}"
        return board.write_if_absent(FIRST_FAILURE, text) or board.read(FIRST_FAILURE) is None

    def stop_watching(self) -> None:
        """Stop the watching thread: one that returns from the store while Python ends would abort the process."""
        self._over.set()
        if self._watching.is_alive():
            self._watching.join(_GRACE)

    def _watch_launcher(self) -> None:
        """Thread: end this process when the launcher is gone, or shortly after another rank has failed."""
        while not self._over.wait(_LOOK_EVERY):
            if gone := self._launcher_loss_text():
                _write_stderr(
                    f"{rank_and_node_text(self.place.rank)} ends: {gone}, and nobody would end this rank or start it again"
                )
                if not self._over.is_set():
                    os._exit(1)
                return
            failed = None if self._board is None else self._board.read(FIRST_FAILURE)
            if failed is not None:
                message = "\n  ".join(failed.splitlines()[:_SHOWN])
                _write_stderr(f"{rank_and_node_text(self.place.rank)} ends, since this failed first: {message}")
                # Long enough for this rank's own error, if it has one, and for the launcher to see who was first.
                if not self._over.wait(_GRACE):
                    os._exit(1)
                return

    def _launcher_loss_text(self) -> str:
        """Return how this rank knows that its launcher is gone; "" while it is alive."""
        if self.place.is_launched and os.getppid() != self._parent:
            return f"its launcher, process {self._parent}, is gone"
        if self._board is None or not self._board.seconds_without_answer:
            return ""
        if self._board.seconds_without_answer > _SILENCE:
            return f"the store of its launcher at {self.place.store} has not answered for {self._board.seconds_without_answer:.0f} s"
        self._board.reconnect(_AGAIN)
        return ""


def _write_stderr(text: str) -> None:
    """Write a line to standard error, which may be closed since the launcher ended."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def _delay_secondary_failure(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap `main` so that a rank that merely lost its connection waits before it raises. The launcher notices a killed
    rank only when it looks; a neighbour's error would have the earlier time, and be shown as the cause.
    """

    def main_delaying_rank_lost_error() -> None:
        try:
            main()
        except USER_ERRORS as error:
            raise error.with_traceback(None) from None  # the message says it all
        except (RuntimeError, dist.DistError) as error:
            if LOST.search(str(error)):
                time.sleep(_GRACE)
            raise

    return main_delaying_rank_lost_error


def guarded_entry_point(main: Callable[[], None]) -> Callable[[], None]:
    """Decorator of a script's main: every error ends all ranks and is shown once, user errors without a traceback."""
    recorded = record(_delay_secondary_failure(main))

    @functools.wraps(main)
    def guarded_main() -> None:
        install_interrupt_excepthook()
        place = read_launch_info()
        alarm = FailureReporter(place)
        try:
            recorded()
        except SystemExit as leaving:
            if leaving.code:
                alarm.report_failure(leaving)
            alarm.stop_watching()
            raise
        except USER_ERRORS as error:
            # What all ranks found together, one says; the launcher and each rank's own file have it of all.
            if alarm.report_failure(error):
                who = f"{rank_and_node_text(place.rank)}: " if place.size > 1 else ""
                sys.stderr.write(f"{who}{type(error).__name__}: {error}\n")
            raise SystemExit(getattr(error, "exit_code", 1)) from None
        except BaseException as error:
            alarm.report_failure(error)
            raise
        alarm.stop_watching()
        leave_process_group()

    return guarded_main
