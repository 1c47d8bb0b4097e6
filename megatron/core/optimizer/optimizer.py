"""One optimizer step over what this rank owns.

The same code serves plain data parallelism (every rank owns everything), ZeRO-1 (every rank owns a range of each
bucket) and FSDP2 (every rank owns rows of each parameter): it sees a list of segments. Half-precision weights have fp32
masters; wide weights are their own masters.

    segment --matrix of a layer, --optimizer muon--> Muon             muon.py
            --else--> AdamW, SGD, Lion                                elementwise.py
            --else, --optimizer adafactor--> Adafactor                adafactor.py
            --else, --use-precision-aware-optimizer--> LowPrecisionAdam     low_precision.py, formats.py
            --of these, --optimizer-cpu-offload--> the same, where the CPU's memory is   offload.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.buffers import Segment
from megatron.core.distributed.finalize import finalize
from megatron.core.optimizer.adafactor import Adafactor
from megatron.core.optimizer.clip import count_zeros, global_norm
from megatron.core.optimizer.elementwise import RULES, Elementwise
from megatron.core.optimizer.groups import Group, group_of, is_by_muon
from megatron.core.optimizer.low_precision import LowPrecisionAdam, entry_of, pack, unpacked
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.offload import Host, divided
from megatron.core.optimizer.scaler import LossScaler
from megatron.core.parallel.boxes import flat
from megatron.core.parallel.device import has_own_memory, memory_of
from megatron.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import Parallel

Inner = Elementwise | LowPrecisionAdam | Adafactor


@dataclass(frozen=True, slots=True)
class StepResult:
    """norm: of the unscaled gradient before clipping. stepped: whether weights moved."""

    norm: Tensor
    stepped: bool
    zeros: Tensor | None = None


class Optimizer:
    """The update of all stages of this rank, over the segments that it owns.

    masters: of each segment, flat; of one with narrow state, its weights. inner: the rule of what Muon does not update.
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
        self.entries = (
            [entry_of(segment, precision) for segment in self.segments]
            if precision.use_precision_aware_optimizer
            else []
        )
        self.masters = list(self.host.masters) if self.host is not None else []
        self.here = slice(len(self.masters), None)  # segments that are updated where their weights are
        self.masters += [self._master(segment) for segment in self.segments[self.here]]
        wide = torch.float64 if precision.fp64 else torch.float32
        self.muon = (
            Muon(parallels, list(zip(self.segments, self.masters, strict=True)), mesh, config, dtype=wide)
            if config.is_muon
            else None
        )
        grouped: dict[Group, list[Any]] = {}
        for segment, param in zip(self.segments, self.entries or self.masters, strict=True):
            if not is_by_muon(segment.spec, config):
                grouped.setdefault(group_of(segment.spec, config), []).append(param)
        self.groups = sorted(grouped)
        groups = [{"params": grouped[group]} for group in self.groups]
        if config.optimizer == "adafactor":  # also where a rank owns nothing: it takes part in sums
            owned = list(zip(self.segments, self.masters, strict=True))
            self.inner: Inner | None = Adafactor(parallels, owned, groups, mesh, config, dtype=wide)
        else:
            self.inner = self._make_inner(groups) if grouped else None

    def _master(self, segment: Segment) -> Tensor:
        wide = segment.data.dtype in (torch.float32, torch.float64) or bool(self.entries)
        return segment.data if wide else segment.data.float()

    def _make_inner(self, groups: list[dict[str, Any]]) -> Elementwise | LowPrecisionAdam:
        return (
            LowPrecisionAdam(groups, self.config)
            if self.entries
            else RULES[self.config.elementwise](groups, self.config)
        )

    def set_rates(self, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> None:
        """Rates of the next step. decoupled_lr: of the embedding and output layer."""
        for group, settings in zip(self.groups, self.inner.param_groups if self.inner else (), strict=True):
            settings["lr"] = decoupled_lr if group.decoupled and decoupled_lr is not None else lr
            settings["weight_decay"] = weight_decay if group.decays else 0.0
        if self.muon is not None:
            self.muon.lr, self.muon.weight_decay = lr, weight_decay

    @torch.no_grad()
    def step(
        self,
        *,
        multiplier: float | Tensor = 1.0,
        count_zero_elements: bool = False,
        row_factors: Mapping[str, Tensor] | None = None,
        accepts: Callable[[Tensor], bool] = lambda norm: True,
    ) -> StepResult:
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
        if isinstance(self.inner, LowPrecisionAdam):
            self.inner.step(factor)
        elif self.host is not None and self.inner is not None:
            self.host.step(self.inner, factor, lambda: self._update_here(factor))
        else:
            self._update_here(factor)

    def _update_here(self, factor: float | Tensor) -> None:
        masters = self.masters[self.here]
        for master, segment in zip(masters, self.segments[self.here], strict=True):
            master.grad = segment.grad if segment.grad.dtype == master.dtype else segment.grad.to(master.dtype)
        if masters:
            factor = factor.to(masters[0].dtype) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_([master.grad for master in masters], factor)
        if self.muon is not None:
            self.muon.step()
        if self.inner is not None:
            self.inner.step()
        for master in masters:
            master.grad = None

    def _scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        for place, segment in enumerate(self.segments):
            if segment.name not in factors:
                continue
            rows = factors[segment.name]
            if isinstance(self.inner, LowPrecisionAdam):
                self.inner.edit(
                    self.entries[place], lambda values, rows=rows, segment=segment: _scale(values, segment, rows)
                )
            else:
                _scale(self.masters[place], segment, rows)
                if self.host is not None:
                    segment.data.copy_(self.masters[place])

    def _publish(self) -> None:
        """The new weights in their own format, on every rank."""
        for master, segment in zip(self.masters[self.here], self.segments[self.here], strict=True):
            if memory_of(master) != memory_of(segment.data):
                segment.data.copy_(master)
        for parallel in self.parallels:
            parallel.start_gather()

    def weights_norm(self) -> Tensor:
        """The 2-norm of the whole network's weights."""
        return global_norm(self.segments, self.mesh, sharded=self.sharded, of="data")

    def slots(self) -> Iterator[tuple[str, Segment, Tensor]]:
        """(slot, segment, flat tensor) of everything kept per element: masters and moments.

        What is kept in a format that does not say its value alone is a copy; `settle` takes it back once it was loaded into.
        """
        for place, (master, segment) in enumerate(zip(self.masters, self.segments, strict=True)):
            narrow = segment.data.dtype in (torch.bfloat16, torch.float16) or segment.rounds_to is not None
            if self.entries:
                yield from (
                    (slot, segment, unpacked(kept, segment))
                    for slot, kept in self.entries[place].slots.items()
                    if slot != "master" or narrow
                )
                continue
            if narrow:
                yield "master", segment, master
            if is_by_muon(segment.spec, self.config):
                assert self.muon is not None, "a segment of Muon's has a Muon"
                yield "momentum_buffer", segment, self.muon.held[segment.name].momentum
                continue
            if isinstance(self.inner, Adafactor):
                yield from self.inner.slots(place)
                continue
            assert isinstance(self.inner, Elementwise), "what no other rule updates is updated element by element"
            yield from ((slot, segment, self.inner.state[master][slot]) for slot in self.inner.slots)

    def settle(self, loaded: Sequence[tuple[str, Segment, Tensor]]) -> None:
        """Take over values that were written into the weights, and into what `slots` gave."""
        if self.host is not None:
            self.host.adopt()
        places = {(entry.segment.name, entry.segment.low): entry for entry in self.entries}
        for slot, segment, values in loaded if places else ():
            pack(places[segment.name, segment.low].slots[slot], values)

    def memory(self) -> Iterator[Tensor]:
        """The tensors that masters and moments take, as they are kept."""
        if self.entries:
            yield from (tensor for entry in self.entries for kept in entry.slots.values() for tensor in kept.memory())
        else:
            yield from (tensor for _, _, tensor in self.slots())

    @property
    def num_steps(self) -> int:
        """Updates done so far (Adam's bias correction counts them)."""
        if isinstance(self.inner, LowPrecisionAdam | Adafactor):
            return self.inner.steps
        counts = (
            [state["step"] for state in self.inner.state.values() if "step" in state] if self.inner is not None else []
        )
        return int(counts[0]) if counts else 0

    def load_num_steps(self, steps: int) -> None:
        """Continue counting from `steps`."""
        if isinstance(self.inner, LowPrecisionAdam | Adafactor):
            self.inner.steps = steps
        elif self.inner is not None:
            for state in self.inner.state.values():
                if "step" in state:
                    state["step"].fill_(steps)


def _scale(values: Tensor, segment: Segment, rows: Tensor) -> None:
    """Multiply the rows of what is owned of a parameter. values: flat."""
    for box, start, stop in flat(segment.local_shape, segment.low, segment.high):
        factors = rows.narrow(0, box.offset[0], box.shape[0]).to(values)
        values[start - segment.low : stop - segment.low].view(box.shape[0], -1).mul_(factors[:, None])
