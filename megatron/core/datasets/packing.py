"""Which pieces share a sample, so that little of it is padding."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

WINDOW = 4096  # pieces that are packed with each other: what is packed together was shuffled together


def plan_sequence_packs(sizes: np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plan which sequences share a sample: return their order, int64 [n], and which are the last of a pack, bool [n].

    sizes: int [n], each in 1..capacity. Each window of a random permutation is packed best-fit decreasing. The result
    depends on the arguments alone.
    """
    order = np.random.default_rng((seed, len(sizes))).permutation(len(sizes)).astype(np.int64)
    pieces: list[int] = []
    last = np.zeros(len(sizes), bool)
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        longest_first = window[np.argsort(-sizes[window].astype(np.int64), kind="stable")]
        for pack in _pack_greedily(longest_first.tolist(), sizes[longest_first].tolist(), capacity):
            pieces += pack
            last[len(pieces) - 1] = True
    return np.array(pieces, np.int64), last


def shuffle_epochs(count: int, num_samples: int | None, seed: int) -> np.ndarray:
    """Return 0 ... count - 1 in an order of its own each epoch, for at least `num_samples`. int64 [epochs * count]"""
    epochs = max(1, -(-(num_samples or 0) // count))
    return np.concatenate([np.random.default_rng((seed, epoch, count)).permutation(count) for epoch in range(epochs)])


def _pack_greedily(pieces: list[int], sizes: list[int], capacity: int) -> list[list[int]]:
    """Pack each piece, in the order given, where the least room remains (best fit). Returns the pieces of each pack."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (what remains, number of the pack), the tightest first
    for piece, size in zip(pieces, sizes):
        place = bisect_left(rooms, (size, -1))
        if place == len(rooms):
            room, pack = capacity, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(place)
        packs[pack].append(piece)
        if room > size:
            insort(rooms, (room - size, pack))
    return packs
