"""Comparing tensors and checkpoints: against numpy, element by element."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megatron.core.dist_checkpointing.source import ShapeAndDtype
from megatron.core.parallel.boxes import Box
from megatron.verify.compare import checkpoints as compare
from megatron.verify.compare.checkpoints import TensorDifference, Tolerance, compare_sources

NUMBERS = st.floats(-4, 4, width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-30])


def compare_tensors(a: Tensor, b: Tensor, tolerance: Tolerance = Tolerance()) -> TensorDifference | None:
    """How two tensors of one shape differ."""
    return compare._compare_in_blocks(tuple(a.shape), lambda box: (a[box.slices()], b[box.slices()]), tolerance)


class Held:
    """A source of these tensors."""

    def __init__(self, where: str, tensors: dict[str, Tensor], values: dict[str, Any] | None = None) -> None:
        self.where, self.tensors, self.values, self.settings = where, tensors, values or {}, {}
        self.formats = {name: ShapeAndDtype(tuple(one.shape), one.dtype) for name, one in tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        return self.tensors[name][box.slices()]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=24),
    st.booleans(),
    st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.0, 0.5), (0.1, 0.5)]),
    st.integers(1, 7),
)
def test_gaps_are_those_that_numpy_finds(
    pairs: list[tuple[float, float]], other_dtype: bool, allowed: tuple[float, float], block: int
) -> None:
    a = np.array([a for a, _ in pairs], np.float32)
    b = np.array([b for _, b in pairs], np.float64 if other_dtype else np.float32)
    tolerance = Tolerance(*allowed)
    with np.errstate(invalid="ignore"):
        if tolerance.requires_equal_bits:
            differs = (
                ~((a == b) | (np.isnan(a) & np.isnan(b))) if other_dtype else a.view(np.uint32) != b.view(np.uint32)
            )
        else:
            differs = ~np.isclose(
                a.astype(np.float64), b.astype(np.float64), rtol=allowed[0], atol=allowed[1], equal_nan=True
            )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_BLOCK", block)
        gap = compare_tensors(torch.from_numpy(a), torch.from_numpy(b), tolerance)
    if gap is None:
        assert not differs.any()
        return
    assert (gap.count, gap.elements) == (differs.sum(), len(pairs))
    places = np.flatnonzero(differs)
    assert gap.first.index == (places[0],)
    with np.errstate(invalid="ignore"):
        sizes = np.abs(a.astype(np.float64) - b)
        sizes = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.nan_to_num(sizes, nan=np.inf, posinf=np.inf))
    assert sizes[gap.largest.index[0]] == sizes[places].max()
    assert np.array_equal([gap.first.a, gap.first.b], [a[places[0]], b[places[0]]], equal_nan=True)


def test_the_relative_norm_is_that_of_the_formula_and_the_index_is_of_the_whole_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    b[:2] = a[:2]
    monkeypatch.setattr(compare, "_BLOCK", 12)
    gap = compare_tensors(a, b)
    assert gap is not None
    assert math.isclose(gap.relative_norm, float((a - b).double().norm() / b.double().norm()), rel_tol=1e-6)
    assert gap.first.index == (2, 0, 0) and gap.count == 36
    place = np.unravel_index(int((a - b).abs().argmax()), a.shape)
    assert gap.largest.index == tuple(map(int, place)) and gap.largest.a == a[place].item()


def test_scalars_and_empty_tensors_and_integers_are_compared_too() -> None:
    gap = compare_tensors(torch.tensor(1.0), torch.tensor(2.0))
    assert gap is not None and gap.first.index == () and "1.0 and 2.0" in str(gap)
    assert compare_tensors(torch.zeros(0, 3), torch.zeros(0, 3)) is None
    large = torch.tensor([2**60, 2**60])
    gap = compare_tensors(large, large + torch.tensor([0, 1]))
    assert gap is not None and gap.first.index == (1,) and gap.first.b == 2**60 + 1


def test_names_shapes_dtypes_values_and_numbers_that_differ_are_all_named() -> None:
    a = Held(
        "A",
        {"model.a": torch.ones(3), "model.b": torch.ones(3), "model.c": torch.ones(3), "x": torch.ones(1)},
        {"run.progress": {"iteration": 1, "samples": 5}, "run.config": {"save": "A"}},
    )
    b = Held(
        "B",
        {
            "model.a": torch.ones(4),
            "model.b": torch.ones(3).double(),
            "model.c": torch.tensor([1.0, 2.0, 1.0]),
            "y": torch.ones(1),
        },
        {"run.progress": {"iteration": 2, "samples": 5}, "run.config": {"save": "B"}},
    )
    found = {one.name: str(one) for one in compare_sources(a, b)}
    assert found == {
        "model.a": "model.a: shape (3,) and (4,)",
        "model.b": "model.b: dtype float32 and float64",
        "x": "x: only in A",
        "y": "y: only in B",
        "model.c": "model.c: 1 of 3 elements differ, relative norm 0.408; first [1] 1.0 and 2.0",
        "run.progress": "run.progress: iteration 1 and 2",
    }
    assert [
        one.name for one in compare_sources(a, b, patterns=["model.?"], dtypes=False, tolerance=Tolerance(absolute=1.0))
    ] == ["model.a"]
