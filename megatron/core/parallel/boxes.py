"""Rectangles inside global tensors: how "what this rank holds" is written down.

A flat range of a row-major tensor is a few rectangles: part of a row, whole rows, part of a row. `flat` finds them, so
that a piece of a flattened parameter (ZeRO) can be stored and loaded as boxes of the parameter itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangle: where it starts in the global tensor, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the global tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def shifted(self, by: tuple[int, ...]) -> Box:
        """The same rectangle, moved."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)


def whole(shape: tuple[int, ...]) -> Box:
    """The box of the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The rectangle that two boxes share, or None."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    if any(stop <= start for start, stop in zip(offset, end, strict=True)):
        return None
    return Box(offset, tuple(stop - start for start, stop in zip(offset, end, strict=True)))


def flat(shape: tuple[int, ...], low: int, high: int) -> list[tuple[Box, int, int]]:
    """Cover the elements [low, high) of a flattened tensor of `shape` by at most 2n-1 boxes.

    Returns (box, start, stop) with the flat range that each box covers, in ascending order. A 0-d tensor is one box.
    """
    if high <= low:
        return []
    if not shape:
        return [(Box((), ()), low, high)]
    row = math.prod(shape[1:])
    if len(shape) == 1:
        return [(Box((low,), (high - low,)), low, high)]
    first, last = low // row, (high - 1) // row
    if first == last and (low % row or high % row):
        return [
            (Box((first, *box.offset), (1, *box.shape)), first * row + start, first * row + stop)
            for box, start, stop in flat(shape[1:], low - first * row, high - first * row)
        ]
    result = []
    middle_low, middle_high = -(-low // row), high // row
    if low % row:
        result += flat(shape, low, middle_low * row)
    if middle_high > middle_low:
        box = Box((middle_low, *(0 for _ in shape[1:])), (middle_high - middle_low, *shape[1:]))
        result.append((box, middle_low * row, middle_high * row))
    if high % row:
        result += flat(shape, middle_high * row, high)
    return result
