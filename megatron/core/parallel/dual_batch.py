"""Dual-batch overlap: the forward pass of one microbatch and the backward pass of another take turns on one rank.

    second thread  B (waits: gradients travel)          B B B (waits)          B B B
    main thread                          F F (waits)            F F (waits)    F F

Only one of the two runs at any moment, and they switch at the same calls on every rank, so that all ranks issue their
collectives in one order. The communication of one overlaps the computation of the other. The second thread starts: a backward pass
communicates before it has computed much and computes after its last receive, a forward pass the other way round, so that all
communication has computation beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megatron.core.parallel.device import claim


class DualBatch:
    """Passes control between two threads: 0 is the thread that made this, 1 the other, on a GPU also autograd's own thread."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._turn, self._over = 0, [False, False]
        self._changed = threading.Condition()

    def switch(self) -> None:
        """Let the other thread run until it switches back or ends."""
        own = int(threading.get_ident() != self._main)
        with self._changed:
            if self._over[1 - own]:
                return
            self._give(1 - own)
            self._changed.wait_for(lambda: self._turn == own)

    def run(self, main: Callable[[], None], beside: Callable[[], None], device: torch.device) -> None:
        """Run both, `beside` first; raises the first error of either when both have ended."""
        errors: list[BaseException] = []

        def other() -> None:
            claim(device)
            beside()

        self._turn = 1
        thread = threading.Thread(target=lambda: self._do(other, 1, errors), name="beside")
        thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._turn == 0)
        self._do(main, 0, errors)
        thread.join()
        if errors:
            raise errors[0]

    def _do(self, work: Callable[[], None], own: int, errors: list[BaseException]) -> None:
        try:
            work()
        except BaseException as error:  # raised again by `run`, in the thread that trains
            errors.append(error)
        with self._changed:
            self._over[own] = True
            self._give(1 - own)

    def _give(self, turn: int) -> None:
        self._turn = turn
        self._changed.notify_all()
