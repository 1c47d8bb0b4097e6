"""Weight gradients that wait: the half of a backward pass that no other stage of a pipeline waits for.

The gradient of a layer's input must travel on; that of its weight only has to be there when the step ends. A schedule
that tells them apart fills its bubble with the second (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): during a
"B" linear layers leave the work for their weights here, and a "W" does it. `--delay-wgrad-compute` does it sooner, where the
backward pass itself would wait for other ranks:

    gradients of an expert layer's outputs travel to the experts ...      weights of the layers behind it
    the experts' inputs' gradients travel home ...                        weights of the experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.parallel.gradient_sum import GradientSum

Key = tuple[int, int]  # stage, microbatch
# Where gradients of some parameters go, and what computes them when they are asked for.
WeightWork = tuple[Sequence[GradientEdge], Callable[[], Sequence[Tensor | None]], GradientSum | None]


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

    def leave(self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]], into: GradientSum | None = None) -> None:
        """Work for later. compute: the gradients, one a parameter; None for one that it has added `into` its sum."""
        assert self._now is not None, "no backward pass is collecting"
        # What hooks of saved tensors hand back is not the parameter: it leads there only while this backward pass lasts.
        self._waiting[self._now].append(([get_gradient_edge(parameter) for parameter in parameters], compute, into))

    def catch_up(self, key: Key) -> None:
        """Add what the backward pass left to the parameters' gradients, as autograd would, hooks included."""
        _add(self._waiting.pop(key))

    def work_off(self) -> None:
        """The same with what the backward pass that is collecting has left so far."""
        if self._now is not None:
            left, self._waiting[self._now] = self._waiting[self._now], []  # what waits for others meanwhile finds nothing to do
            _add(left)


def _add(left: Sequence[WeightWork]) -> None:
    for edges, compute, into in left:
        with torch.no_grad():
            pairs = [pair for pair in zip(edges, compute(), strict=True) if pair[1] is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        if into is not None:
            into.came()
