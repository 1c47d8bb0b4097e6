"""Which ranks share which sequence, when sequences of one batch differ in length: pure data.

A sequence is cut over the smallest power of two of ranks that hold it with at most `limit` places each, and goes to that
block of neighbouring ranks which has the least to do. The longest come first, so blocks never wait for a part of themselves:

    8 ranks, limit 4      lengths 15 7 4 4 3 1      ranks 0-3: 15      ranks 4-5: 7      rank 6: 4, 3      rank 7: 4, 1

Short sequences of the same block travel together as long as they fit into its limit. Every rank goes through its shares in
the order of the plan; since that is one order for all, no two ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Sequences, by number, that ranks `first` up to `first + size` work on together."""

    first: int
    size: int
    sequences: tuple[int, ...]

    def includes(self, rank: int) -> bool:
        """Whether a rank takes part."""
        return self.first <= rank < self.first + self.size


@dataclass(frozen=True, slots=True)
class Assignment:
    """shares: in the order in which every rank works. loads: what each rank has to do, in units of `cost`."""

    shares: tuple[Share, ...]
    loads: tuple[float, ...]

    @property
    def balance(self) -> float:
        """The mean load over the largest: 1 when all ranks are busy until the end."""
        largest = max(self.loads)
        return sum(self.loads) / len(self.loads) / largest if largest else 1.0


def largest_block(ranks: int) -> int:
    """The largest power of two up to a number of ranks."""
    return 1 << (ranks.bit_length() - 1)


def deserved(length: int, limit: int) -> int:
    """The smallest power of two of ranks that hold so many places with at most `limit` each."""
    size = 1
    while size * limit < length:
        size *= 2
    return size


def cost(length: int, linear: float) -> float:
    """Work on a sequence: each place once for the matrices, as much as `linear` places of attention, and once for every other."""
    return length * (linear + length)


def assign(lengths: Sequence[int], *, ranks: int, limit: int, linear: float = 0.0) -> Assignment:
    """Divide sequences of these lengths over the ranks. No length may be above limit * largest_block(ranks)."""
    loads = [0.0] * ranks
    shares: list[tuple[int, int, list[int]]] = []
    room: dict[tuple[int, int], tuple[int, int]] = {}  # block -> (its last share, places left in it)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        size = deserved(length, limit)
        assert size <= ranks, f"a sequence of {length} places does not fit on {ranks} ranks of {limit}"
        first = min(range(0, ranks - size + 1, size), key=lambda first: (max(loads[first : first + size]), first))
        share, left = room.get((first, size), (-1, 0))
        if length > left:
            share, left = len(shares), size * limit
            shares.append((first, size, []))
        shares[share][2].append(number)
        room[first, size] = share, left - length
        done = max(loads[first : first + size]) + cost(length, linear) / size
        loads[first : first + size] = [done] * size
    return Assignment(tuple(Share(first, size, tuple(members)) for first, size, members in shares), tuple(loads))
