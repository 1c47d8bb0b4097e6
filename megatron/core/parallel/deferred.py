"""Weight gradients that wait: the half of a backward pass that no other stage of a pipeline waits for.

The gradient of a layer's input must travel on; that of its weight only has to be there when the step ends. A schedule
that tells them apart fills its bubble with the second (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): during a
"B" linear layers leave the work for their weights here, and a "W" does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Key = tuple[int, int]  # stage, microbatch
# Gradients of some parameters, computed when they are asked for.
WeightWork = tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]


class Deferred:
    """What waits, by the backward pass that left it. Outside of `collecting`, nothing does."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[WeightWork]] = {}
        self._now: Key | None = None

    @property
    def collects(self) -> bool:
        """Whether layers are to leave their work for later."""
        return self._now is not None

    @contextmanager
    def collecting(self, key: Key) -> Iterator[None]:
        """Around a backward pass whose weight gradients are to wait."""
        self._waiting[key], self._now = [], key
        try:
            yield
        finally:
            self._now = None

    def leave(self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        """Work for later. compute: the gradients, one a parameter."""
        assert self._now is not None, "no backward pass is collecting"
        self._waiting[self._now].append((parameters, compute))

    def catch_up(self, key: Key) -> None:
        """Add what the backward pass left to the parameters' gradients, as autograd would, hooks included."""
        for parameters, compute in self._waiting.pop(key):
            with torch.no_grad():
                gradients = compute()
            torch.autograd.backward(parameters, gradients)
