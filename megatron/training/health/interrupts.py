"""Ctrl-C while a run trains: the first saves and ends, the second ends at once, each in a sentence.

Python runs the handlers of signals only between two steps of its main thread, which may sit in a collective that never completes.
So the system writes the number of each signal into a socket (signal.set_wakeup_fd), and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from megatron.training.run import ReceivedTerminationSignal

# Seconds in which a second SIGINT is the first again: a terminal sends it to all processes, and a launcher passes it on.
_ONCE = 1.0
EXIT_CODE = 128 + signal.SIGINT


class InterruptHandler:
    """Context manager in the main thread that catches SIGINT: the first is noted in `ending`, the second ends the
    process.
    first: called at the first. last: called before the process ends because of the second.
    """

    def __init__(
        self, ending: ReceivedTerminationSignal, *, first: Callable[[], None], last: Callable[[], None]
    ) -> None:
        self._ending, self._first, self._last = ending, first, last
        self._noticed = 0.0
        self._ours, self._systems = socket.socketpair()
        self._systems.setblocking(False)
        self._thread = threading.Thread(target=self._signal_reader_thread, name="interrupts", daemon=True)

    def __enter__(self) -> InterruptHandler:
        self._wakeup_before = signal.set_wakeup_fd(self._systems.fileno(), warn_on_full_buffer=False)
        self._handler_before = signal.signal(signal.SIGINT, lambda number, frame: None)  # no KeyboardInterrupt
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._handler_before)
        signal.set_wakeup_fd(self._wakeup_before)
        self._systems.close()  # which ends the thread
        self._thread.join()
        self._ours.close()

    def _signal_reader_thread(self) -> None:
        """Thread: read signal numbers from the wake-up socket until it closes."""
        while numbers := self._ours.recv(64):
            if signal.SIGINT in numbers:
                self._on_interrupt()

    def _on_interrupt(self) -> None:
        """Handle a SIGINT: the first is noted, a later one ends the process; repetitions within a second are one."""
        if not self._noticed:
            self._noticed, self._ending.signal = time.monotonic(), "SIGINT"
            self._first()
        elif time.monotonic() - self._noticed > _ONCE:
            self._last()
            os._exit(EXIT_CODE)
