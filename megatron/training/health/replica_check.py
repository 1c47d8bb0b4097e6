"""What several ranks hold must be the same on all of them; `ReplicaCheck` compares it at an interval.

    over data ranks      parameters; optimizer state where no rank owns a share of its own
    over tensor ranks    parameters that are not cut, key/value heads with copies, the random stream they have in common
    over two stages      tied embeddings, also where a pipeline that goes there and back has both on one rank
    over all ranks       counters, loss scale

Everything is hashed where it lies, in one pass over the memory; what travels are 16 bytes for each item. The largest hash
and the smallest of a group are found by one all-reduce, since min(h) = ~max(~h); only if they differ do ranks compare in
full, and the majority is believed.

The hash is a sum of 32-bit words, each times an odd number of its place, modulo 2^32, and a polynomial over blocks of
words modulo 2^64 (multiply-shift hashing, Dietzfelbinger et al., 1997). Odd factors can be undone, so a single flipped bit
always changes it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.core.distributed.finalize import ranges_replicated_over_tensor
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.spec import (
    is_replicated_over_tensor,
    local_shard_boxes,
    param_spec_of,
    tensor_parallel_axis_name,
)
from megatron.core.tensor_parallel.low_precision import delayed_scalings_by_layer
from megatron.training.health.failures import rank_and_node_text, ranks_text
from megatron.training.state.hooks import RunStop, StepHooks
from megatron.training.state.trainer import Trainer

if TYPE_CHECKING:
    from megatron.training.session import TrainingSession

_BLOCK = 1 << 16  # words under one set of factors
_ROWS = 16  # blocks at a time: 4 MB of words
_FACTOR = 0x5851F42D4C957F2D  # of the polynomial: odd
_NONE = -(1 << 63)  # no hash of this rank
_SHOWN = 8  # findings in a message


class ReplicaMismatchError(RunStop):
    """Ranks hold different values of what must be the same."""


@dataclass(frozen=True, slots=True)
class ReplicatedState:
    """A value that ranks of an axis hold alike. copies: neighbours that share it, 0: all. again: more on this rank."""

    name: str
    axis: Axis
    value: Tensor | str
    copies: int = 0
    again: tuple[Tensor, ...] = ()

    @property
    def index_of_own_replica_group(self) -> int:
        """Index of the group that this rank belongs to."""
        return self.axis.rank // self.copies if self.copies else 0


class ReplicaCheck(StepHooks):
    """Compares the values that several ranks hold, by hashes. Every method is collective."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.mesh = trainer, trainer.run.mesh
        generator = torch.Generator().manual_seed(derive_seed("sentinel"))
        factors = torch.randint(-(1 << 31), 1 << 31, (_BLOCK,), generator=generator, dtype=torch.int64).to(torch.int32)
        self._factors = (factors | 1).to(self.mesh.device)
        powers = [pow(_FACTOR, power, 1 << 64) for power in range(_ROWS + 2)]
        self._powers = torch.tensor(
            [power - (1 << 64 if power >> 63 else 0) for power in powers], device=self.mesh.device
        )

    def after_iteration(self, session: TrainingSession) -> None:
        """Compare, at --check-weight-hash-across-dp-replicas-interval."""
        if session.is_due(self.trainer.run.config.faults.check_weight_hash_across_dp_replicas_interval):
            self.require_equal_replicas()

    @torch.no_grad()
    def require_equal_replicas(self) -> None:
        """Raise `ReplicaMismatchError` on all ranks if replicas differ, naming what differs and the odd ranks."""
        self.mesh.flight_recorder.enter_phase("comparison of replicas")
        for parallel in self.trainer.parallels:
            parallel.finish_gather()
        hashed: dict[int, Tensor] = {}  # a parameter may be an item of several axes
        by_axis: dict[str, list[tuple[ReplicatedState, Tensor]]] = defaultdict(list)
        differs = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        items = [item for item in self.replicated_states() if item.axis.size > 1 or item.again]
        for item in items:
            if id(item.value) not in hashed:
                hashed[id(item.value)] = self.hash_value(item.value)
            by_axis[item.axis.name].append((item, hashed[id(item.value)]))
            for other in item.again:
                differs = torch.maximum(differs, (self.hash_value(other) != hashed[id(item.value)]).long())
        # By name: ranks that share two axes must meet on them in one order.
        groups = [by_axis[name] for name in sorted(by_axis)]
        for group in groups:
            differs = torch.maximum(differs, _ranks_disagree_tensor(group))
        if bool(collectives.all_reduce(differs, self.mesh.world, "max")):
            raise ReplicaMismatchError(self._differences_message(groups))

    def replicated_states(self) -> Iterator[ReplicatedState]:
        """Yield what this rank holds and others hold too, in the same order on all ranks of each axis."""
        yield from self._replicated_weights()
        yield from self._optimizer_state()
        trainer, mesh = self.trainer, self.mesh
        for name, scaling in delayed_scalings_by_layer(trainer.stages).items():
            yield ReplicatedState(f"largest values of {name}", mesh.tp_dp_cp, scaling.history)
        yield ReplicatedState(
            "the default random stream", mesh.tp, trainer.run.streams.state()["default"].to(mesh.device)
        )
        counters = {**asdict(trainer.progress), "loss scale": trainer.optimizer.scaler.state()}
        yield from (
            ReplicatedState(f"counter {name}", mesh.world, json.dumps(value, sort_keys=True, default=str))
            for name, value in counters.items()
        )

    def _replicated_weights(self) -> Iterator[ReplicatedState]:
        """Yield weights that several ranks, or this one twice, hold: whole, sharded, shared heads, tied embeddings."""
        mesh = self.mesh
        tied: dict[tuple[str, str], list[Tensor]] = defaultdict(list)  # on this rank, by name and axis
        for parallel in self.trainer.parallels:
            for param in parallel.whole_params:
                spec, value = param_spec_of(param), param.detach()
                yield ReplicatedState(spec.name, mesh.axis(spec.reduce_over), value)
                if is_replicated_over_tensor(spec):
                    yield ReplicatedState(spec.name, mesh.axis(tensor_parallel_axis_name(spec)), value)
                if spec.tied:
                    tied[spec.name, spec.tied_over].append(value)
                # The n-th such part of every tensor rank is the same part of the matrix, at the place of its group.
                shared = (piece for piece in local_shard_boxes(spec, mesh) if piece.replicas > 1)
                yield from (
                    ReplicatedState(
                        f"{spec.name} (shared heads, part {part})", mesh.tp, value[piece.local.slices()], piece.replicas
                    )
                    for part, piece in enumerate(shared)
                )
            # The same rows as at this place of the other tensor ranks, or of the other stage.
            for share in parallel.sharded_segments:
                if is_replicated_over_tensor(share.spec):
                    yield ReplicatedState(share.name, mesh.axis(tensor_parallel_axis_name(share.spec)), share.data)
                if share.spec.tied:
                    tied[share.name, share.spec.tied_over].append(share.data)
                yield from (
                    ReplicatedState(f"{share.name} (shared heads, part {part})", mesh.tp, share.data[low:high], copies)
                    for part, (low, high, copies, _) in enumerate(ranges_replicated_over_tensor(share, mesh))
                )
        for (name, axis), (first, *again) in tied.items():
            yield ReplicatedState(name, mesh.axis(axis), first, again=tuple(again))

    def _optimizer_state(self) -> Iterator[ReplicatedState]:
        """Yield the optimizer state that all data-parallel ranks hold; none if it is sharded over them."""
        for slot, segment, tensor in self.trainer.optimizer.checkpoint_state():
            if segment.sharded:
                continue
            axis = self.mesh.axis(segment.spec.reduce_over)
            yield ReplicatedState(f"{slot} of {segment.name}", axis, tensor.to(self.mesh.device))

    def hash_value(self, value: Tensor | str) -> Tensor:
        """Return a 64-bit hash of a tensor's memory or a text, as an int64 scalar on the device."""
        if isinstance(value, str):
            number = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little", signed=True)
            return torch.tensor(number, device=self.mesh.device)
        words = _view_as_words(value)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for part in words.split(_BLOCK * _ROWS):
            whole = len(part) // _BLOCK * _BLOCK
            rows = [(part[:whole].view(-1, _BLOCK) * self._factors).sum(1, dtype=torch.int64)] if whole else []
            if whole < len(part):
                rows.append((part[whole:] * self._factors[: len(part) - whole]).sum(dtype=torch.int64)[None])
            sums = torch.cat(rows)
            total = total * self._powers[-1] + (sums * self._powers[: len(sums)]).sum()
        # Beside the value for "none"; that two hashes meet there is as rare as any other meeting.
        return total.clamp(min=_NONE + 1, max=-(_NONE + 2))

    def _differences_message(self, groups: Sequence[Sequence[tuple[ReplicatedState, Tensor]]]) -> str:
        """Return what differs on which ranks, the same text on all. Collective. groups: (state, hash) by axis."""
        findings = [finding for group in groups for finding in self._axis_differences(group)]
        place = rank_and_node_text(self.mesh.world.rank)
        gathered = collectives.gather_objects((findings, place), self.mesh.world)
        named = dict(finding for theirs, _ in gathered for finding in theirs)  # line -> ranks
        lines = list(named)
        listed = lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])
        suspects = Counter(rank for ranks in named.values() for rank in ranks)
        nodes = [f"{gathered[rank][1]} is named {count} times" for rank, count in suspects.most_common(3)]
        heading = (
            f"ranks differ in what they must hold alike after iteration {self.trainer.progress.iteration}; go back to an "
            "older checkpoint, and look at the machine"
        )
        return "\n  ".join([heading, *listed, *nodes])

    def _axis_differences(self, group: Sequence[tuple[ReplicatedState, Tensor]]) -> list[tuple[str, list[int]]]:
        """Return (line, ranks to blame) of each state that differs within this rank or over the group's axis.
        Collective there.
        """
        axis = group[0][0].axis
        findings = [
            (
                f"{item.name}: rank {self.mesh.world.rank} over {axis.name} holds copies that disagree",
                [self.mesh.world.rank],
            )
            for item, number in group
            if any(int(self.hash_value(other)) != int(number) for other in item.again)
        ]
        rows = [(item.name, item.index_of_own_replica_group, int(number)) for item, number in group]
        for (name, _, _), held in zip(rows, zip(*collectives.gather_objects(rows, axis), strict=True), strict=True):
            for slot in sorted({slot for _, slot, _ in held}):
                ranks = [rank for rank, (_, place, _) in zip(axis.ranks, held, strict=True) if place == slot]
                findings += _replica_difference_lines(
                    name, axis.name, ranks, [number for _, place, number in held if place == slot]
                )
        return findings


