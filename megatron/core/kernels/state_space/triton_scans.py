"""Scans over a state in Triton, with their gradients: `triton_scan_forward` has the kernels of the forward pass, `triton_scan_gradients` those of the backward pass.

All sums are in fp32. This file needs the package triton, and is imported when one of its kernels is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from megatron.core.kernels.state_space.triton_scan_forward import launch_delta_rule_scan, launch_selective_scan
from megatron.core.kernels.state_space.triton_scan_gradients import delta_rule_gradients, selective_scan_gradients

_CHUNK, _SPAN = 64, 4  # tokens of a chunk; chunks between states that are kept


class _ScanFunction(Function):
    """The autograd function of both scans. run computes output and states; gradients computes the backward pass. The
    inputs and the state before every `_SPAN` chunks are kept.
    """

    @staticmethod
    def forward(
        context: Any,
        run: Callable[..., tuple[Tensor, Tensor]],
        gradients: Callable[..., tuple[Tensor, Tensor | None, tuple[Tensor, ...]]],
        segments: Tensor | None,
        state: Tensor | None,
        a: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = tuple(each.contiguous() for each in inputs)
        segments, first = (None if each is None else each.contiguous() for each in (segments, state))
        y, states = run(inputs, a, segments, first, chunk=_CHUNK, span=_SPAN)
        context.gradients = gradients
        context.save_for_backward(segments, state, a, states[:-1], *inputs)
        return y, states[-1].clone()

    @staticmethod
    def backward(context: Any, dy: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        segments, first, a, states, *inputs = context.saved_tensors
        span = _SPAN * _CHUNK
        d_first, d_a, others = context.gradients(inputs, a, segments, states, span, dy.contiguous(), d_state)
        return None, None, None, None if first is None else d_first.to(first.dtype), d_a, *others


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = _CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.scans.selective_scan` by Triton; `chunk` is ignored. x: [s, b, n, p]; dt: [s, b, n]; a: [n]; b,
    c: [s, b, g, d]. Returns y like x, and the last state [b, n, p, d] in fp32.
    """
    return _ScanFunction.apply(launch_selective_scan, selective_scan_gradients, segments, state, a, x, dt, b, c)


def delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = _CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.scans.delta_rule_scan` by Triton; `chunk` is ignored. q, k: [s, b, g, dk]; v: [s, b, n, dv]; g,
    beta: [s, b, n]. Returns o like v, and the last state [b, n, dk, dv] in fp32.
    """
    return _ScanFunction.apply(launch_delta_rule_scan, delta_rule_gradients, segments, state, None, q, k, v, g, beta)
