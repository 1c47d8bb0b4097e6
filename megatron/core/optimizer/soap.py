"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al., 2024, arXiv 2409.11321), with KL-Shampoo's factors (Lin et
al., 2025, arXiv 2509.03378).

    L <- b L + (1 - b) G R'^-1 G^T / n      R <- b R + (1 - b) G^T L'^-1 G / m      factors of a gradient G [m, n]; b corrected for bias
    Q <- the orthogonal factor of P' Q = Q U, for P = L and R; P' = P / (its mean eigenvalue) + RIDGE
    W <- W - lr (decay W + Q_L A Q_R^T), where A is the update that Adam makes of Q_L^T G Q_R

Without --soap-use-kl-shampoo, G G^T and G^T G take the place of the sums. The first factors are singular (of a matrix 4h x h,
L has rank h), and of their eigenvectors rounding would choose those without an eigenvalue. So nothing is decomposed here: Q
starts as the identity, of which every step rotates as much as an orthogonal iteration does, and the ridge bounds the condition of
what it factorizes by about m / RIDGE. Then rounding is enlarged by as much at most, and every layout gives the same weights. Directions whose
eigenvalues are far below the ridge mix slowly: Adam treats them as it treats elements. `WholeMatrixRule` brings gradients to owners.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.optimizer.rule import Owned, Slot, UpdateRuleContext
from megatron.core.optimizer.whole_matrix import MatrixTask, WholeMatrixRule, part_shapes

RIDGE = 0.1  # of the mean eigenvalue


@dataclass(frozen=True, slots=True)
class SoapState:
    """The state of a matrix [m, n]. mean, square: Adam's moments in the eigenbasis, [m, n]; left, right: Shampoo's factors,
    [m, m] and [n, n]; left_basis, right_basis: their orthogonal bases.
    """

    mean: Tensor
    square: Tensor
    left: Tensor
    right: Tensor
    left_basis: Tensor
    right_basis: Tensor


class Soap(WholeMatrixRule):
    """SOAP for the matrices of this rank's stages.

    state: parameter name and number of the matrix in its stack -> slot -> tensor. Of the factors and bases of a fused matrix, those of its
    parts follow one another in a flat tensor. steps: number of updates so far.
    """

    slots = ("exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R")
    owners_hold_state: ClassVar[bool] = True

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        super().__init__(owned, config, context)
        self.state = {
            f"{task.name} {_number_in_stack(task)}": self._initial_state(task)
            for axis, tasks in self.tasks.items()
            for task in tasks
            if not task.is_sharded or task.owner == self.mesh.axis(axis).rank
        }

    @classmethod
    def state_bytes_per_element(cls, config: RunConfig, sides: float, tensor_ranks: int) -> float:
        """See the base class. Every tensor rank keeps the state of whole matrices."""
        return tensor_ranks * (8.0 if config.precision.fp64 else 4.0) * (2.0 + 2.0 * sides)

    def _initial_state(self, task: MatrixTask) -> dict[str, Tensor]:
        """Return the state before the first step: moments of zero; factors and bases are identities."""
        eye = partial(torch.eye, dtype=self.nothing.dtype, device=self.nothing.device)
        left, right = (torch.cat([eye(sides[dim]).view(-1) for sides in part_shapes(task.spec)]) for dim in (0, 1))
        moments = (self.nothing.new_zeros(task.spec.shape) for _ in range(2))
        return dict(zip(self.slots, (*moments, left, right, left.clone(), right.clone()), strict=True))

    def checkpoint_state(self, segment: OwnedSegment, main: Tensor) -> Iterator[Slot]:
        """Yield the state [elements] of each matrix of a segment that this rank keeps, as a segment of that of the parameter."""
        experts = segment.local_shape[:1] if segment.spec.stacked else ()
        shards = tuple(shard for shard in segment.spec.shards if segment.spec.stacked and shard.dim == 0)
        for number in range(math.prod(experts)):
            for slot, values in self.state.get(f"{segment.name} {number}", {}).items():
                stack = segment.spec.shape[: len(experts)]
                spec = replace(segment.spec, shape=(*stack, *values.shape), shards=shards)
                low, flat = number * values.numel(), values.view(-1)
                shape = (*experts, *values.shape)
                yield slot, OwnedSegment(spec, shape, low, low + len(flat), flat, flat, segment.sharded), flat

    def step(self, factor: float | Tensor) -> None:
        """Update the main weights by their gradients times `factor`, a scalar. Collective."""
        self.steps += 1
        super().step(factor)

    def _cost(self, rows: int, columns: int) -> float:
        """See the base class: those of two QR factorizations, and of products with factors and bases."""
        return 2.0 * (rows**3 + columns**3) + 6.0 * rows * columns * (rows + columns)

    def _direction(self, name: str, main: Tensor) -> Tensor:
        """Return the gradient of the owned elements, flat."""
        assert main.grad is not None, "the gradients of all main weights are attached"
        return main.grad

    def _updates(self, tasks: Sequence[MatrixTask], flats: Sequence[Tensor]) -> list[Tensor]:
        """Update the state of matrices; return their updates, flat. Every tensor rank computes that of the whole matrix."""
        return [
            self._update_of_task(task, flat.view(1, *task.shape)).reshape(-1)
            for task, flat in zip(tasks, flats, strict=True)
        ]

    def _update_of_task(self, task: MatrixTask, local: Tensor) -> Tensor:
        """Return this tensor rank's shard of the update of a matrix. local: its shard of the gradient, [1, rows, columns]."""
        gradient = self._gather_tensor_shards(local, task.spec)[0]
        shapes, state = part_shapes(task.spec), self.state[f"{task.name} {_number_in_stack(task)}"]
        dim = task.spec.shards[0].dim if task.spec.shards else 0
        lengths = [shape[dim] for shape in shapes]
        moments = [state[slot].split(lengths, dim) for slot in self.slots[:2]]
        squares = [
            [
                flat.view(size, size)
                for flat, size in zip(state[slot].split([size**2 for size in sizes]), sizes, strict=True)
            ]
            for slot, sizes in zip(self.slots[2:], ([m for m, _ in shapes], [n for _, n in shapes]) * 2, strict=True)
        ]
        parts = [
            soap_update(part, SoapState(*of_part), self.config, self.steps)
            for part, *of_part in zip(gradient.split(lengths, dim), *moments, *squares, strict=True)
        ]
        return self._local_tensor_shard(torch.cat(parts, dim)[None], task.spec, task.shape)


