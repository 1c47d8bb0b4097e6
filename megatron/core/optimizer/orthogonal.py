"""The nearest orthogonal matrix, or almost, by products of matrices alone (Newton and Schulz).

For X = U S V^T with singular values up to 1, an odd polynomial p(X) = aX + b(XX^T)X + c(XX^T)^2 X is U p(S) V^T. A few such
polynomials after each other bring all singular values near 1, the small ones too:

    simple          one polynomial, again and again: fast at first, and then values between 0.7 and 1.2 (Jordan, 2024, "Muon")
    quintic         five polynomials, fitted one after the other (Leloykun, 2025, "Squeezing 1-2% efficiency gains out of Muon")
    polar_express   the best polynomial of each step given the one before (Amsel et al., 2025, arXiv 2505.16932), made a
                    hundredth more careful for rounding, as there

Where the columns of X lie on several ranks, its rows' products are summed over them, and nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis

_SMALLEST = 1e-7  # below this norm, a matrix stays as small as it is
_CAREFUL = 1.01
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
    "polar_express": (*((a / _CAREFUL, b / _CAREFUL**3, c / _CAREFUL**5) for a, b, c in _POLAR), (1.875, -1.25, 0.375)),
}


@dataclass(frozen=True, slots=True)
class Iteration:
    """How often, with which coefficients and in which format. is_half: bf16, unless the matrix is fp64."""

    steps: int = 5
    kind: str = "quintic"
    is_half: bool = True

    def coefficients(self) -> Iterator[tuple[float, float, float]]:
        """(a, b, c) of every step. polar_express stays with its last row, others begin again."""
        rows = COEFFICIENTS[self.kind]
        for step in range(self.steps):
            yield rows[min(step, len(rows) - 1)] if self.kind == "polar_express" else rows[step % len(rows)]


def orthogonalize(x: Tensor, how: Iteration) -> Tensor:
    """The nearly orthogonal factor of each matrix. x: [..., m, n]; returns the same shape and format."""
    if x.shape[-2] > x.shape[-1]:
        return _iterate(x.mT, how, Axis("alone"), None).mT
    return _iterate(x, how, Axis("alone"), None)


def orthogonalize_together(x: Tensor, how: Iteration, axis: Axis, counted: Tensor | None = None) -> Tensor:
    """The same, of matrices whose columns lie on the ranks of an axis. x: [..., m, n/ranks], which is returned.

    counted: [n/ranks], 1 for columns that count and 0 for copies of those of another rank; None: all count.
    """
    return _iterate(x, how, axis, counted)


def _iterate(x: Tensor, how: Iteration, axis: Axis, counted: Tensor | None) -> Tensor:
    own = x if counted is None else x * counted
    norm = collectives.all_reduce(own.square().sum((-2, -1), keepdim=True), axis).sqrt()
    x_n = x / norm.clamp(min=_SMALLEST)
    if how.is_half and x.dtype != torch.float64:
        x_n = x_n.bfloat16()
    for a, b, c in how.coefficients():
        own = x_n if counted is None else x_n * counted.to(x_n.dtype)
        gram = collectives.all_reduce(own @ x_n.mT, axis)
        x_n = a * x_n + (b * gram + c * (gram @ gram)) @ x_n
    return x_n.to(x.dtype)


def scale_of(rows: int, columns: int, mode: str) -> float:
    """What the update of a matrix of rows (out) x columns (in) is multiplied by.

    spectral: elements of size about 1 (Liu et al., 2025, arXiv 2502.16982). unit_rms_norm: an input of root mean square 1 moves
    the output by 1 (Bernstein, 2025). shape_scaling: Jordan's own.
    """
    return {"spectral": max(rows, columns), "unit_rms_norm": rows / columns, "shape_scaling": max(1.0, rows / columns)}[
        mode
    ] ** 0.5
