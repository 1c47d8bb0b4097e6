"""Muon: the update of a matrix is its orthogonalized momentum (Jordan et al., 2024; Liu et al., 2025, arXiv
2502.16982).

    m <- beta m + (1 - beta) g        direction = m, or with Nesterov beta m + (1 - beta) g once more
    W <- W - lr (decay W + scale orthogonal(direction))

`WholeMatrixRule` brings the direction of a whole matrix to its owner. Tensor ranks gather the matrix and all orthogonalize
it, or share the computation (`--muon-tp-mode`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.optimizer.orthogonal import (
    NewtonSchulzSettings,
    muon_update_scale,
    newton_schulz_cost,
    orthogonalize,
    orthogonalize_distributed,
)
from megatron.core.optimizer.rule import Owned, Slot, UpdateRuleContext
from megatron.core.optimizer.whole_matrix import MatrixTask, WholeMatrixRule
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.spec import ParamSpec, local_shard_boxes


class Muon(WholeMatrixRule):
    """Muon for the matrices of this rank's stages. state: parameter name -> slot -> the owned part's state, flat."""

    slots = ("momentum_buffer",)

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        super().__init__(owned, config, context)
        self.iteration = NewtonSchulzSettings(
            config.muon_num_ns_steps, config.muon_coefficient_type, config.muon_fp32_matmul_prec == "medium"
        )
        self.state = {segment.name: {slot: torch.zeros_like(main) for slot in self.slots} for segment, main in owned}

    def checkpoint_state(self, segment: OwnedSegment, main: Tensor) -> Iterator[Slot]:
        """Yield the momentum [elements] of a segment."""
        yield "momentum_buffer", segment, self.state[segment.name]["momentum_buffer"]

    def _cost(self, rows: int, columns: int) -> float:
        """See the base class: those of one Newton-Schulz step."""
        return newton_schulz_cost(rows, columns)

    def _direction(self, name: str, main: Tensor) -> Tensor:
        """Update the momentum by the gradient and return the update direction of the owned elements, flat."""
        gradient, momentum, beta = main.grad, self.state[name]["momentum_buffer"], self.config.muon_momentum
        assert gradient is not None, "the gradients of all main weights are attached"
        momentum.lerp_(gradient, 1.0 - beta)
        return gradient.lerp_(momentum, beta) if self.config.muon_nesterov else momentum

    def _splits_fused_matrix(self, spec: ParamSpec) -> bool:
        """Return whether the segments of a fused matrix are orthogonalized separately (for qkv: --muon-split-qkv)."""
        return self.config.muon_split_qkv or "linear_qkv" not in spec.name

    def _updates(self, tasks: Sequence[MatrixTask], flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the scaled orthogonalized matrices, flat; those of one shape, such as experts, are one batch."""
        same_shape: dict[tuple[object, ...], list[int]] = {}
        for place, task in enumerate(tasks):
            same_shape.setdefault(
                (task.spec.shape, task.spec.shards, task.shape, self._splits_fused_matrix(task.spec)), []
            ).append(place)
        updates: list[Tensor] = list(flats)
        for places in same_shape.values():
            stack = torch.stack([flats[place].view(tasks[place].shape) for place in places])
            for place, update in zip(
                places, self._orthogonalize_local_shard(stack, tasks[places[0]].spec), strict=True
            ):
                updates[place] = update.reshape(-1)
        return updates

    def _orthogonalize_local_shard(self, x: Tensor, spec: ParamSpec) -> Tensor:
        """Orthogonalize and scale matrices of one spec by `--muon-tp-mode`; return this rank's shard of them.

        x: this rank's shard of the directions, [k, rows, columns]; returns the same shape.
        """
        tp_shard = spec.shards[0] if spec.shards else None
        if tp_shard is None:
            return self._scale_update(orthogonalize(x, self.iteration), spec.shape)
        axis, split, dim = self.mesh.axis(tp_shard.axis), self._splits_fused_matrix(spec), tp_shard.dim - 2
        if self.config.muon_tp_mode == "blockwise":
            sizes = [part.local_size(axis.size) for part in tp_shard.segments] if split else [x.shape[dim]]
            return self._orthogonalize_split(x, sizes, dim)
        if self.config.muon_tp_mode == "distributed":
            return self._orthogonalize_distributed(x, spec, axis)
        sizes = [part.size for part in tp_shard.segments] if split else [spec.shape[tp_shard.dim]]
        whole = self._orthogonalize_split(self._gather_tensor_shards(x, spec), sizes, dim)
        return self._local_tensor_shard(whole, spec, x.shape[1:])

    def _orthogonalize_split(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Orthogonalize and scale the parts of matrices [k, rows, columns], of these sizes along `dim`, each by itself."""
        parts = [
            self._scale_update(orthogonalize(part, self.iteration), part.shape[1:]) for part in x.split(sizes, dim)
        ]
        return torch.cat(parts, dim)

    def _orthogonalize_distributed(self, x: Tensor, spec: ParamSpec, axis: Axis) -> Tensor:
        """As `_orthogonalize_local_shard`, but all tensor ranks together, without a gather. x: [k, rows, columns]."""
        tp_shard = spec.shards[0]
        held = local_shard_boxes(spec, self.mesh)
        widths = [shard.local.shape[tp_shard.dim] for shard in held]
        counted = None  # known here, so the device is asked nothing
        if not all(shard.is_first_replica for shard in held):
            counted = torch.cat(
                [x.new_full((width,), float(shard.is_first_replica)) for width, shard in zip(widths, held, strict=True)]
            )
        sizes = widths if self._splits_fused_matrix(spec) else [sum(widths)]
        lengths = (
            [part.size for part in tp_shard.segments] if self._splits_fused_matrix(spec) else [spec.shape[tp_shard.dim]]
        )
        parts = []
        masks = [None] * len(sizes) if counted is None else counted.split(sizes)
        for part, mask, length in zip(x.split(sizes, tp_shard.dim - 2), masks, lengths, strict=True):
            shape = (length, spec.shape[1]) if tp_shard.dim == 0 else (spec.shape[0], length)
            wide = part.mT if tp_shard.dim == 0 else part
            wide = orthogonalize_distributed(wide, self.iteration, axis, mask)
            parts.append(self._scale_update(wide.mT if tp_shard.dim == 0 else wide, shape))
        return torch.cat(parts, tp_shard.dim - 2)

    def _scale_update(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Multiply an update by the factor of `--muon-scale-mode` for a matrix of this shape, and by the extra factor."""
        return x * (
            muon_update_scale(shape[0], shape[1], self.config.muon_scale_mode) * self.config.muon_extra_scale_factor
        )
