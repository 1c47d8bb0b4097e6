"""One optimizer step over what this rank owns.

The same code serves plain data parallelism (every rank owns everything), ZeRO-1 (every rank owns a range of each
bucket) and FSDP2 (every rank owns rows of each parameter): it sees a list of segments. Half-precision weights have fp32
main weights; fp32 and fp64 weights are their own main weights. What turns gradients into new weights is an `UpdateRule` (rule.py).

    segment --matrix of a layer, --optimizer muon--> Muon             muon.py
            --else--> AdamW, SGD, Lion                                elementwise.py
            --else, --optimizer adafactor--> Adafactor                adafactor.py
            --else, --use-precision-aware-optimizer--> LowPrecisionAdam     low_precision.py, formats.py
            --of these, --optimizer-cpu-offload--> the same, where the CPU's memory is   offload.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.buffers import Segment
from megatron.core.distributed.finalize import finalize
from megatron.core.optimizer.adafactor import Adafactor
from megatron.core.optimizer.clip import count_zeros, global_norm
from megatron.core.optimizer.elementwise import RULES
from megatron.core.optimizer.groups import is_by_muon
from megatron.core.optimizer.low_precision import LowPrecisionAdam
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.offload import Host, divided
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule
from megatron.core.optimizer.scaler import LossScaler
from megatron.core.parallel.device import has_own_memory, memory_of
from megatron.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import Parallel


@dataclass(frozen=True, slots=True)
class StepResult:
    """norm: of the unscaled gradient before clipping. stepped: whether weights moved."""

    norm: Tensor
    stepped: bool
    zeros: Tensor | None = None


class Optimizer:
    """The update of all stages of this rank, over the segments that it owns.

    main_weights: of each segment, flat: fp32 beside half-precision weights, else the weights themselves. rules: what updates them, the
    same kinds in the same order on all ranks; rule_of: the rule of each segment.
    """

    def __init__(
        self,
        parallels: Sequence[Parallel],
        mesh: Mesh,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        *,
        sharded: bool,
    ) -> None:
        self.parallels, self.mesh, self.config, self.sharded = parallels, mesh, config, sharded
        self.segments = [segment for parallel in parallels for segment in parallel.segments()]
        self.scaler = LossScaler(precision)
        self.fp16 = precision.fp16
        self.host = None
        if config.optimizer_cpu_offload and has_own_memory(mesh.device):  # on a CPU, there is no other place
            self.segments, away = divided(self.segments, config.optimizer_offload_fraction)
            self.host = Host(mesh.device, self.segments[:away], config)
        self.main_weights = list(self.host.main_weights) if self.host is not None else []
        self.here = slice(len(self.main_weights), None)  # segments that are updated where their weights are
        separate = not precision.use_precision_aware_optimizer
        self.main_weights += [_main_weight(segment, separate=separate) for segment in self.segments[self.here]]
        by_muon, others = self._divided()
        dtype = torch.float64 if precision.fp64 else torch.float32
        self.rules: list[UpdateRule] = [Muon(parallels, by_muon, mesh, config, dtype=dtype)] if config.is_muon else []
        if config.optimizer == "adafactor":
            self.rules.append(Adafactor(parallels, others, mesh, config, dtype=dtype))
        elif precision.use_precision_aware_optimizer:
            self.rules.append(LowPrecisionAdam(others, config, precision))
        else:
            self.rules.append(RULES[config.elementwise](others, config))
        self.rule_of = [self.rules[0 if is_by_muon(one.spec, config) else -1] for one in self.segments]

    def _divided(self) -> tuple[Owned, Owned]:
        """The segments with their main weights: those that Muon updates, and the others."""
        owned = list(zip(self.segments, self.main_weights, strict=True))
        by_muon = [(segment, main) for segment, main in owned if is_by_muon(segment.spec, self.config)]
        return by_muon, [(segment, main) for segment, main in owned if not is_by_muon(segment.spec, self.config)]

    def set_rates(self, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> None:
        """Rates of the next step. decoupled_lr: of the embedding and output layer."""
        for rule in self.rules:
            rule.set_rates(lr, weight_decay, decoupled_lr)

    @torch.no_grad()
    def step(
        self,
        *,
        multiplier: float | Tensor = 1.0,
        count_zero_elements: bool = False,
        row_factors: Mapping[str, Tensor] | None = None,
        accepts: Callable[[Tensor], bool] | None = None,
    ) -> StepResult:
        """Sum what layouts ask for, clip, and update, once gradients are reduced.

        multiplier: what the gradients still lack beside the loss scale. row_factors: global name -> what the rows of a
        parameter that this rank holds are multiplied by after the update, [rows]. accepts: whether a gradient of this norm is
        to be used; None: always. An overflow of an fp16 run, seen by all ranks in the norm, leaves the weights as they are, and so does a
        gradient that is not accepted.
        """
        finalize(self.segments, self.mesh)
        unscale = multiplier / self.scaler.scale
        norm = global_norm(self.segments, self.mesh, sharded=self.sharded) * unscale
        overflow = self.fp16 and not bool(torch.isfinite(norm))
        self.scaler.update(overflow)
        zeros = count_zeros(self.segments, self.mesh, sharded=self.sharded) if count_zero_elements else None
        if overflow or (accepts is not None and not accepts(norm)):
            return StepResult(norm, False, zeros)
        if self.config.clip_grad > 0:
            unscale = unscale * torch.clamp(self.config.clip_grad / (norm + 1e-6), max=1.0)
        self._update(unscale)
        self._scale_rows(row_factors or {})
        self._publish()
        return StepResult(norm, True, zeros)

    def _update(self, factor: float | Tensor) -> None:
        if self.host is not None:  # which rules that are not elementwise cannot use
            self.host.step(self.rules[-1], factor, lambda: self._update_here(factor))
        else:
            self._update_here(factor)

    def _update_here(self, factor: float | Tensor) -> None:
        attached = [
            (main, segment)
            for main, segment, rule in zip(self.main_weights, self.segments, self.rule_of, strict=True)
            if rule.uses_main_weights
        ][self.here]
        for main, segment in attached:
            main.grad = segment.grad if segment.grad.dtype == main.dtype else segment.grad.to(main.dtype)
        for rule in self.rules:
            rule.step(factor)
        for main, _ in attached:
            main.grad = None

    def _scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        for rule, segment, main in zip(self.rule_of, self.segments, self.main_weights, strict=True):
            if segment.name in factors:
                rule.scale_rows(segment, main, factors[segment.name])
                if self.host is not None:
                    segment.data.copy_(main)

    def _publish(self) -> None:
        """The new weights in their own format, on every rank."""
        for main, segment in zip(self.main_weights[self.here], self.segments[self.here], strict=True):
            if memory_of(main) != memory_of(segment.data):
                segment.data.copy_(main)
        for parallel in self.parallels:
            parallel.start_gather()

    def weights_norm(self) -> Tensor:
        """The 2-norm of the whole network's weights."""
        return global_norm(self.segments, self.mesh, sharded=self.sharded, of="data")

    def slots(self) -> Iterator[Slot]:
        """(slot, segment, flat tensor) of everything kept per element: main weights ("master") and moments.

        What a rule stores in a format of its own is a copy; `load_slots` takes it back once it was loaded into.
        """
        for rule, segment, main in zip(self.rule_of, self.segments, self.main_weights, strict=True):
            if rule.uses_main_weights and segment.is_low_precision:
                yield "master", segment, main
            yield from rule.slots(segment, main)

    def load_slots(self, loaded: Sequence[Slot]) -> None:
        """Take over values that were written into the weights, and into what `slots` gave."""
        if self.host is not None:
            self.host.adopt()
        for rule in self.rules:
            rule.load(loaded)

    def memory(self) -> Iterator[Tensor]:
        """The tensors that main weights and moments take, as they are stored."""
        for rule, segment, main in zip(self.rule_of, self.segments, self.main_weights, strict=True):
            if rule.uses_main_weights and segment.is_low_precision:
                yield main
            yield from rule.memory(segment, main)

    @property
    def num_steps(self) -> int:
        """Updates done so far (Adam's bias correction counts them)."""
        return max(rule.steps for rule in self.rules)

    def load_num_steps(self, steps: int) -> None:
        """Continue counting from `steps`."""
        self.rules[-1].steps = steps


def _main_weight(segment: Segment, *, separate: bool) -> Tensor:
    """The weights that a rule updates: an fp32 copy of half-precision ones, if wanted `separate`."""
    return (
        segment.data.float() if separate and segment.data.dtype not in (torch.float32, torch.float64) else segment.data
    )
