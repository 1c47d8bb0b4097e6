"""Which data-parallel rank orthogonalizes which matrix, where each owns only a range of it.

    rank 0 owns   [ fc2 . . . . . | q k v . . ]         to the owner      rank 0: all of fc2
    rank 1 owns   [ . . . q k v | fc1 . . . . . ]       ------------->    rank 1: all of q k v, all of fc1; and back

The plan follows from shapes alone, so that all ranks make the same one without asking each other. Work goes to the rank
with the least so far, the dearest first (Graham, 1969: at most 4/3 - 1/(3 ranks) of the best possible division).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.core.distributed.buffers import Ownership
from megatron.core.parallel.spec import ParamSpec, Shard

_ROUND = 2**26  # elements that an owner takes up at a time


@dataclass(frozen=True, slots=True)
class Slab:
    """Flat elements [low, high) of a parameter's local tensor: a whole parameter, or one of its experts.

    spec: of what it holds, without a dimension for experts. shape: of this rank's piece. ranges: what each data rank owns of it,
    counted from `low`; cost: multiplications of one Newton-Schulz step. owner: data rank that works on it, in round `turn`.
    """

    name: str
    spec: ParamSpec
    shape: tuple[int, int]
    low: int
    high: int
    ranges: tuple[tuple[int, int], ...]
    cost: float
    owner: int = 0
    turn: int = 0

    @property
    def is_shared_out(self) -> bool:
        """Whether some rank does not hold all of it."""
        return any(held != (0, self.high - self.low) for held in self.ranges)


def slabs_of(owned: Ownership, is_split: Callable[[ParamSpec], bool]) -> list[Slab]:
    """What a parameter that Muon updates is made of. is_split: whether the parts of a parameter are matrices of their own."""
    spec = owned.spec
    if not spec.stacked:
        assert len(spec.shape) == 2, f"{spec.name} of shape {spec.shape} is no matrix"
        return [_slab(owned, spec, owned.local_shape, 0, is_split(spec))]
    shards = tuple(Shard(cut.dim - 1, cut.axis, cut.parts) for cut in spec.shards if cut.dim > 0)
    one = replace(spec, shape=spec.shape[1:], shards=shards, stacked=False)
    return [_slab(owned, one, owned.local_shape[1:], expert, is_split(spec)) for expert in range(owned.local_shape[0])]


def _slab(owned: Ownership, spec: ParamSpec, shape: tuple[int, ...], number: int, is_split: bool) -> Slab:
    size = math.prod(shape)
    low = number * size
    ranges = tuple((min(max(a - low, 0), size), min(max(b - low, 0), size)) for a, b in owned.ranges)
    rows, columns = spec.shape
    parts = spec.shards[0].parts if spec.shards and is_split else ()
    sizes = [(part.size, columns) if spec.shards[0].dim == 0 else (rows, part.size) for part in parts] or [
        (rows, columns)
    ]
    cost = sum(min(m, n) ** 2 * (2.0 * max(m, n) + min(m, n)) for m, n in sizes)
    return Slab(owned.spec.name, spec, (shape[0], shape[1]), low, low + size, ranges, cost)


def divided(slabs: Sequence[Slab], ranks: int) -> list[Slab]:
    """The slabs with their owners and turns. A rank that owns most of a slab anyway has it, of those with the least work."""
    load, taken = [0.0] * ranks, [0] * ranks
    assigned: dict[int, Slab] = {}
    for place in sorted(range(len(slabs)), key=lambda place: (-slabs[place].cost, place)):
        slab = slabs[place]
        held = [high - low for low, high in slab.ranges]
        owner = min(range(ranks), key=lambda rank: (load[rank], -held[rank], rank))
        assigned[place] = replace(slab, owner=owner, turn=taken[owner] // _ROUND)
        load[owner] += slab.cost
        taken[owner] += slab.high - slab.low
    return [assigned[place] for place in range(len(slabs))]


def balance(slabs: Sequence[Slab], ranks: int) -> float:
    """The work of the busiest rank over the mean: 1 is perfect."""
    load = [sum(slab.cost for slab in slabs if slab.owner == rank) for rank in range(ranks)]
    return max(load) * ranks / sum(load) if sum(load) else 1.0