def soap_update(gradient: Tensor, state: SoapState, config: OptimizerConfig, step: int) -> Tensor:
    """Update the state of a matrix; return its update before the learning rate. gradient: [m, n], as the result; step: from 1."""
    mean = state.left_basis @ state.mean @ state.right_basis.mT  # back to where the bases do not matter
    update_factors(gradient, state, config, step)
    for factor, basis in ((state.left, state.left_basis), (state.right, state.right_basis)):
        basis.copy_(rotated_basis(factor, basis))
    state.mean.copy_(state.left_basis.mT @ mean @ state.right_basis)
    projected = state.left_basis.mT @ gradient @ state.right_basis
    state.mean.lerp_(projected, 1.0 - config.adam_beta1)
    state.square.lerp_(projected.square(), 1.0 - config.adam_beta2)
    root = (state.square / (1.0 - config.adam_beta2**step)).sqrt_().add_(config.adam_eps)
    return state.left_basis @ (state.mean / (1.0 - config.adam_beta1**step) / root) @ state.right_basis.mT


def update_factors(gradient: Tensor, state: SoapState, config: OptimizerConfig, step: int) -> None:
    """Update Shampoo's factors in place. gradient: [m, n]."""
    rows, columns = gradient.shape
    if config.soap_use_kl_shampoo:
        left = gradient @ _inverse(state.right, state.right_basis) @ gradient.mT / columns
        right = gradient.mT @ _inverse(state.left, state.left_basis) @ gradient / rows
    else:
        left, right = gradient @ gradient.mT, gradient.mT @ gradient
    newest = (1.0 - config.soap_shampoo_beta) / (1.0 - config.soap_shampoo_beta**step)
    state.left.lerp_(left, newest)
    state.right.lerp_(right, newest)


def _inverse(factor: Tensor, basis: Tensor) -> Tensor:
    """Return the inverse of a factor with ridge, as if `basis` were its eigenvectors. Both, and the result: [n, n]."""
    eigenvalues = (basis * (with_ridge(factor) @ basis)).sum(0)
    return basis / eigenvalues @ basis.mT


def with_ridge(factor: Tensor) -> Tensor:
    """Return a factor [n, n] over its mean eigenvalue, plus RIDGE on the diagonal; of a factor of zero the ridge alone."""
    mean = factor.diagonal().mean().clamp_min(torch.finfo(factor.dtype).tiny)
    return factor / mean + RIDGE * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)


def rotated_basis(factor: Tensor, basis: Tensor) -> Tensor:
    """Return the basis after an orthogonal iteration towards the eigenvectors of a factor. Both, and the result: [n, n]."""
    rotated, upper = torch.linalg.qr(with_ridge(factor) @ basis)
    # The factorization is unique once the diagonal is positive: no column turns its sign, which the moments would not follow.
    return rotated * torch.where(upper.diagonal() < 0, -1.0, 1.0)


def _number_in_stack(task: MatrixTask) -> int:
    """Return the number of a matrix among the experts of this rank that are one parameter, else 0."""
    return task.low // (task.high - task.low)
