"""Delayed weight gradients: the half of a backward pass that no other pipeline stage waits for.

The gradient of a layer's input must be sent on; that of its weight is only needed at the end of the step. A schedule that
separates the two fills its bubble with the second (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): during a "B" linear
layers put the work for their weights into the store, and a "W" does it. `--delay-wgrad-compute` does it earlier, wherever the
backward pass itself would wait for other ranks:

    gradients of an expert layer's outputs travel to the experts ...      weights of the layers behind it
    gradients of the experts' inputs travel back ...                      weights of the experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.parallel.main_grad import MainGrad

Key = tuple[int, int]  # stage, microbatch
# Where gradients of some parameters go, and what computes them when they are asked for.
WeightWork = tuple[Sequence[GradientEdge], Callable[[], Sequence[Tensor | None]], MainGrad | None]


class WeightGradStore:
    """Delayed weight gradients, by backward pass. Outside of `collecting`, nothing is delayed."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[WeightWork]] = {}
        self._now: Key | None = None

    @property
    def collects(self) -> bool:
        """Whether layers are to delay their weight gradients."""
        return self._now is not None

    @contextmanager
    def collecting(self, key: Key) -> Iterator[None]:
        """Around a backward pass whose weight gradients are delayed."""
        self._waiting[key], self._now = [], key
        try:
            yield
        finally:
            self._now = None

    def put(
        self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]], into: MainGrad | None = None
    ) -> None:
        """Delay work. compute: returns a gradient for each parameter; None for one that it has added to `into` itself."""
        assert self._now is not None, "no backward pass is collecting"
        # What hooks of saved tensors hand back is not the parameter: it leads there only while this backward pass lasts.
        self._waiting[self._now].append(([get_gradient_edge(parameter) for parameter in parameters], compute, into))

    def pop(self, key: Key) -> None:
        """Compute what the backward pass delayed, and accumulate it as autograd would, hooks included."""
        _add(self._waiting.pop(key, []))  # nothing, where all of a stage is frozen

    def flush(self) -> None:
        """The same for what the collecting backward pass has delayed so far."""
        if self._now is not None:
            left, self._waiting[self._now] = (
                self._waiting[self._now],
                [],
            )  # a wait inside of this work finds nothing to do
            _add(left)


def _add(left: Sequence[WeightWork]) -> None:
    for edges, compute, into in left:
        with torch.no_grad():
            pairs = [pair for pair in zip(edges, compute(), strict=True) if pair[1] is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        if into is not None:
            into.came()
