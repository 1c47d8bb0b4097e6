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
class AdamStepSettings:
    """Hyperparameters of one AdamW step. decay: weight decay; step: number of the step, counted from 1."""

    lr: float
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    step: int


@dataclass(frozen=True, slots=True)
class AdamTensors:
    """The tensors of one parameter, all flat and of the same length [elements].

    main: main weight, which is updated. first, second: first and second moment. weight: model weight in another dtype,
    to which the updated main weight is copied; None: the main weight is the model weight.
    """

    main: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    weight: Tensor | None = None


TOLERANCE = 1e-5  # of `adamw_kernel_error` in fp32
AdamKernel = Callable[[Sequence[AdamTensors], "float | Tensor", AdamStepSettings], None]


def adamw(parameters: Sequence[AdamTensors], factor: float | Tensor, rates: AdamStepSettings) -> None:
    """Update parameters in place by torch's fused AdamW kernel, and copy the main weights into the model weights.

    factor: a number or a tensor [], by which gradients are multiplied first. All tensors are on one device. Gradients
    may be overwritten.
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
            grad_scale=None if scale is None else _grad_scale_for_fused_adamw(scale, device),
            found_inf=None,
        )
    copy_tensor_pairs([(one.weight, one.main) for one in parameters if one.weight is not None])


def copy_tensor_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first (of the same shape), with one launch for each combination of
    dtypes.
    """
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for into, source in pairs:
        by_dtypes.setdefault((into.dtype, source.dtype), []).append((into, source))
    for same in by_dtypes.values():
        torch._foreach_copy_([into for into, _ in same], [source for _, source in same])


def reference_adamw(one: AdamTensors, factor: float | Tensor, rates: AdamStepSettings) -> None:
    """Update one parameter in place by the formula of AdamW, which defines the op; every tensor keeps its dtype.
    factor: a number or a tensor [], by which the gradient is multiplied.
    """
    gradient = one.gradient * factor
    one.first.lerp_(gradient, 1.0 - rates.beta1)
    one.second.mul_(rates.beta2).addcmul_(gradient, gradient, value=1.0 - rates.beta2)
    size = (one.second / (1.0 - rates.beta2**rates.step)).sqrt_().add_(rates.epsilon)
    one.main.mul_(1.0 - rates.lr * rates.decay)
    one.main.addcdiv_(one.first / (1.0 - rates.beta1**rates.step), size, value=-rates.lr)
    if one.weight is not None:
        one.weight.copy_(one.main)


def adamw_kernel_error(kernel: AdamKernel, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest absolute difference of main weights and moments between two steps of an AdamW kernel and of
    `reference_adamw` in fp64.

    dtype: of the run; main weights are fp64 if it is, else fp32. The parameters have 5,000, 33 and 100 normal random
    elements; all but the last have a bf16 model weight. Raises `ArithmeticError` if a difference exceeds `TOLERANCE`,
    or if model weights are not the main weights to the 8 bits of bf16. Two steps change a main weight by 0.02 at most.
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
        rates = AdamStepSettings(1e-2, 0.1, 0.9, 0.95, 1e-3, step)
        for one in exact:
            reference_adamw(one, 0.25, rates)
        kernel(held, torch.full((), 0.25, device=device), rates)
        for one in exact if step == 1 else ():
            one.gradient.mul_(-3.0)
        for other, one in zip(held, exact, strict=True):
            other.gradient.copy_(one.gradient)
    worst = 0.0
    for mine, right in zip(held, exact, strict=True):
        for name in ("main", "first", "second"):
            off = (getattr(mine, name).cpu().double() - getattr(right, name)).abs().max().item()
            if not off <= TOLERANCE:
                raise ArithmeticError(f"{name} was off by {off:.2g}, {TOLERANCE:g} allowed")
            worst = max(worst, off)
        if mine.weight is not None and not torch.allclose(mine.weight.to(mine.main), mine.main, rtol=2.0**-7, atol=0.0):
            raise ArithmeticError("weights in bf16 are not the main weights")
    return worst


def _grad_scale_for_fused_adamw(factor: float | Tensor, device: torch.device) -> Tensor:
    """Return 1 / factor as an fp32 tensor [] on the device: torch's kernel divides gradients by its scale."""
    made = factor if isinstance(factor, Tensor) else torch.full((), factor, dtype=torch.float64, device=device)
    return made.reciprocal().float()
