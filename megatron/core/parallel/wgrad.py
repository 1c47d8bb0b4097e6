"""Delayed weight gradients: the half of a backward pass that no other pipeline stage waits for.

The previous stage waits for the gradient of a layer's input; the gradient of its weight is needed only at the end of
the step. A schedule that separates the two fills its bubble with the second (Qi et al., "Zero Bubble Pipeline
Parallelism", 2023): during a "B" action linear layers put the computation of their weight gradients into the store, and
the "W" action performs it. `--delay-wgrad-compute` performs it earlier, wherever the backward pass would wait for other
ranks:

    during the all-to-all of gradients to the experts ...      weight gradients of the layers behind the experts
    during the all-to-all of gradients back ...                weight gradients of the experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.parallel.main_grad import MainGrad

Key = tuple[int, int]  # stage, microbatch
# Graph edges that accumulate the gradients of some parameters, the function that computes these, and its main gradient.
DelayedWork = tuple[Sequence[GradientEdge], Callable[[], Sequence[Tensor | None]], MainGrad | None]


class WeightGradStore:
    """Delayed weight gradients, by stage and microbatch. Outside of `delayed`, nothing is delayed."""

    def __init__(self) -> None:
        self._delayed: dict[Key, list[DelayedWork]] = {}
        self._current: Key | None = None

    @property
    def is_delaying(self) -> bool:
        """Whether layers are to delay their weight gradients now."""
        return self._current is not None

    @contextmanager
    def delaying(self, key: Key) -> Iterator[None]:
        """Context manager around a backward pass whose weight gradients are delayed under `key`."""
        self._delayed[key], self._current = [], key
        try:
            yield
        finally:
            self._current = None

    def put(
        self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]], into: MainGrad | None = None
    ) -> None:
        """Delay the computation of the gradients of some parameters (any shape).

        compute: returns a gradient for each parameter, or None for one that it has added to the main gradient `into`
        itself.
        """
        assert self._current is not None, "no backward pass is collecting"
        # Saved-tensor hooks may return another tensor than the parameter, valid only during this backward pass: store the edge.
        self._delayed[self._current].append(([get_gradient_edge(parameter) for parameter in parameters], compute, into))

    def pop(self, key: Key) -> None:
        """Compute what the backward pass `key` delayed, and accumulate it as autograd would, hooks included."""
        _accumulate_delayed_gradients(self._delayed.pop(key, []))  # empty if the whole stage is frozen

    def flush(self) -> None:
        """Compute what the current backward pass has delayed so far."""
        if self._current is not None:
            delayed = self._delayed[self._current]
            self._delayed[self._current] = []  # so that a wait inside this computation finds nothing left
            _accumulate_delayed_gradients(delayed)


def _accumulate_delayed_gradients(delayed: Sequence[DelayedWork]) -> None:
    """Compute delayed gradients and accumulate them through autograd, hooks included."""
    for edges, compute, into in delayed:
        with torch.no_grad():
            pairs = [pair for pair in zip(edges, compute(), strict=True) if pair[1] is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        if into is not None:
            into.on_accumulated()
