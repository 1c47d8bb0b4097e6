"""AdamW with main weights and moments in low precision (`--use-precision-aware-optimizer`).

Each slice of a segment is decoded, updated in fp32 by the formula of torch's AdamW, and encoded again, so only one
slice is in fp32 at a time. Stochastic rounding is seeded with the parameter's name, its offset and the number of the
step, so that a resumed run rounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, UpdateRuleContext, scale_rows
from megatron.core.optimizer.state_formats import (
    BLOCK,
    Bf16RemainderTensor,
    BlockScaledTensor,
    EncodedTensor,
    UnscaledTensor,
    encoded_zeros,
)
from megatron.core.parallel.rng import derive_seed

_SLICE = 2**13 * BLOCK  # elements that are fp32 at a time
# Bytes of an element; a block has a scale of 4.
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2 + 4 / BLOCK, "fp8": 1 + 4 / BLOCK}


@dataclass(slots=True)
class SegmentOptimizerState:
    """A segment and its optimizer state.

    slots: "master", "exp_avg" and "exp_avg_sq". writes_weights: the main weight is stored separately, and rounded into
    the weights after an update.
    """

    segment: OwnedSegment
    slots: dict[str, EncodedTensor]
    writes_weights: bool


class LowPrecisionAdam(UpdateRule):
    """AdamW over encoded state. The "params" of its groups are the main weights of the segments; states: their state."""

    slots = ("exp_avg", "exp_avg_sq")
    uses_main_weights = False

    def __init__(self, owned: Owned, config: OptimizerConfig, context: UpdateRuleContext) -> None:
        super().__init__(owned, config, context)
        self.betas, self.eps = (config.adam_beta1, config.adam_beta2), config.adam_eps
        self.states: dict[Tensor, SegmentOptimizerState] = {
            main: allocate_optimizer_state(segment, context.precision) for segment, main in owned
        }

    @classmethod
    def state_bytes_per_element(cls, config: RunConfig, sides: float, tensor_ranks: int) -> float:
        """See the base class."""
        precision, main = config.precision, 0.0
        if (precision.bf16 or precision.fp16) and not config.parallel.use_torch_fsdp2:
            main = _BYTES["fp16"] if precision.main_params_dtype == "fp16" else 2.0 if precision.bf16 else 4.0
        return main + _BYTES[precision.exp_avg_dtype] + _BYTES[precision.exp_avg_sq_dtype]

    def step(self, factor: float | Tensor) -> None:
        """Update every segment by its gradient times `factor`, a scalar."""
        self.steps += 1
        for group in self.param_groups:
            for state in (self.states[main] for main in group["params"]):
                generator = self._segment_generator(state)
                for low in range(0, state.segment.high - state.segment.low, _SLICE):
                    high = min(low + _SLICE, state.segment.high - state.segment.low)
                    self._update_slice(
                        state, low, high, state.segment.grad[low:high].float() * factor, group, generator
                    )

    def checkpoint_state(self, segment: OwnedSegment, main: Tensor) -> Iterator[Slot]:
        """Return an iterator over (slot name, segment, values [elements]): moments, and separate main weights.

        Values in a format that needs decoding are copies; `apply_loaded_state` encodes them again after a load.
        """
        return (
            (slot, segment, decode_state_tensor(encoded, segment))
            for slot, encoded in self.states[main].slots.items()
            if slot != "master" or segment.has_half_precision_weights
        )

    def storage_tensors(self, segment: OwnedSegment, main: Tensor) -> Iterator[Tensor]:
        """Yield the tensors of a segment's state as they are stored (any shape)."""
        return (tensor for encoded in self.states[main].slots.values() for tensor in encoded.storage_tensors())

    def apply_loaded_state(self, loaded: Sequence[Slot]) -> None:
        """Encode the values that were loaded into the copies from `checkpoint_state`."""
        by_segment = {(state.segment.name, state.segment.low): state for state in self.states.values()}
        for slot, segment, values in loaded:
            encode_into_tensor(by_segment[segment.name, segment.low].slots[slot], values)

    def scale_weight_rows(self, segment: OwnedSegment, main: Tensor, factors: Tensor) -> None:
        """Multiply the rows of a segment's main weight, decoded and encoded again. factors: [rows of this rank]."""
        state = self.states[main]
        values = decode_state_tensor(state.slots["master"], segment).clone()
        scale_rows(values, segment, factors)
        self._write_main_weight(state, 0, values, self._segment_generator(state))

    def _update_slice(
        self,
        state: SegmentOptimizerState,
        low: int,
        high: int,
        gradient: Tensor,
        group: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        """Update elements [low, high) of a segment by AdamW, in fp32. gradient: [high - low]; group: its rates."""
        main, first, second = (state.slots[name].decode_slice(low, high) for name in ("master", *self.slots))
        (beta1, beta2), lr = self.betas, group["lr"]
        first = first.lerp_(gradient, 1.0 - beta1)
        second = second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        size = second.sqrt().div_((1.0 - beta2**self.steps) ** 0.5).add_(self.eps)
        main = main.mul_(1.0 - lr * group["weight_decay"]).addcdiv_(first, size, value=-lr / (1.0 - beta1**self.steps))
        state.slots["exp_avg"].encode_slice(low, first, generator)
        state.slots["exp_avg_sq"].encode_slice(low, second, generator)
        self._write_main_weight(state, low, main, generator)

    def _write_main_weight(
        self, state: SegmentOptimizerState, low: int, values: Tensor, generator: torch.Generator
    ) -> None:
        """Encode main weights `values` from element `low` on, and round them into the weights if these are separate."""
        encoded = state.slots["master"]
        encoded.encode_slice(low, values, generator)
        if state.writes_weights:
            state.segment.data[low : low + len(values)].copy_(encoded.decode_slice(low, low + len(values)))

    def _segment_generator(self, state: SegmentOptimizerState) -> torch.Generator:
        """Return a segment's generator for stochastic rounding, seeded with its name, offset and the step."""
        where = state.segment
        return torch.Generator(where.data.device).manual_seed(
            derive_seed("optimizer", self.steps, where.name, where.low)
        )


def allocate_optimizer_state(segment: OwnedSegment, precision: PrecisionConfig) -> SegmentOptimizerState:
    """Allocate a segment's optimizer state; the main weight is initialized from the weights."""
    data, half = segment.data, segment.data.dtype in (torch.bfloat16, torch.float16)
    if not half:
        main: EncodedTensor = UnscaledTensor(data)
    elif precision.main_params_dtype == "fp16":
        main = encoded_zeros("fp16", data)
    elif data.dtype == torch.bfloat16:
        main = Bf16RemainderTensor(data, torch.zeros(data.numel(), dtype=torch.int16, device=data.device))
    else:
        main = UnscaledTensor(data.float())
    state = SegmentOptimizerState(
        segment,
        {
            "master": main,
            "exp_avg": encoded_zeros(precision.exp_avg_dtype, data),
            "exp_avg_sq": encoded_zeros(precision.exp_avg_sq_dtype, data, as_root=True),
        },
        half and not isinstance(main, Bf16RemainderTensor),
    )
    if isinstance(main, BlockScaledTensor):
        encode_into_tensor(main, data.float())
    return state


def decode_state_tensor(encoded: EncodedTensor, segment: OwnedSegment) -> Tensor:
    """Return all numbers [elements]: the storage if it needs no decoding, else an fp32 copy in CPU memory."""
    if not isinstance(encoded, BlockScaledTensor | Bf16RemainderTensor):
        return encoded.storage_tensors()[0]
    size = segment.high - segment.low
    return torch.cat([encoded.decode_slice(low, min(low + _SLICE, size)).cpu() for low in range(0, size, _SLICE)])


def encode_into_tensor(encoded: EncodedTensor, values: Tensor) -> None:
    """Encode `values` [elements] from `decode_state_tensor`; nothing to do where they are the storage.

    The bf16 weights of `Bf16RemainderTensor` are set already and stay unchanged.
    """
    if not isinstance(encoded, BlockScaledTensor | Bf16RemainderTensor):
        return
    device = encoded.storage_tensors()[0].device
    generator = torch.Generator(device).manual_seed(0)  # only matters for values saved in a wider format
    for low in range(0, len(values), _SLICE):
        part = values[low : low + _SLICE].to(device)
        encoded.set_remainders(low, part) if isinstance(encoded, Bf16RemainderTensor) else encoded.encode_slice(
            low, part, generator
        )
