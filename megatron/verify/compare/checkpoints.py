"""Two tensors, or two checkpoints of any layout and any format: where they differ, and by how much.

Tensors are read block by block, so memory does not grow with them. Without a tolerance, equal means every bit; where
the dtypes differ, it means the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.parallel.boxes import Box
from megatron.verify.compare.contents import matches_pattern

_BLOCK = 1 << 22  # elements compared at a time


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|a - b| <= absolute + relative * |b| counts as equal. With both zero, only equal bits do."""

    relative: float = 0.0
    absolute: float = 0.0

    @property
    def requires_equal_bits(self) -> bool:
        """Whether only equal bits count as equal."""
        return self.relative == 0.0 and self.absolute == 0.0


@dataclass(frozen=True, slots=True)
class DifferingElement:
    """A differing element: its index in the global tensor, and both values."""

    index: tuple[int, ...]
    a: float
    b: float

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.index))}] {self.a!r} and {self.b!r}"


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How two tensors differ. count: of elements that do. relative_norm: |a - b| / |b| over all elements, inf for b =
    0. largest: where |a - b| is largest; if one of both is NaN or infinite, that counts as infinite.
    """

    count: int
    elements: int
    first: DifferingElement
    largest: DifferingElement
    relative_norm: float

    def __str__(self) -> str:
        same = self.first == self.largest
        return (
            f"{self.count} of {self.elements} elements differ, relative norm {self.relative_norm:.3g}; first {self.first}"
            + ("" if same else f"; largest {self.largest}")
        )


@dataclass(frozen=True, slots=True)
class CheckpointEntryDifference:
    """A tensor or value that differs between checkpoints. what: in words. gap: of tensors that can be compared."""

    name: str
    what: str
    gap: TensorDifference | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def compare_sources(
    a: CheckpointSource,
    b: CheckpointSource,
    *,
    tolerance: Tolerance = Tolerance(),
    patterns: Sequence[str] = (),
    dtypes: bool = True,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[CheckpointEntryDifference]:
    """Yield a difference for every tensor and value, by name, that two checkpoints do not hold alike.
    patterns: compare only names like these. dtypes: whether another dtype alone is a difference. advance: called with
    the bytes of `a` that were compared. `run.config` is left to `settings_difference_lines`.
    """
    names = dict.fromkeys([*a.formats, *b.formats])
    for name in (name for name in names if matches_pattern(name, patterns)):
        mine, theirs = a.formats.get(name), b.formats.get(name)
        if mine is None or theirs is None:
            yield CheckpointEntryDifference(name, f"only in {b.where if mine is None else a.where}")
            continue
        if tuple(mine.shape) != tuple(theirs.shape):
            yield CheckpointEntryDifference(name, f"shape {tuple(mine.shape)} and {tuple(theirs.shape)}")
            continue
        if dtypes and mine.dtype != theirs.dtype:
            yield CheckpointEntryDifference(name, f"dtype {_dtype_name(mine.dtype)} and {_dtype_name(theirs.dtype)}")
        gap = _compare_in_blocks(tuple(mine.shape), partial(_read_both, a, b, name), tolerance)
        if gap is not None:
            yield CheckpointEntryDifference(name, str(gap), gap)
        advance(math.prod(mine.shape) * mine.dtype.itemsize)
    for name in dict.fromkeys([*a.values, *b.values]):
        if matches_pattern(name, patterns) and name != "run.config" and a.values.get(name) != b.values.get(name):
            yield CheckpointEntryDifference(name, value_difference_text(a.values.get(name), b.values.get(name)))


def value_difference_text(a: Any, b: Any) -> str:
    """Describe two values that differ; of two mappings only the keys that do."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return ", ".join(
            f"{key} {a.get(key)!r} and {b.get(key)!r}" for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)
        )
    return f"{a!r} and {b!r}"


