"""Computation beside communication: what a rank computes while it waits for others. One `Overlap` serves all axes of a mesh.

Delayed weight gradients (`--delay-wgrad-compute`): `collectives.wait_for_axis` calls `fill_wait`, which computes the weight
gradients that the current backward pass has delayed so far.

Dual-batch overlap (`--overlap-moe-expert-parallel-comm`): the forward pass of one microbatch and the backward pass of another
take turns on one rank. The token dispatchers (transformer/dispatch.py) call `switch` while tokens travel:

    second thread  B (waits: gradients travel)          B B B (waits)          B B B
    main thread                          F F (waits)            F F (waits)    F F

Only one of the two runs at any moment, and they switch at the same calls on every rank, so that all ranks issue their
collectives in one order. The communication of one overlaps the computation of the other. The second thread starts: a backward pass
communicates before it has computed much and computes after its last receive, a forward pass the other way round, so that all
communication has computation beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.core.parallel.device import claim
from megatron.core.parallel.wgrad import Key, WeightGradStore


@dataclass(slots=True)
class Overlap:
    """The computation of one rank that can run during waits. wgrad_store: weight gradients that layers have delayed."""

    wgrad_store: WeightGradStore = field(default_factory=WeightGradStore)
    _fills_waits: bool = False
    _dual_batch: DualBatch | None = None

    @contextmanager
    def delayed_weight_gradients(self, key: Key, *, fill_waits: bool) -> Iterator[None]:
        """Around a backward pass whose weight gradients are delayed: until its `wgrad_store.pop`, or with `fill_waits` until the
        next wait inside of the pass, at the latest its end.
        """
        self._fills_waits = fill_waits
        try:
            with self.wgrad_store.collecting(key):
                yield
        finally:
            self._fills_waits = False
        if fill_waits:
            self.wgrad_store.pop(key)

    def fill_wait(self) -> None:
        """A collective was started and will be waited for: compute what can be computed meanwhile."""
        if self._fills_waits:
            self.wgrad_store.flush()

    def run_both(self, forward: Callable[[], None], backward: Callable[[], None], device: torch.device) -> None:
        """Run a forward and a backward pass with dual-batch overlap."""
        self._dual_batch = DualBatch()
        try:
            self._dual_batch.run(forward, backward, device)
        finally:
            self._dual_batch = None

    def switch(self) -> None:
        """Tokens are on their way: let the other microbatch compute, if there are two."""
        if self._dual_batch is not None:
            self._dual_batch.switch()


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
