"""Computation during communication: what a rank computes while it waits for others. One `OverlappedComputation` serves all axes of a
mesh.

Delayed weight gradients (`--delay-wgrad-compute`): `collectives.wait_with_overlap` calls `compute_delayed_wgrad`, which computes the
weight gradients that the current backward pass has delayed so far.

Dual-batch overlap (`--overlap-moe-expert-parallel-comm`): the forward pass of one microbatch and the backward pass of
another alternate on one rank. The token dispatchers (transformer/dispatch.py) call `yield_to_other_microbatch` while their all-to-all is
in flight:

    second thread  B (waits: all-to-all)            B B B (waits)          B B B
    main thread                          F F (waits)            F F (waits)    F F

Only one of the two runs at any moment, and they switch at the same calls on every rank, so all ranks issue their
collectives in the same order. The communication of one overlaps the computation of the other. The second thread starts,
since a backward pass communicates before it has computed much and computes after its last receive, and a forward pass
the other way round: so all communication has computation beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.core.parallel.device import set_current_device
from megatron.core.parallel.wgrad import Key, WeightGradStore


@dataclass(slots=True)
class OverlappedComputation:
    """The computation of one rank that can run during waits. wgrad_store: delayed gradients. make_threads: of two passes."""

    wgrad_store: WeightGradStore = field(default_factory=WeightGradStore)
    make_threads: Callable[[], DualBatchThreads] = lambda: DualBatchThreads()
    _fills_waits: bool = False
    _dual_batch: DualBatchThreads | None = None

    @contextmanager
    def delay_weight_gradients(self, key: Key, *, fill_waits: bool) -> Iterator[None]:
        """Context manager around a backward pass whose weight gradients are delayed.

        They are computed by `wgrad_store.pop(key)`; or, with `fill_waits`, at the next wait inside the pass, at the
        latest at its end.
        """
        self._fills_waits = fill_waits
        try:
            with self.wgrad_store.delaying(key):
                yield
        finally:
            self._fills_waits = False
        if fill_waits:
            self.wgrad_store.pop(key)

    def compute_delayed_wgrad(self) -> None:
        """Compute delayed weight gradients if waits are to be filled; called between start and wait."""
        if self._fills_waits:
            self.wgrad_store.flush()

    def run_dual_batch(self, forward: Callable[[], None], backward: Callable[[], None], device: torch.device) -> None:
        """Run the forward and backward pass of two microbatches with dual-batch overlap; raises the first error."""
        self._dual_batch = self.make_threads()
        try:
            self._dual_batch.run(forward, backward, device)
        finally:
            self._dual_batch = None

    def yield_to_other_microbatch(self) -> None:
        """Let the other microbatch compute, if there are two: this one waits for communication."""
        if self._dual_batch is not None:
            self._dual_batch.switch()


class DualBatchThreads:
    """Alternates two threads, of which one runs at a time: 0 creates this object, 1 is the second thread.

    On a GPU, thread 1 is also autograd's own thread.
    """

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._turn, self._over = 0, [False, False]
        self._changed = threading.Condition()

    def switch(self) -> None:
        """Let the other thread run until it switches back or ends."""
        thread = int(threading.get_ident() != self._main)
        with self._changed:
            if self._over[1 - thread]:
                return
            self._give_turn_to(1 - thread)
            self._changed.wait_for(lambda: self._turn == thread)

    def run(self, main: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
        """Run `main` here and `second`, which begins, in a thread; `switch` changes. Raises the first error."""
        errors: list[BaseException] = []

        def run_second_on_device() -> None:
            set_current_device(device)
            second()

        self._turn = 1
        thread = threading.Thread(target=lambda: self._run_thread(run_second_on_device, 1, errors), name="beside")
        thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._turn == 0)
        self._run_thread(main, 0, errors)
        thread.join()
        if errors:
            raise errors[0]

    def _run_thread(self, work: Callable[[], None], thread: int, errors: list[BaseException]) -> None:
        """Run `work` as thread 0 or 1, collect its error, and give the turn to the other thread."""
        try:
            work()
        except BaseException as error:  # raised again by `run`, in the thread that trains
            errors.append(error)
        with self._changed:
            self._over[thread] = True
            self._give_turn_to(1 - thread)

    def _give_turn_to(self, turn: int) -> None:
        """Let thread `turn` (0 or 1) run."""
        self._turn = turn
        self._changed.notify_all()
