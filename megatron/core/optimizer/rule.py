"""UpdateRule: the interface between the optimizer and an algorithm such as AdamW or Muon; groups of parameters.

`Optimizer` reduces, clips, and writes weights; a rule turns gradients into new main weights. To add one, derive from
`UpdateRule`, write `step` and `checkpoint_state`, and add it to `UPDATE_RULES` (docs/developer/adding.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.kernels.ops.adamw import AdamKernel
from megatron.core.parallel.boxes import boxes_of_flat_range
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import Parallel

Owned = Sequence[tuple[OwnedSegment, Tensor]]  # segments that this rank owns, with their flat main weights
Slot = tuple[str, OwnedSegment, Tensor]  # name of a state tensor, the segment that it belongs to, its values


@dataclass(frozen=True, slots=True, order=True)
class ParamGroup:
    """Settings that parameters share.

    decays: weight decay applies. decoupled: --decoupled-lr is the learning rate. ratio: multiplies the learning rate.
    """

    decays: bool
    decoupled: bool
    ratio: float = 1.0


def param_group_of(spec: ParamSpec, config: OptimizerConfig) -> ParamGroup:
    """Return the group of a parameter.

    Weight decay applies to matrices, not to biases and norms. Embeddings and the output layer may have a separate
    learning rate, as may the B factors of adapters (LoRA+, Hayou et al., 2024).
    """
    decays = spec.kind in ("matrix", "table", "embedding", "lora_a", "lora_b", "in_proj", "conv") or (
        spec.kind == "qk_norm" and config.apply_wd_to_qk_layernorm
    )
    ratio = spec.lr_ratio * (config.lora_plus_ratio if spec.kind == "lora_b" else 1.0)
    return ParamGroup(decays, spec.kind == "embedding" and config.decoupled_lr is not None, ratio)


def is_updated_as_matrix(spec: ParamSpec, config: OptimizerConfig) -> bool:
    """Return whether a rule for whole matrices updates this parameter: matrices of layers, also of experts, but no
    embeddings and other lookup tables, and no projections and convolutions of state-space mixers.
    """
    return config.updates_whole_matrices and spec.kind == "matrix"


@dataclass(frozen=True, slots=True)
class UpdateRuleContext:
    """What a rule may need beside the segments that it updates.

    parallels: of all stages of this rank; they know which ranks own the rest of a parameter. adamw: the kernel of AdamW.
    """

    parallels: Sequence[Parallel]
    mesh: Mesh
    precision: PrecisionConfig
    adamw: AdamKernel

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype of main weights, also on a rank that owns none."""
        return torch.float64 if self.precision.fp64 else torch.float32


class UpdateRule(ABC):
    """An optimizer algorithm over some of the segments that a rank owns.

    slots: names of the state tensors of a parameter, each as large as the parameter. matrix_slots: those of parameters with
    two dimensions and more, where they are others.

    param_groups: {"group": ParamGroup, "params": main weights, "lr": ..., "weight_decay": ...}; the rates are set
    before a step. uses_main_weights: gradients are attached to the main weights before `step`, which updates these;
    otherwise the rule reads and writes the segments itself. writes_weights: `step` also writes the main weights into weights of another
    format. steps: number of updates so far; 0 if a rule does not count
    them.
    """

    slots: ClassVar[tuple[str, ...]]
    matrix_slots: ClassVar[tuple[str, ...] | None] = None
    uses_main_weights = True
    writes_weights = False
    steps: int = 0

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        """Group the parameters. owned: the segments that this rule updates."""
        self.config = config
        grouped: dict[ParamGroup, list[Tensor]] = {}
        for segment, main in owned:
            grouped.setdefault(param_group_of(segment.spec, config), []).append(main)
        self.param_groups: list[dict[str, Any]] = [
            {"group": group, "params": grouped[group], "lr": 0.0, "weight_decay": 0.0} for group in sorted(grouped)
        ]

    def set_rates(self, lr: float, weight_decay: float, decoupled_lr: float | None) -> None:
        """Set the rates of the next step. decoupled_lr: learning rate of the embedding and output layer; None: `lr`."""
        for settings in self.param_groups:
            group = settings["group"]
            settings["lr"] = group.ratio * (decoupled_lr if group.decoupled and decoupled_lr is not None else lr)
            settings["weight_decay"] = weight_decay if group.decays else 0.0

    @classmethod
    def state_bytes_per_element(cls, config: RunConfig, sides: float, tensor_ranks: int) -> float:
        """Return the bytes of state per element of a matrix, on its owner; with the main weight if not `uses_main_weights`.

        sides: m/n + n/m of matrices m x n, on average over their elements. tensor_ranks: how many ranks share one.
        """
        return len(cls.slots) * (8.0 if config.precision.fp64 else 4.0)

    @abstractmethod
    def step(self, factor: float | Tensor) -> None:
        """Update the weights by their gradients times `factor` (a number or a tensor []); gradients may be overwritten."""

    @abstractmethod
    def checkpoint_state(self, segment: OwnedSegment, main: Tensor) -> Iterator[Slot]:
        """Yield (name, segment, values [elements]) for checkpoints, with the main weight if not `uses_main_weights`."""

    def storage_tensors(self, segment: OwnedSegment, main: Tensor) -> Iterator[Tensor]:
        """Yield the tensors that hold the state of a segment, as they are stored (any shape)."""
        yield from (values for _, _, values in self.checkpoint_state(segment, main))

    def scale_weight_rows(self, segment: OwnedSegment, main: Tensor, factors: Tensor) -> None:
        """Multiply the rows of an owned segment's main weight, after an update. factors: [rows of this rank]."""
        scale_rows(main, segment, factors)

    def apply_loaded_state(self, loaded: Sequence[Slot]) -> None:
        """Adopt the values loaded into the tensors of `checkpoint_state`; by default these are the state."""


def scale_rows(values: Tensor, segment: OwnedSegment, factors: Tensor) -> None:
    """Multiply a segment's rows in place. values: [elements of the segment]; factors: [rows of this rank's tensor]."""
    for box, start, stop in boxes_of_flat_range(segment.local_shape, segment.low, segment.high):
        rows = factors.narrow(0, box.offset[0], box.shape[0]).to(values)
        values[start - segment.low : stop - segment.low].view(box.shape[0], -1).mul_(rows[:, None])


def scale_gradients(params: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Multiply the gradients of main weights (any shape), where there are any, in place by a scalar; return them."""
    gradients = [param.grad for param in params if param.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype) if isinstance(factor, Tensor) else factor)
    return gradients
