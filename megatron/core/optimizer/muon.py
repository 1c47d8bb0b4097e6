"""Muon: the update of a matrix is its orthogonalized momentum (Jordan et al., 2024; Liu et al., 2025, arXiv
2502.16982).

    m <- beta m + (1 - beta) g        direction = m, or with Nesterov beta m + (1 - beta) g once more
    W <- W - lr (decay W + scale orthogonal(direction))

Orthogonalization needs the whole matrix, which may be sharded over tensor ranks, and over data-parallel ranks by the
distributed optimizer or FSDP2. Data-parallel ranks send their parts to one owner (owners.py), which sends the update
back. Tensor ranks gather the matrix and all orthogonalize it, or share the computation (`--muon-tp-mode`). The segments
of a fused matrix and experts are separate matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.optimizer.orthogonal import (
    NewtonSchulzSettings,
    muon_update_scale,
    orthogonalize,
    orthogonalize_distributed,
)
from megatron.core.optimizer.owners import MuonTask, assign_muon_owners, muon_tasks_of_param
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, UpdateRuleContext, is_updated_by_muon, scale_gradients
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.spec import ParamSpec, local_shard_boxes


@dataclass(frozen=True, slots=True)
class _OwnedMuonState:
    """The part of a parameter that this rank owns, from element `low` of its local tensor on."""

    low: int
    main: Tensor
    momentum: Tensor


class Muon(UpdateRule):
    """Muon for the matrices of this rank's stages.

    owned_parts: by parameter name. tasks: data-parallel axis -> matrices with their owners, equal on its ranks.
    """

    slots = ("momentum_buffer",)

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        """Assign the matrices to owners."""
        super().__init__(owned, config, context)
        self.mesh = mesh = context.mesh
        self.nothing = torch.zeros(0, dtype=context.main_dtype, device=mesh.device)
        self.iteration = NewtonSchulzSettings(
            config.muon_num_ns_steps, config.muon_coefficient_type, config.muon_fp32_matmul_prec == "medium"
        )
        self.owned_parts = {
            segment.name: _OwnedMuonState(segment.low, main, torch.zeros_like(main)) for segment, main in owned
        }
        by_axis: dict[str, list[MuonTask]] = {}
        for one in (
            one
            for parallel in context.parallels
            for one in parallel.param_ownership()
            if is_updated_by_muon(one.spec, config)
        ):
            by_axis.setdefault(one.spec.reduce_over, []).extend(muon_tasks_of_param(one, self._splits_fused_matrix))
        self.tasks = {axis: assign_muon_owners(tasks, mesh.axis(axis).size) for axis, tasks in by_axis.items()}

    @property
    def lr(self) -> float:
        """The learning rate of the next step; all matrices are one group. Unused on a rank that owns none."""
        return self.param_groups[0]["lr"] if self.param_groups else 0.0

    def checkpoint_state(self, segment: OwnedSegment, main: Tensor) -> Iterator[Slot]:
        """Yield the momentum [elements] of a segment."""
        yield "momentum_buffer", segment, self.owned_parts[segment.name].momentum

    def step(self, factor: float | Tensor) -> None:
        """Update the main weights by their gradients times `factor`, a scalar.

        Collective: all ranks that share matrices take part, also those that own none.
        """
        scale_gradients([owned_part.main for owned_part in self.owned_parts.values()], factor)
        directions = {name: self._momentum_direction(owned_part) for name, owned_part in self.owned_parts.items()}
        for settings in self.param_groups:
            torch._foreach_mul_(settings["params"], 1.0 - settings["lr"] * settings["weight_decay"])
        for name, tasks in self.tasks.items():
            for round_index in range(max(task.round_index for task in tasks) + 1):
                self._update_round(
                    [task for task in tasks if task.round_index == round_index], directions, self.mesh.axis(name)
                )

    def _momentum_direction(self, owned_part: _OwnedMuonState) -> Tensor:
        """Update the momentum by the gradient and return the update direction of the owned elements, flat."""
        gradient, beta = owned_part.main.grad, self.config.muon_momentum
        assert gradient is not None, "the gradients of all main weights are attached"
        owned_part.momentum.lerp_(gradient, 1.0 - beta)
        return gradient.lerp_(owned_part.momentum, beta) if self.config.muon_nesterov else owned_part.momentum

    def _update_round(self, tasks: Sequence[MuonTask], directions: Mapping[str, Tensor], axis: Axis) -> None:
        """Update the matrices of one round: sharded ones by their owners, all others by every rank for itself."""
        whole = [task for task in tasks if not task.is_sharded]
        flats = [self._direction_slice(task, directions, 0, task.high - task.low) for task in whole]
        for task, update in zip(whole, self._orthogonalized_updates(whole, flats), strict=True):
            self._apply_update(task, update, 0)
        if len(whole) < len(tasks):
            sharded = sorted((task for task in tasks if task.is_sharded), key=lambda task: task.owner)
            self._update_by_owners(sharded, directions, axis)

    def _update_by_owners(self, sharded: Sequence[MuonTask], directions: Mapping[str, Tensor], axis: Axis) -> None:
        """Send the directions of sharded matrices, sorted by owner, to their owners, which send the updates back."""
        own_tasks = [task for task in sharded if task.owner == axis.rank]
        sent = [task.ranges[axis.rank] for task in sharded]
        sizes = [high - low for low, high in sent]
        out = [
            sum(size for task, size in zip(sharded, sizes, strict=True) if task.owner == rank)
            for rank in range(axis.size)
        ]
        back = [sum(task.ranges[rank][1] - task.ranges[rank][0] for task in own_tasks) for rank in range(axis.size)]
        outgoing = [
            self._direction_slice(task, directions, low, high)
            for task, (low, high) in zip(sharded, sent, strict=True)
            if low < high
        ]
        received, work = collectives.start_all_to_all(torch.cat([self.nothing, *outgoing]), out, back, axis)
        collectives.wait(work)
        updates = _pack_send_buffer(
            self._orthogonalized_updates(own_tasks, _assemble_matrices(own_tasks, received, axis.size)),
            own_tasks,
            axis.size,
            self.nothing,
        )
        received, work = collectives.start_all_to_all(updates, back, out, axis)
        collectives.wait(work)
        for task, (low, _), update in zip(sharded, sent, received.split(sizes), strict=True):
            self._apply_update(task, update, low)

    def _direction_slice(self, task: MuonTask, directions: Mapping[str, Tensor], low: int, high: int) -> Tensor:
        """Return elements [low, high) of a matrix's direction, which this rank owns. directions: by parameter name."""
        start = task.low - self.owned_parts[task.name].low
        return directions[task.name][start + low : start + high]

    def _apply_update(self, task: MuonTask, update: Tensor, low: int) -> None:
        """Subtract an update from this rank's elements of a matrix, from element `low` on."""
        if update.numel():
            start = task.low - self.owned_parts[task.name].low + low
            self.owned_parts[task.name].main[start : start + update.numel()].add_(update, alpha=-self.lr)

    def _splits_fused_matrix(self, spec: ParamSpec) -> bool:
        """Return whether the segments of a fused matrix are orthogonalized separately (for qkv: --muon-split-qkv)."""
        return self.config.muon_split_qkv or "linear_qkv" not in spec.name

    def _orthogonalized_updates(self, tasks: Sequence[MuonTask], flats: Sequence[Tensor]) -> list[Tensor]:
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
        held = collectives.all_gather(x[None], axis)
        whole = x.new_empty((len(x), *spec.shape))
        for rank in range(axis.size):
            for shard in local_shard_boxes(spec, self.mesh.with_axes({tp_shard.axis: replace(axis, rank=rank)})):
                if shard.is_first_replica:
                    into = (slice(None), *shard.box.slices())
                    whole[into] = held[rank][(slice(None), *shard.local.slices())]
        sizes = [part.size for part in tp_shard.segments] if split else [spec.shape[tp_shard.dim]]
        whole = self._orthogonalize_split(whole, sizes, dim)
        local = torch.zeros_like(x)
        for shard in local_shard_boxes(spec, self.mesh):
            local[(slice(None), *shard.local.slices())] = whole[(slice(None), *shard.box.slices())]
        return local

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


def _assemble_matrices(tasks: Sequence[MuonTask], received: Tensor, ranks: int) -> list[Tensor]:
    """Return whole matrices, flat, from the received parts, which are ordered by sender and then by task."""
    whole = [received.new_empty(task.high - task.low) for task in tasks]
    start = 0
    for rank in range(ranks):
        for task, flat in zip(tasks, whole, strict=True):
            low, high = task.ranges[rank]
            flat[low:high] = received[start : start + high - low]
            start += high - low
    return whole


def _pack_send_buffer(updates: Sequence[Tensor], tasks: Sequence[MuonTask], ranks: int, nothing: Tensor) -> Tensor:
    """Concatenate what goes to each rank of the updates of whole matrices, ordered by receiver and then by task: the
    send buffer of an all-to-all. nothing: an empty tensor of the dtype.
    """
    return torch.cat(
        [
            nothing,
            *(
                update[task.ranges[rank][0] : task.ranges[rank][1]]
                for rank in range(ranks)
                for task, update in zip(tasks, updates, strict=True)
            ),
        ]
    )
