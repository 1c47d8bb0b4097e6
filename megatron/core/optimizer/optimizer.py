"""One optimizer step over what this rank owns.

The same code serves plain data parallelism (every rank owns everything), ZeRO-1 (every rank owns a range of each
bucket) and FSDP2 (every rank owns rows of each parameter): it sees a list of segments. Half-precision weights have fp32
masters; wide weights are their own masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.buffers import Segment
from megatron.core.distributed.finalize import finalize
from megatron.core.distributed.fsdp import Parallel
from megatron.core.optimizer.clip import count_zeros, global_norm
from megatron.core.optimizer.groups import Group, group_of
from megatron.core.optimizer.scaler import LossScaler
from megatron.core.parallel.boxes import flat
from megatron.core.parallel.device import memory_of
from megatron.core.parallel.mesh import Mesh

_SLOTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True, slots=True)
class StepResult:
    """norm: of the unscaled gradient before clipping. stepped: whether weights moved."""

    norm: Tensor
    stepped: bool
    zeros: Tensor | None = None


class Optimizer:
    """AdamW or SGD over the owned segments of all stages of this rank."""

    def __init__(self, parallels: Sequence[Parallel], mesh: Mesh, config: OptimizerConfig, precision: PrecisionConfig,
                 *, sharded: bool) -> None:
        self.parallels, self.mesh, self.config, self.sharded = parallels, mesh, config, sharded
        self.segments = [segment for parallel in parallels for segment in parallel.segments()]
        self.scaler = LossScaler(precision)
        self.fp16 = precision.fp16
        self.masters = [s.data if s.data.dtype in (torch.float32, torch.float64) else s.data.float() for s in self.segments]
        grouped: dict[Group, list[Tensor]] = {}
        for segment, master in zip(self.segments, self.masters, strict=True):
            grouped.setdefault(group_of(segment.spec, config), []).append(master)
        self.groups = sorted(grouped)
        self.inner = self._make_inner([{"params": grouped[group]} for group in self.groups]) if grouped else None

    def _make_inner(self, groups: list[dict[str, list[Tensor]]]) -> torch.optim.Optimizer:
        if self.config.optimizer == "adam":
            betas = (self.config.adam_beta1, self.config.adam_beta2)
            inner: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=self.config.adam_eps, fused=True)
        else:
            inner = torch.optim.SGD(groups, lr=0.0, momentum=self.config.sgd_momentum, foreach=True)
        for master in self.masters:  # state is there from the start, so that any checkpoint holds all of it
            slots = {slot: torch.zeros_like(master) for slot in _SLOTS[self.config.optimizer]}
            if self.config.optimizer == "adam":
                slots["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            inner.state[master] = slots
        return inner

    def set_rates(self, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> None:
        """Rates of the next step. decoupled_lr: of the embedding and output layer."""
        for group, settings in zip(self.groups, self.inner.param_groups if self.inner else (), strict=True):
            settings["lr"] = decoupled_lr if group.decoupled and decoupled_lr is not None else lr
            settings["weight_decay"] = weight_decay if group.decays else 0.0

    @torch.no_grad()
    def step(self, *, multiplier: float | Tensor = 1.0, count_zero_elements: bool = False,
             row_factors: Mapping[str, Tensor] | None = None, accepts: Callable[[Tensor], bool] = lambda norm: True) -> StepResult:
        """Sum what layouts ask for, clip, and update, once gradients are reduced.

        multiplier: what the gradients still lack beside the loss scale. row_factors: global name -> what the rows of a
        parameter that this rank holds are multiplied by after the update, [rows]. accepts: whether a gradient of this norm is
        to be used. An overflow of an fp16 run, seen by all ranks in the norm, leaves the weights as they are, and so does a
        gradient that is not accepted.
        """
        finalize(self.segments, self.mesh)
        unscale = multiplier / self.scaler.scale
        norm = global_norm(self.segments, self.mesh, sharded=self.sharded) * unscale
        overflow = self.fp16 and not bool(torch.isfinite(norm))
        self.scaler.update(overflow)
        zeros = count_zeros(self.segments, self.mesh, sharded=self.sharded) if count_zero_elements else None
        if overflow or not accepts(norm):
            return StepResult(norm, False, zeros)
        if self.config.clip_grad > 0:
            unscale = unscale * torch.clamp(self.config.clip_grad / (norm + 1e-6), max=1.0)
        self._update(unscale)
        self._scale_rows(row_factors or {})
        self._publish()
        return StepResult(norm, True, zeros)

    def _update(self, factor: float | Tensor) -> None:
        for master, segment in zip(self.masters, self.segments, strict=True):
            master.grad = segment.grad if segment.grad.dtype == master.dtype else segment.grad.to(master.dtype)
        if self.masters:
            factor = factor.to(self.masters[0].dtype) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_([master.grad for master in self.masters], factor)
        if self.inner is not None:
            self.inner.step()
        for master in self.masters:
            master.grad = None

    def _scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        for master, segment in zip(self.masters, self.segments, strict=True):
            if segment.name in factors:
                for box, start, stop in flat(segment.local_shape, segment.low, segment.high):
                    rows = factors[segment.name].narrow(0, box.offset[0], box.shape[0])
                    master[start - segment.low:stop - segment.low].view(box.shape[0], -1).mul_(rows.to(master.dtype)[:, None])

    def _publish(self) -> None:
        """The new weights in their own format, on every rank."""
        for master, segment in zip(self.masters, self.segments, strict=True):
            if memory_of(master) != memory_of(segment.data):
                segment.data.copy_(master)
        for parallel in self.parallels:
            parallel.start_gather()

    def weights_norm(self) -> Tensor:
        """The 2-norm of the whole network's weights."""
        return global_norm(self.segments, self.mesh, sharded=self.sharded, of="data")

    def slots(self) -> Iterator[tuple[str, Segment, Tensor]]:
        """(slot, segment, flat tensor) of everything kept per element: masters and moments."""
        for master, segment in zip(self.masters, self.segments, strict=True):
            if memory_of(master) != memory_of(segment.data) or segment.rounds_to is not None:
                yield "master", segment, master
            for slot in _SLOTS[self.config.optimizer]:
                yield slot, segment, self.inner.state[master][slot]

    @property
    def num_steps(self) -> int:
        """Updates done so far (Adam's bias correction counts them)."""
        if self.inner is None or self.config.optimizer != "adam" or not self.masters:
            return 0
        return int(self.inner.state[self.masters[0]]["step"])

    def load_num_steps(self, steps: int) -> None:
        """Continue counting from `steps`."""
        if self.config.optimizer == "adam":
            for master in self.masters:
                self.inner.state[master]["step"].fill_(steps)
