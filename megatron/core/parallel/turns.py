"""Two pieces of work in turns: one runs until it waits for other ranks, and then the other does.

    beside    B (waits: gradients travel)          B B B (waits)          B B B
    main                                 F F (waits)            F F (waits)    F F

Only one of them runs at any moment, and they change places at the same calls on every rank, so that collectives keep one
order on all ranks. What is sent by the one travels while the other computes. The one beside begins: a backward pass sends
before it has computed much and computes after it received last, a forward pass the other way round, so that all that travels
has something beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megatron.core.parallel.device import claim


class Turns:
    """Whose turn it is: 0 is the thread that made this, 1 whatever runs beside it, on a GPU also autograd's own thread."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._turn, self._over = 0, [False, False]
        self._changed = threading.Condition()

    def pass_on(self) -> None:
        """Let the other go on until it passes on in turn or is over."""
        own = int(threading.get_ident() != self._main)
        with self._changed:
            if self._over[1 - own]:
                return
            self._give(1 - own)
            self._changed.wait_for(lambda: self._turn == own)

    def run(self, main: Callable[[], None], beside: Callable[[], None], device: torch.device) -> None:
        """Do both, what is beside first; the first error of either is raised when both are over."""
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
