"""AdamW with main weights and moments in low precision (`--use-precision-aware-optimizer`).

Each slice of a segment is decoded, updated in fp32 by the same formula as torch's AdamW, and encoded again, so that only one slice
of anything is in fp32 at a time. Stochastic rounding draws from the parameter's name, its offset and the number of the step, so that
a resumed run rounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.buffers import Segment
from megatron.core.optimizer.formats import BLOCK, Blocks, Kept, Remainder, Wide, kept_as
from megatron.core.optimizer.rule import Owned, Slot, UpdateRule, scale_rows
from megatron.core.parallel.rng import seed_of

_SLICE = 2**13 * BLOCK  # elements that are fp32 at a time
SLOTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Entry:
    """A segment and its state. slots: master, exp_avg, exp_avg_sq. publishes: its weights are rounded from a main weight that is apart."""

    segment: Segment
    slots: dict[str, Kept]
    publishes: bool


class LowPrecisionAdam(UpdateRule):
    """AdamW over entries. The "params" of its groups are the weights of the segments; entries: these -> the state."""

    uses_main_weights = False

    def __init__(self, owned: Owned, config: OptimizerConfig, precision: PrecisionConfig) -> None:
        super().__init__(owned, config)
        self.betas, self.eps = (config.adam_beta1, config.adam_beta2), config.adam_eps
        self.entries: dict[Tensor, Entry] = {main: entry_of(segment, precision) for segment, main in owned}

    def step(self, factor: float | Tensor) -> None:
        """Update everything by factor times its gradient."""
        self.steps += 1
        for group in self.param_groups:
            for entry in (self.entries[main] for main in group["params"]):
                chance = self._chance(entry)
                for low in range(0, entry.segment.high - entry.segment.low, _SLICE):
                    high = min(low + _SLICE, entry.segment.high - entry.segment.low)
                    self._slice(entry, low, high, entry.segment.grad[low:high].float() * factor, group, chance)

    def slots(self, segment: Segment, main: Tensor) -> Iterator[Slot]:
        """Main weight, where it is more than the weight, and moments.

        What is stored in a format that does not say its value alone is a copy; `load` takes it back once it was loaded into.
        """
        return (
            (slot, segment, unpacked(kept, segment))
            for slot, kept in self.entries[main].slots.items()
            if slot != "master" or segment.is_low_precision
        )

    def memory(self, segment: Segment, main: Tensor) -> Iterator[Tensor]:
        """The tensors of all slots in their formats."""
        return (tensor for kept in self.entries[main].slots.values() for tensor in kept.memory())

    def load(self, loaded: Sequence[Slot]) -> None:
        """Encode what was loaded into the copies that `slots` gave."""
        places = {(entry.segment.name, entry.segment.low): entry for entry in self.entries.values()}
        for slot, segment, values in loaded:
            pack(places[segment.name, segment.low].slots[slot], values)

    def scale_rows(self, segment: Segment, main: Tensor, factors: Tensor) -> None:
        """Multiply the rows of the whole main weight, decoded and encoded again."""
        entry = self.entries[main]
        values = unpacked(entry.slots["master"], segment).clone()
        scale_rows(values, segment, factors)
        self._keep_master(entry, 0, values, self._chance(entry))

    def _slice(
        self, entry: Entry, low: int, high: int, gradient: Tensor, group: dict[str, Any], chance: torch.Generator
    ) -> None:
        main, first, second = (entry.slots[name].read(low, high) for name in SLOTS)
        (beta1, beta2), lr = self.betas, group["lr"]
        first = first.lerp_(gradient, 1.0 - beta1)
        second = second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        size = second.sqrt().div_((1.0 - beta2**self.steps) ** 0.5).add_(self.eps)
        main = main.mul_(1.0 - lr * group["weight_decay"]).addcdiv_(first, size, value=-lr / (1.0 - beta1**self.steps))
        entry.slots["exp_avg"].write(low, first, chance)
        entry.slots["exp_avg_sq"].write(low, second, chance)
        self._keep_master(entry, low, main, chance)

    def _keep_master(self, entry: Entry, low: int, values: Tensor, chance: torch.Generator) -> None:
        kept = entry.slots["master"]
        kept.write(low, values, chance)
        if entry.publishes:
            entry.segment.data[low : low + len(values)].copy_(kept.read(low, low + len(values)))

    def _chance(self, entry: Entry) -> torch.Generator:
        """The random numbers of a segment in this step."""
        where = entry.segment
        return torch.Generator(where.data.device).manual_seed(seed_of("optimizer", self.steps, where.name, where.low))


def entry_of(segment: Segment, precision: PrecisionConfig) -> Entry:
    """A segment's state, from its weights."""
    data, half = segment.data, segment.data.dtype in (torch.bfloat16, torch.float16)
    if not half:
        main: Kept = Wide(data)
    elif precision.main_params_dtype == "fp16":
        main = kept_as("fp16", data)
    elif data.dtype == torch.bfloat16:
        main = Remainder(data, torch.zeros(data.numel(), dtype=torch.int16, device=data.device))
    else:
        main = Wide(data.float())
    entry = Entry(
        segment,
        {
            "master": main,
            "exp_avg": kept_as(precision.exp_avg_dtype, data),
            "exp_avg_sq": kept_as(precision.exp_avg_sq_dtype, data, as_root=True),
        },
        half and not isinstance(main, Remainder),
    )
    if isinstance(main, Blocks):
        pack(main, data.float())
    return entry


def unpacked(kept: Kept, segment: Segment) -> Tensor:
    """What is kept, flat: a view where it is kept in a format of its own, else an fp32 copy in the memory of the CPU."""
    if not isinstance(kept, Blocks | Remainder):
        return kept.memory()[0]
    size = segment.high - segment.low
    return torch.cat([kept.read(low, min(low + _SLICE, size)).cpu() for low in range(0, size, _SLICE)])


def pack(kept: Kept, values: Tensor) -> None:
    """Keep what `unpacked` gave, with other values. The weights are there already, and are left as they are."""
    if not isinstance(kept, Blocks | Remainder):
        return
    device = kept.memory()[0].device
    chance = torch.Generator(device).manual_seed(0)  # for what was saved in a wider format
    for low in range(0, len(values), _SLICE):
        part = values[low : low + _SLICE].to(device)
        kept.complete(low, part) if isinstance(kept, Remainder) else kept.write(low, part, chance)