def _view_as_words(value: Tensor) -> Tensor:
    """Return a tensor's memory as a flat int32 tensor of words, of the widest size up to 32 bits that divides it."""
    flat = value.contiguous().flatten().view(torch.uint8) if value.numel() else value.new_zeros(4, dtype=torch.uint8)
    width = next(width for width in (4, 2, 1) if len(flat) % width == 0 and flat.storage_offset() % width == 0)
    words = flat.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    return words if width == 4 else words.to(torch.int32)


def _ranks_disagree_tensor(items: Sequence[tuple[ReplicatedState, Tensor]]) -> Tensor:
    """Return 1 if ranks of an axis disagree about one of these (state, hash) items, else 0: int64 []. Collective."""
    starts = [0]
    for item, _ in items:
        starts.append(starts[-1] + (item.axis.size // item.copies if item.copies else 1))
    numbers = torch.stack([number for _, number in items])
    table = numbers.new_full((2, starts[-1]), _NONE)
    places = torch.tensor(
        [start + item.index_of_own_replica_group for start, (item, _) in zip(starts, items, strict=False)],
        device=numbers.device,
    )
    table[0, places], table[1, places] = numbers, ~numbers
    collectives.all_reduce(table, items[0][0].axis, "max")
    return ((table[0] != ~table[1]) & (table[0] != _NONE)).any().long()


def _replica_difference_lines(
    name: str, axis: str, ranks: list[int], numbers: Sequence[int]
) -> list[tuple[str, list[int]]]:
    """Return a line with the ranks whose hash differs from the majority's, and these; nothing if all agree."""
    counted = Counter(numbers).most_common()
    if len(counted) == 1:
        return []
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        return [(f"{name}: {ranks_text(ranks)} over {axis} disagree, and there is no majority", ranks)]
    odd = [rank for rank, number in zip(ranks, numbers, strict=True) if number != counted[0][0]]
    others = [rank for rank in ranks if rank not in odd]
    return [(f"{name}: {ranks_text(odd)} over {axis} differs from {ranks_text(others)}", odd)]
