"""Assigns sequences of different lengths to blocks of context-parallel ranks; pure data.

A sequence is sharded over the smallest power of two of ranks on which each holds at most `limit` positions, and goes to
the aligned block of neighbouring ranks with the least work. The longest sequences come first, so blocks never wait for
a part of themselves:

    8 ranks, limit 4      lengths 15 7 4 4 3 1      ranks 0-3: 15      ranks 4-5: 7      rank 6: 4, 3      rank 7: 4, 1

Short sequences of the same block are packed together up to its limit. Every rank processes its groups in the order of
the plan; since that order is global, no two ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankBlockAssignment:
    """Sequences, by index, that ranks `first` to `first + size - 1` process together."""

    first: int
    size: int
    sequences: tuple[int, ...]

    def includes_rank(self, rank: int) -> bool:
        """Return whether a rank takes part."""
        return self.first <= rank < self.first + self.size


@dataclass(frozen=True, slots=True)
class SequenceAssignment:
    """The groups in the order in which every rank processes them, and each rank's load in units of `sequence_cost`."""

    shares: tuple[RankBlockAssignment, ...]
    loads: tuple[float, ...]

    @property
    def balance(self) -> float:
        """The mean load divided by the largest: 1 if all ranks are busy until the end."""
        largest = max(self.loads)
        return sum(self.loads) / len(self.loads) / largest if largest else 1.0


def context_ranks_needed(length: int, limit: int) -> int:
    """Return the smallest power of two of ranks that hold `length` positions with at most `limit` each."""
    size = 1
    while size * limit < length:
        size *= 2
    return size


def sequence_cost(length: int, linear: float) -> float:
    """Return the work on a sequence, in units of attention to a position; linear: the matrices' on a position."""
    return length * (linear + length)


def assign_sequences_to_ranks(
    lengths: Sequence[int], *, ranks: int, limit: int, linear: float = 0.0
) -> SequenceAssignment:
    """Assign sequences to blocks of ranks. Asserts that each fits on a power of two of at most `ranks` ranks.

    limit: most positions of a sequence on a rank. linear: see `sequence_cost`.
    """
    loads = [0.0] * ranks
    groups: list[tuple[int, int, list[int]]] = []
    open_groups: dict[tuple[int, int], tuple[int, int]] = {}  # block -> (its last group, free positions in it)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        size = context_ranks_needed(length, limit)
        assert size <= ranks, f"a sequence of {length} positions does not fit on {ranks} ranks of {limit}"
        first = min(range(0, ranks - size + 1, size), key=lambda first: (max(loads[first : first + size]), first))
        group, free = open_groups.get((first, size), (-1, 0))
        if length > free:
            group, free = len(groups), size * limit
            groups.append((first, size, []))
        groups[group][2].append(number)
        open_groups[first, size] = group, free - length
        done = max(loads[first : first + size]) + sequence_cost(length, linear) / size
        loads[first : first + size] = [done] * size
    return SequenceAssignment(
        tuple(RankBlockAssignment(first, size, tuple(members)) for first, size, members in groups), tuple(loads)
    )
