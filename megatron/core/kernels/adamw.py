"""AdamW over flat tensors: scale the gradients, update moments and main weights, and round the main weights into the weights.

    g <- factor g      m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
    w <- w - lr decay w - lr (m / (1 - b1^t)) / (root(v / (1 - b2^t)) + eps)

Loshchilov and Hutter, 2019, arXiv 1711.05101. In fp32 an update reads 16 bytes an element and writes 12, and 2 of a weight in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamRates:
    """The numbers of one step. decay: weight decay; step: number of the step, from 1."""

    lr: float
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    step: int


@dataclass(frozen=True, slots=True)
class AdamTensors:
    """The tensors of one parameter, flat and of one length [elements].

    weight: where the updated main weight is written in another format; None: the main weight is the weight.
    """

    main: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    weight: Tensor | None = None


TOLERANCE = 1e-5  # of `reference_error` in fp32
AdamKernel = Callable[[Sequence[AdamTensors], "float | Tensor", AdamRates], None]


def adamw(parameters: Sequence[AdamTensors], factor: float | Tensor, rates: AdamRates) -> None:
    """Update parameters of one device in place by torch's fused kernel, which is given the factor, and one copy into the weights.

    factor: a number or a tensor []. Gradients may be overwritten.
    """
    by_dtype: dict[torch.dtype, list[AdamTensors]] = {}
    for one in parameters:
        by_dtype.setdefault(one.main.dtype, []).append(one)
    for dtype, group in by_dtype.items():
        gradients = [one.gradient for one in group]
        scale = None if not isinstance(factor, Tensor) and factor == 1.0 else factor
        if scale is not None and dtype == torch.float64:  # torch's kernel takes a scale in fp32 only
            torch._foreach_mul_(gradients, scale)
            scale = None
        device = gradients[0].device
        torch._fused_adamw_(
            [one.main for one in group],
            gradients,
            [one.first for one in group],
            [one.second for one in group],
            [],
            [torch.full((), float(rates.step), device=device)] * len(group),
            amsgrad=False,
            lr=rates.lr,
            beta1=rates.beta1,
            beta2=rates.beta2,
            weight_decay=rates.decay,
            eps=rates.epsilon,
            maximize=False,
            grad_scale=None if scale is None else _inverse(scale, device),
            found_inf=None,
        )
    copy_all([(one.weight, one.main) for one in parameters if one.weight is not None])


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first (any shapes), in one launch for each pair of formats."""
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for into, source in pairs:
        by_dtypes.setdefault((into.dtype, source.dtype), []).append((into, source))
    for same in by_dtypes.values():
        torch._foreach_copy_([into for into, _ in same], [source for _, source in same])


def reference_adamw(one: AdamTensors, factor: float | Tensor, rates: AdamRates) -> None:
    """The definition: update one parameter in place, each tensor in its own format. factor: a number or a tensor []."""
    gradient = one.gradient * factor
    one.first.lerp_(gradient, 1.0 - rates.beta1)
    one.second.mul_(rates.beta2).addcmul_(gradient, gradient, value=1.0 - rates.beta2)
    size = (one.second / (1.0 - rates.beta2**rates.step)).sqrt_().add_(rates.epsilon)
    one.main.mul_(1.0 - rates.lr * rates.decay)
    one.main.addcdiv_(one.first / (1.0 - rates.beta1**rates.step), size, value=-rates.lr)
    if one.weight is not None:
        one.weight.copy_(one.main)


def reference_error(kernel: AdamKernel, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of main weights and moments from the definition in fp64 after two steps.

    dtype: of the run; main weights are fp64 there, or fp32. Raises `ArithmeticError` above the tolerance, and if weights in bf16 are not the main
    weights to 8 bits. Parameters of 5,000, 33 and 100 normal numbers, the last without a weight in bf16; 0.02 is the most that two steps change.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    exact, held = list[AdamTensors](), list[AdamTensors]()
    for size in (5000, 33, 100):
        main, gradient, first = torch.randn(3, size, dtype=torch.float64, generator=generator)
        exact.append(AdamTensors(main, gradient, first, first.square()))
        weight = None if size == 100 else torch.empty(size, dtype=torch.bfloat16, device=device)
        narrow = [x.to(device, wide) for x in (main, gradient, first, first.square())]
        held.append(AdamTensors(narrow[0], narrow[1], narrow[2], narrow[3], weight))
    for step in (1, 2):
        rates = AdamRates(1e-2, 0.1, 0.9, 0.95, 1e-3, step)
        for one in exact:
            reference_adamw(one, 0.25, rates)
        kernel(held, torch.full((), 0.25, device=device), rates)
        for one in exact if step == 1 else ():
            one.gradient.mul_(-3.0)
        for other, one in zip(held, exact, strict=True):
            other.gradient.copy_(one.gradient)
    return max(_largest_difference(mine, right) for mine, right in zip(held, exact, strict=True))


def _largest_difference(mine: AdamTensors, right: AdamTensors) -> float:
    """The largest difference of two parameters. Raises `ArithmeticError`."""
    worst = 0.0
    for name in ("main", "first", "second"):
        off = (getattr(mine, name).cpu().double() - getattr(right, name)).abs().max().item()
        if not off <= TOLERANCE:
            raise ArithmeticError(f"{name} was off by {off:.2g}, {TOLERANCE:g} allowed")
        worst = max(worst, off)
    if mine.weight is not None and not torch.allclose(mine.weight.to(mine.main), mine.main, rtol=2.0**-7, atol=0.0):
        raise ArithmeticError("weights in bf16 are not the main weights")
    return worst


def _inverse(factor: float | Tensor, device: torch.device) -> Tensor:
    """1 / factor, fp32 []: torch divides gradients by a scale."""
    made = factor if isinstance(factor, Tensor) else torch.full((), factor, dtype=torch.float64, device=device)
    return made.reciprocal().float()
