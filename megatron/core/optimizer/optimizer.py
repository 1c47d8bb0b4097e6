"""One optimizer step over the segments that this rank owns.

The same code serves plain data parallelism (every rank owns everything), ZeRO-1 (every rank owns a range of each
bucket) and FSDP2 (every rank owns rows of each parameter): it sees a list of segments. Half-precision weights have fp32
main weights; fp32 and fp64 weights are their own main weights. An `UpdateRule` (rule.py) turns gradients into new
weights; `UPDATE_RULES` names them:

    --optimizer muon, matrices of layers           Muon               muon.py
    --optimizer soap, matrices of layers           Soap               soap.py
    --optimizer adafactor                          Adafactor          adafactor.py
    --use-precision-aware-optimizer                LowPrecisionAdam   low_precision.py, state_formats.py
    otherwise                                      AdamW, SGD, Lion   elementwise.py
    with --optimizer-cpu-offload                   the same rule for a part of the segments, on the CPU   offload.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.kernels.ops.adamw import AdamKernel, adamw, copy_tensor_pairs
from megatron.core.optimizer.adafactor import Adafactor
from megatron.core.optimizer.clip import count_zeros, global_norm
from megatron.core.optimizer.elementwise import SGD, AdamW, Lion
from megatron.core.optimizer.low_precision import LowPrecisionAdam
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.offload import OptimizerCpuOffload, split_segments_for_offload
from megatron.core.optimizer.rule import Slot, UpdateRule, UpdateRuleContext, is_updated_as_matrix
from megatron.core.optimizer.scaler import LossScaler
from megatron.core.optimizer.soap import Soap
from megatron.core.parallel.device import storage_id_and_offset
from megatron.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import Parallel

UPDATE_RULES: Mapping[str, type[UpdateRule]] = {
    "adam": AdamW,
    "sgd": SGD,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
    "soap": Soap,
}


def update_rule_named(name: str, precision: PrecisionConfig) -> type[UpdateRule]:
    """Return the class of an update rule; with state in low precision, that of AdamW is another."""
    return LowPrecisionAdam if precision.use_precision_aware_optimizer and name == "adam" else UPDATE_RULES[name]


@dataclass(frozen=True, slots=True)
class OptimizerStepResult:
    """The result of a step.

    norm: of the unscaled gradient before clipping, []. stepped: whether weights were updated. zeros: zero elements.
    """

    norm: Tensor
    stepped: bool
    zeros: Tensor | None = None


class Optimizer:
    """The optimizer of all stages of this rank, over the segments that it owns.

    main_weights: one for each segment, flat: fp32 beside half-precision weights, else the weights themselves. rules:
    the update rules, of the same kinds in the same order on all ranks; rule_of: the rule of each segment.
    """

    def __init__(
        self,
        parallels: Sequence[Parallel],
        mesh: Mesh,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        *,
        adamw: AdamKernel = adamw,
        offloads: bool = False,
    ) -> None:
        """Allocate the state. adamw: the kernel of AdamW on the device. offloads: a share of the state to the CPU's memory."""
        self.parallels, self.mesh, self.config = parallels, mesh, config
        self.segments = [segment for parallel in parallels for segment in parallel.owned_segments()]
        self.scaler = LossScaler(precision)
        self.fp16 = precision.fp16
        self.cpu_offload = None
        if offloads:
            self.segments, num_offloaded = split_segments_for_offload(self.segments, config.optimizer_offload_fraction)
            self.cpu_offload = OptimizerCpuOffload(mesh.device, self.segments[:num_offloaded], config)
        self.main_weights = list(self.cpu_offload.main_weights) if self.cpu_offload is not None else []
        self.on_device = slice(len(self.main_weights), None)  # segments that are not offloaded
        separate = not precision.use_precision_aware_optimizer
        self.main_weights += [_main_weight(segment, separate=separate) for segment in self.segments[self.on_device]]
        context = UpdateRuleContext(parallels, mesh, precision, adamw)
        rule_numbers = [0 if is_updated_as_matrix(segment.spec, config) else -1 for segment in self.segments]
        self.rules: list[UpdateRule] = []
        for name, number in zip(config.update_rules, (0, -1) if config.updates_whole_matrices else (-1,), strict=True):
            of_rule = [
                (segment, main)
                for segment, main, updated_by in zip(self.segments, self.main_weights, rule_numbers, strict=True)
                if updated_by == number
            ]
            self.rules.append(update_rule_named(name, precision)(of_rule, config, context))
        self.rule_of = [self.rules[number] for number in rule_numbers]

    def set_rates(self, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> None:
        """Set learning rate and weight decay of the next step. decoupled_lr: of embedding and output layer; None: `lr`."""
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
    ) -> OptimizerStepResult:
        """Clip the gradients, which are summed over all ranks, and update the weights. Collective.

        multiplier: a factor that the gradients still lack beside the loss scale. count_zero_elements: set `zeros` of
        the result. row_factors: parameter name -> factors [rows] for this rank's rows of the parameter after the
        update. accepts: whether to use a gradient of this norm; None: always. The weights stay unchanged if an fp16 run
        overflowed, which all ranks see in the norm, or if the gradient is not accepted.
        """
        unscale = multiplier / self.scaler.scale
        norm = global_norm(self.segments, self.mesh) * unscale
        overflow = self.fp16 and not bool(torch.isfinite(norm))
        self.scaler.update(overflow)
        zeros = count_zeros(self.segments, self.mesh) if count_zero_elements else None
        if overflow or (accepts is not None and not accepts(norm)):
            return OptimizerStepResult(norm, False, zeros)
        if self.config.clip_grad > 0:
            unscale = unscale * torch.clamp(self.config.clip_grad / (norm + 1e-6), max=1.0)
        self._apply_update_rules(unscale)
        self._scale_weight_rows(row_factors or {})
        self._write_weights()
        return OptimizerStepResult(norm, True, zeros)

    def _apply_update_rules(self, factor: float | Tensor) -> None:
        """Update the main weights by the gradients times `factor`, on the device and, if offloaded, on the CPU."""
        if self.cpu_offload is not None:  # allowed with elementwise rules only
            self.cpu_offload.step(self.rules[-1], factor, lambda: self._update_on_device(factor))
        else:
            self._update_on_device(factor)

    def _update_on_device(self, factor: float | Tensor) -> None:
        """Attach the gradients to the main weights that are not offloaded, run the update rules, and detach them."""
        attached = [
            (main, segment)
            for main, segment, rule in zip(self.main_weights, self.segments, self.rule_of, strict=True)
            if rule.uses_main_weights
        ][self.on_device]
        for main, segment in attached:
            main.grad = segment.grad if segment.grad.dtype == main.dtype else torch.empty_like(main)
        copy_tensor_pairs(
            [
                (main.grad, segment.grad)
                for main, segment in attached
                if main.grad is not None and segment.grad.dtype != main.dtype
            ]
        )
        for rule in self.rules:
            rule.step(factor)
        for main, _ in attached:
            main.grad = None

    def _scale_weight_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply the rows of parameters in `factors` (by name), in main weights and weights."""
        for rule, segment, main in zip(self.rule_of, self.segments, self.main_weights, strict=True):
            if segment.name in factors:
                rule.scale_weight_rows(segment, main, factors[segment.name])
                if storage_id_and_offset(main) != storage_id_and_offset(segment.data):
                    segment.data.copy_(main)

    def _write_weights(self) -> None:
        """Write the main weights into the weights in their own format, and start to gather them on every rank."""
        copy_tensor_pairs(
            [
                (segment.data, main)
                for main, segment, rule in list(zip(self.main_weights, self.segments, self.rule_of, strict=True))[
                    self.on_device
                ]
                if not rule.writes_weights and storage_id_and_offset(main) != storage_id_and_offset(segment.data)
            ]
        )
        for parallel in self.parallels:
            parallel.start_gather()

    def weights_norm(self) -> Tensor:
        """Return the 2-norm of the whole network's weights, []."""
        return global_norm(self.segments, self.mesh, of="data")

    def checkpoint_state(self) -> Iterator[Slot]:
        """Yield (slot, segment, flat tensor) of all state per element: main weights ("master") and moments.

        State in a format that needs decoding is a copy; call `apply_loaded_state` after loading a checkpoint into it.
        """
        for rule, segment, main in zip(self.rule_of, self.segments, self.main_weights, strict=True):
            if rule.uses_main_weights and segment.has_half_precision_weights:
                yield "master", segment, main
            yield from rule.checkpoint_state(segment, main)

    def apply_loaded_state(self, loaded: Sequence[Slot]) -> None:
        """Adopt the values that a checkpoint was loaded into: the weights and the tensors of `checkpoint_state`."""
        if self.cpu_offload is not None:
            self.cpu_offload.copy_loaded_weights()
        for rule in self.rules:
            rule.apply_loaded_state(loaded)

    def storage_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that store main weights and moments (any shape), for counting bytes."""
        for rule, segment, main in zip(self.rule_of, self.segments, self.main_weights, strict=True):
            if rule.uses_main_weights and segment.has_half_precision_weights:
                yield main
            yield from rule.storage_tensors(segment, main)

    @property
    def num_steps(self) -> int:
        """Number of updates so far (for Adam's bias correction)."""
        return max(rule.steps for rule in self.rules)

    def load_num_steps(self, steps: int) -> None:
        """Continue counting from `steps`."""
        for rule in self.rules:
            rule.steps = steps


def _main_weight(segment: OwnedSegment, *, separate: bool) -> Tensor:
    """Return what a rule updates: an fp32 copy of half-precision weights if `separate`, else the weights."""
    return (
        segment.data.float() if separate and segment.data.dtype not in (torch.float32, torch.float64) else segment.data
    )
