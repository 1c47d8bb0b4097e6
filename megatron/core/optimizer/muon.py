"""Muon: the momentum of a matrix, made orthogonal, is its update (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982).

    m <- beta m + (1 - beta) g        direction = m, or with Nesterov beta m + (1 - beta) g once more
    W <- W - lr (decay W + scale orthogonal(direction))

A matrix must be whole to be made orthogonal, and here it may be cut twice: over tensor ranks by its spec, and over data
ranks by the distributed optimizer or FSDP2. Data ranks send what they own to one of them (owners.py), and it sends the
update back. Tensor ranks gather the matrix and all work on it, or share the work (`--muon-tp-mode`). Parts of a fused
matrix and experts are matrices of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.buffers import Segment
from megatron.core.optimizer.groups import is_by_muon
from megatron.core.optimizer.orthogonal import Iteration, orthogonalize, orthogonalize_together, scale_of
from megatron.core.optimizer.owners import Slab, divided, slabs_of
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, scale_gradients
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.spec import ParamSpec, local_shards

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import Parallel


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank owns of a parameter, from element `low` of its local tensor on."""

    low: int
    main: Tensor
    momentum: Tensor


class Muon(UpdateRule):
    """The matrices of this rank's stages.

    slabs: axis of the data ranks -> what they work on, the same list on each of them.
    """

    def __init__(
        self, parallels: Sequence[Parallel], owned: Owned, mesh: Mesh, config: OptimizerConfig, *, dtype: torch.dtype
    ) -> None:
        """dtype: of main weights, also where this rank owns none."""
        super().__init__(owned, config)
        self.mesh = mesh
        self.nothing = torch.zeros(0, dtype=dtype, device=mesh.device)
        self.how = Iteration(
            config.muon_num_ns_steps, config.muon_coefficient_type, config.muon_fp32_matmul_prec == "medium"
        )
        self.held = {segment.name: _Held(segment.low, main, torch.zeros_like(main)) for segment, main in owned}
        by_axis: dict[str, list[Slab]] = {}
        for one in (one for parallel in parallels for one in parallel.ownership() if is_by_muon(one.spec, config)):
            by_axis.setdefault(one.spec.reduce_over, []).extend(slabs_of(one, self._is_split))
        self.slabs = {axis: divided(slabs, mesh.axis(axis).size) for axis, slabs in by_axis.items()}

    @property
    def lr(self) -> float:
        """The rate of the next step; matrices have one group. On a rank that owns none it is not used."""
        return self.param_groups[0]["lr"] if self.param_groups else 0.0

    def slots(self, segment: Segment, main: Tensor) -> Iterator[Slot]:
        """The momentum."""
        yield "momentum_buffer", segment, self.held[segment.name].momentum

    def step(self, factor: float | Tensor) -> None:
        """Update the main weights. All ranks that share matrices step together, also those that own none."""
        scale_gradients([held.main for held in self.held.values()], factor)
        directions = {name: self._direction(held) for name, held in self.held.items()}
        for settings in self.param_groups:
            torch._foreach_mul_(settings["params"], 1.0 - settings["lr"] * settings["weight_decay"])
        for name, slabs in self.slabs.items():
            for turn in range(max(slab.turn for slab in slabs) + 1):
                self._turn([slab for slab in slabs if slab.turn == turn], directions, self.mesh.axis(name))

    def _direction(self, held: _Held) -> Tensor:
        """The momentum with the newest gradient in it, of what this rank owns."""
        gradient, beta = held.main.grad, self.config.muon_momentum
        assert gradient is not None, "the gradients of all main weights are attached"
        held.momentum.lerp_(gradient, 1.0 - beta)
        return gradient.lerp_(held.momentum, beta) if self.config.muon_nesterov else held.momentum

    def _turn(self, slabs: Sequence[Slab], directions: Mapping[str, Tensor], axis: Axis) -> None:
        """Update some slabs: those that no rank holds whole by their owners, all others by each rank for itself."""
        whole = [slab for slab in slabs if not slab.is_shared_out]
        flats = [self._local(slab, directions, 0, slab.high - slab.low) for slab in whole]
        for slab, update in zip(whole, self._updates(whole, flats), strict=True):
            self._apply(slab, update, 0)
        if len(whole) < len(slabs):
            away = sorted((slab for slab in slabs if slab.is_shared_out), key=lambda slab: slab.owner)
            self._turn_by_owners(away, directions, axis)

    def _turn_by_owners(self, away: Sequence[Slab], directions: Mapping[str, Tensor], axis: Axis) -> None:
        """Send slabs to their owners, update them there, and send the updates back. away: sorted by owner."""
        mine = [slab for slab in away if slab.owner == axis.rank]
        sent = [slab.ranges[axis.rank] for slab in away]
        out = _sizes(away, [high - low for low, high in sent], axis.size)
        back = [sum(slab.ranges[rank][1] - slab.ranges[rank][0] for slab in mine) for rank in range(axis.size)]
        leaving = [
            self._local(slab, directions, low, high) for slab, (low, high) in zip(away, sent, strict=True) if low < high
        ]
        coming, work = collectives.start_exchange(torch.cat([self.nothing, *leaving]), out, back, axis)
        collectives.wait(work)
        updates = _returned(self._updates(mine, _assembled(mine, coming, axis.size)), mine, axis.size, self.nothing)
        coming, work = collectives.start_exchange(updates, back, out, axis)
        collectives.wait(work)
        for slab, (low, high), update in zip(away, sent, coming.split([high - low for low, high in sent]), strict=True):
            self._apply(slab, update, low)

    def _local(self, slab: Slab, directions: Mapping[str, Tensor], low: int, high: int) -> Tensor:
        start = slab.low - self.held[slab.name].low
        return directions[slab.name][start + low : start + high]

    def _apply(self, slab: Slab, update: Tensor, low: int) -> None:
        """Move this rank's elements of a slab, from `low` on, by an update."""
        if update.numel():
            start = slab.low - self.held[slab.name].low + low
            self.held[slab.name].main[start : start + update.numel()].add_(update, alpha=-self.lr)

    def _is_split(self, spec: ParamSpec) -> bool:
        return self.config.muon_split_qkv or "linear_qkv" not in spec.name

    def _updates(self, slabs: Sequence[Slab], flats: Sequence[Tensor]) -> list[Tensor]:
        """The scaled orthogonal factors of slabs, flat. Those of one shape, such as experts, are worked on together."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for place, slab in enumerate(slabs):
            alike.setdefault((slab.spec.shape, slab.spec.shards, slab.shape, self._is_split(slab.spec)), []).append(
                place
            )
        updates: list[Tensor] = list(flats)
        for places in alike.values():
            stack = torch.stack([flats[place].view(slabs[place].shape) for place in places])
            for place, update in zip(places, self._matrices(stack, slabs[places[0]].spec), strict=True):
                updates[place] = update.reshape(-1)
        return updates

    def _matrices(self, x: Tensor, spec: ParamSpec) -> Tensor:
        """What this rank holds of some matrices of one spec, made orthogonal and scaled. x: [k, rows, columns], as is returned."""
        cut = spec.shards[0] if spec.shards else None
        if cut is None:
            return self._scaled(orthogonalize(x, self.how), spec.shape)
        axis, split, dim = self.mesh.axis(cut.axis), self._is_split(spec), cut.dim - 2
        if self.config.muon_tp_mode == "blockwise":
            sizes = [part.local_size(axis.size) for part in cut.parts] if split else [x.shape[dim]]
            return torch.cat(
                [self._scaled(orthogonalize(block, self.how), block.shape[1:]) for block in x.split(sizes, dim)], dim
            )
        if self.config.muon_tp_mode == "distributed":
            return self._together(x, spec, axis)
        held = collectives.all_gather(x[None], axis)
        whole = x.new_empty((len(x), *spec.shape))
        for rank in range(axis.size):
            for piece in local_shards(spec, self.mesh.with_axes({cut.axis: replace(axis, rank=rank)})):
                if piece.is_first_replica:
                    into = (slice(None), *piece.box.slices())
                    whole[into] = held[rank][(slice(None), *piece.local.slices())]
        sizes = [part.size for part in cut.parts] if split else [spec.shape[cut.dim]]
        whole = torch.cat(
            [self._scaled(orthogonalize(part, self.how), part.shape[1:]) for part in whole.split(sizes, dim)], dim
        )
        local = torch.zeros_like(x)
        for piece in local_shards(spec, self.mesh):
            local[(slice(None), *piece.local.slices())] = whole[(slice(None), *piece.box.slices())]
        return local

    def _together(self, x: Tensor, spec: ParamSpec, axis: Axis) -> Tensor:
        """The same by all tensor ranks together, of which none sees the others' pieces."""
        cut = spec.shards[0]
        held = local_shards(spec, self.mesh)
        counted = torch.cat(
            [
                torch.full((piece.local.shape[cut.dim],), float(piece.is_first_replica), dtype=x.dtype, device=x.device)
                for piece in held
            ]
        )
        sizes = [piece.local.shape[cut.dim] for piece in held] if self._is_split(spec) else [len(counted)]
        lengths = [part.size for part in cut.parts] if self._is_split(spec) else [spec.shape[cut.dim]]
        parts = []
        for part, mask, length in zip(x.split(sizes, cut.dim - 2), counted.split(sizes), lengths, strict=True):
            shape = (length, spec.shape[1]) if cut.dim == 0 else (spec.shape[0], length)
            wide = part.mT if cut.dim == 0 else part
            wide = orthogonalize_together(wide, self.how, axis, None if bool(mask.all()) else mask)
            parts.append(self._scaled(wide.mT if cut.dim == 0 else wide, shape))
        return torch.cat(parts, cut.dim - 2)

    def _scaled(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x * (scale_of(shape[0], shape[1], self.config.muon_scale_mode) * self.config.muon_extra_scale_factor)


def _sizes(slabs: Sequence[Slab], elements: Sequence[int], ranks: int) -> list[int]:
    """How many elements go to each owner."""
    return [
        sum(size for slab, size in zip(slabs, elements, strict=True) if slab.owner == rank) for rank in range(ranks)
    ]


def _assembled(slabs: Sequence[Slab], coming: Tensor, ranks: int) -> list[Tensor]:
    """Whole slabs, flat, from what all ranks sent, by sender and then by slab."""
    whole = [coming.new_empty(slab.high - slab.low) for slab in slabs]
    start = 0
    for rank in range(ranks):
        for slab, flat in zip(slabs, whole, strict=True):
            low, high = slab.ranges[rank]
            flat[low:high] = coming[start : start + high - low]
            start += high - low
    return whole


def _returned(updates: Sequence[Tensor], slabs: Sequence[Slab], ranks: int, nothing: Tensor) -> Tensor:
    """The updates of whole slabs, by receiver and then by slab."""
    return torch.cat(
        [
            nothing,
            *(
                update[slab.ranges[rank][0] : slab.ranges[rank][1]]
                for rank in range(ranks)
                for slab, update in zip(slabs, updates, strict=True)
            ),
        ]
    )
