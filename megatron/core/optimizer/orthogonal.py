"""Orthogonalization of matrices by Newton-Schulz iterations, which need matrix products alone.

For X = U S V^T with singular values up to 1, an odd polynomial p(X) = aX + b(XX^T)X + c(XX^T)^2 X equals U p(S) V^T. A
few such polynomials in sequence bring all singular values near 1, also small ones:

    simple          one polynomial, repeated: converges fast to values between 0.7 and 1.2 (Jordan, 2024, "Muon")
    quintic         five polynomials, fitted in sequence (Leloykun, 2025, "Squeezing 1-2% efficiency gains out of Muon")
    polar_express   the best polynomial of each step given the previous ones (Amsel et al., 2025, arXiv 2505.16932), with the
                    paper's safety factor of 1.01 against rounding

If the columns of X are sharded over ranks, the Gram matrix XX^T is all-reduced, and nothing else is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis

_SMALLEST = 1e-7  # a matrix with a smaller norm is not normalized
_SAFETY = 1.01
_POLAR = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (*((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR), (1.875, -1.25, 0.375)),
}


@dataclass(frozen=True, slots=True)
class NewtonSchulzSettings:
    """Number of steps, kind of coefficients; is_half: compute in bf16, unless the matrix is fp64."""

    steps: int = 5
    kind: str = "quintic"
    is_half: bool = True

    def coefficients(self) -> Iterator[tuple[float, float, float]]:
        """Yield (a, b, c) of every step. After the last row, polar_express repeats it, the others start again."""
        rows = COEFFICIENTS[self.kind]
        for step in range(self.steps):
            yield rows[min(step, len(rows) - 1)] if self.kind == "polar_express" else rows[step % len(rows)]


def orthogonalize(x: Tensor, iteration: NewtonSchulzSettings) -> Tensor:
    """Return the nearly orthogonal factor U V^T of each matrix. x: [..., m, n]; returns the same shape and dtype."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonalize_distributed(x.mT, iteration, Axis("alone")).mT
    return orthogonalize_distributed(x, iteration, Axis("alone"))


def orthogonalize_distributed(
    x: Tensor, iteration: NewtonSchulzSettings, axis: Axis, counted: Tensor | None = None
) -> Tensor:
    """Orthogonalize matrices whose columns are sharded over an axis. x: [..., m, n/ranks], as the result.

    counted: [n/ranks], 1 for columns that count and 0 for replicas of another rank's columns; None: all count.
    """
    counted_x = x if counted is None else x * counted
    norm = collectives.all_reduce(counted_x.square().sum((-2, -1), keepdim=True), axis).sqrt()
    x_n = x / norm.clamp(min=_SMALLEST)
    if iteration.is_half and x.dtype != torch.float64:
        x_n = x_n.bfloat16()
    for a, b, c in iteration.coefficients():
        counted_x = x_n if counted is None else x_n * counted.to(x_n.dtype)
        gram = collectives.all_reduce(counted_x @ x_n.mT, axis)
        x_n = a * x_n + (b * gram + c * (gram @ gram)) @ x_n
    return x_n.to(x.dtype)


def muon_update_scale(rows: int, columns: int, mode: str) -> float:
    """Return the factor of Muon's update for a matrix of `rows` (out) and `columns` (in), before the learning rate.

    mode: spectral: elements of size about 1 (Liu et al., 2025, arXiv 2502.16982). unit_rms_norm: an input of RMS 1
    changes the output by RMS 1 (Bernstein, 2025). shape_scaling: Jordan's original.
    """
    return {"spectral": max(rows, columns), "unit_rms_norm": rows / columns, "shape_scaling": max(1.0, rows / columns)}[
        mode
    ] ** 0.5


def newton_schulz_cost(rows: int, columns: int) -> float:
    """Return the multiplications of one Newton-Schulz step of a matrix."""
    shorter, longer = sorted((rows, columns))
    return shorter**2 * (2.0 * longer + shorter)