def settings_difference_lines(a: CheckpointSource, b: CheckpointSource) -> list[str]:
    """Return a line for each setting that both checkpoints have with different values."""
    return [
        f"{name}: {a.settings[name]!r} and {b.settings[name]!r}"
        for name in sorted(set(a.settings) & set(b.settings))
        if a.settings[name] != b.settings[name]
    ]


def _read_both(a: CheckpointSource, b: CheckpointSource, name: str, box: Box) -> tuple[Tensor, Tensor]:
    return a.read(name, box), b.read(name, box)


def _compare_in_blocks(
    shape: tuple[int, ...], read: Callable[[Box], tuple[Tensor, Tensor]], tolerance: Tolerance
) -> TensorDifference | None:
    """Compare two tensors block by block; None if they do not differ. read: box -> both tensors' values."""
    differences = [
        block for box in row_blocks(shape) if (block := _compare_block(box, *read(box), tolerance)) is not None
    ]
    if not differences:
        return None
    # Only now is the size of b worth a second reading; blocks of equal bits add nothing to the size of the gap.
    square = sum(_finite_sum_of_squares(read(box)[1]) for box in row_blocks(shape))
    norm = math.sqrt(sum(block.square for block in differences) / square) if square else math.inf
    largest = max(differences, key=lambda block: block.size).largest
    return TensorDifference(
        sum(block.count for block in differences), math.prod(shape), differences[0].first, largest, norm
    )


def row_blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes of whole rows that cover a tensor of this shape in order, of bounded size or of one row."""
    if not shape:
        yield Box((), ())
        return
    rows = max(1, _BLOCK // max(1, math.prod(shape[1:])))
    for low in range(0, shape[0], rows):
        yield Box((low, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - low), *shape[1:]))


@dataclass(frozen=True, slots=True)
class _BlockDifference:
    """How two tensors differ within a box. square: sum of squared differences. size: the largest |a - b|."""

    count: int
    square: float
    first: DifferingElement
    largest: DifferingElement
    size: float


def _compare_block(box: Box, a: Tensor, b: Tensor, tolerance: Tolerance) -> _BlockDifference | None:
    """Return how a box of two tensors differs, None if it does not. box: its place in the global tensor."""
    if not a.numel() or (a.dtype == b.dtype and torch.equal(_view_as_bytes(a), _view_as_bytes(b))):
        return None
    x, y = a.to(torch.float64), b.to(torch.float64)
    unlike = ~((x == y) | (x.isnan() & y.isnan()))
    gap = torch.where(unlike, (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
    if not tolerance.requires_equal_bits:
        differs = unlike & ~(gap.isfinite() & (gap <= tolerance.absolute + tolerance.relative * y.abs()))
    else:
        differs = (_view_as_bytes(a) != _view_as_bytes(b)).any(-1) if a.dtype == b.dtype else unlike
    if not bool(differs.any()):
        return None

    def differing_element_at(place: int) -> DifferingElement:
        index = [int(at) for at in torch.unravel_index(torch.tensor(place), x.shape)] if x.dim() else []
        return DifferingElement(
            tuple(at + low for at, low in zip(index, box.offset, strict=True)),
            a.flatten()[place].item(),
            b.flatten()[place].item(),
        )

    sizes = torch.where(differs, gap, -1.0).flatten()
    place = int(sizes.argmax())
    square = float(torch.where(gap.isfinite(), gap, 0.0).square().sum())
    return _BlockDifference(
        int(differs.sum()),
        square,
        differing_element_at(int(differs.flatten().int().argmax())),
        differing_element_at(place),
        float(sizes[place]),
    )


def _view_as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes: uint8 [..., width of an element]."""
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8)


def _finite_sum_of_squares(tensor: Tensor) -> float:
    """Return the sum of squares of a tensor's finite values, in fp64."""
    values = tensor.to(torch.float64)
    return float(torch.where(values.isfinite(), values, 0.0).square().sum())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
