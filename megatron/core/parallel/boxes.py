"""Rectangles (`Box`) inside global tensors: the notation for which part of a tensor a rank holds.

A flat range of a row-major tensor consists of a few rectangles: part of a row, whole rows, part of a row.
`boxes_of_flat_range` finds them, so that a slice of a flattened parameter (ZeRO) can be saved and loaded as boxes of
the parameter itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangle in a global tensor: the offset of its first element, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that index this box in the global tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def shifted(self, by: tuple[int, ...]) -> Box:
        """Return a box of the same shape at `offset + by`."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    if any(stop <= start for start, stop in zip(offset, end, strict=True)):
        return None
    return Box(offset, tuple(stop - start for start, stop in zip(offset, end, strict=True)))


def boxes_of_flat_range(shape: tuple[int, ...], low: int, high: int) -> list[tuple[Box, int, int]]:
    """Cover the elements [low, high) of a flattened n-dimensional tensor of `shape` by at most 2n-1 boxes.

    Returns (box, start, stop) with the flat range of each box, in ascending order. A 0-dimensional tensor is one box.
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
            for box, start, stop in boxes_of_flat_range(shape[1:], low - first * row, high - first * row)
        ]
    result = []
    whole_rows_low, whole_rows_high = -(-low // row), high // row
    if low % row:
        result += boxes_of_flat_range(shape, low, whole_rows_low * row)
    if whole_rows_high > whole_rows_low:
        box = Box((whole_rows_low, *(0 for _ in shape[1:])), (whole_rows_high - whole_rows_low, *shape[1:]))
        result.append((box, whole_rows_low * row, whole_rows_high * row))
    if high % row:
        result += boxes_of_flat_range(shape, whole_rows_high * row, high)
    return result
