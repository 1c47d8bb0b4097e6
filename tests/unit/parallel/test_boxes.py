from __future__ import annotations

import numpy as np

from megatron.core.parallel.boxes import Box, boxes_of_flat_range, intersect, whole_box


def random_shape(random: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(size) for size in random.integers(1, 6, random.integers(0, 5)))


def test_flat_ranges_are_covered_exactly_in_order_and_by_few_boxes() -> None:
    random = np.random.default_rng(0)
    for _ in range(2000):
        shape = random_shape(random)
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        low, high = sorted(int(n) for n in random.integers(0, numbers.size + 1, 2))
        found = boxes_of_flat_range(shape, low, high)
        covered = [numbers[box.slices()].reshape(-1) for box, _, _ in found]
        assert [int(n) for part in covered for n in part] == list(range(low, high)), (shape, low, high)
        for (box, start, stop), part in zip(found, covered, strict=True):
            assert (start, stop) == (part[0], part[-1] + 1) and box.num_elements == stop - start
        assert len(found) <= max(1, 2 * len(shape) - 1), (shape, low, high, found)


def test_an_empty_range_has_no_boxes_and_a_scalar_is_one() -> None:
    assert boxes_of_flat_range((3, 4), 5, 5) == []
    assert boxes_of_flat_range((), 0, 1) == [(Box((), ()), 0, 1)]
    assert boxes_of_flat_range((2, 3), 0, 6) == [(whole_box((2, 3)), 0, 6)]


def test_intersections_hold_exactly_the_shared_elements() -> None:
    random = np.random.default_rng(1)
    seen_none = False
    for _ in range(500):
        shape = tuple(int(size) for size in random.integers(2, 7, random.integers(1, 4)))
        boxes, masks = [], []
        for _ in range(2):
            offset = tuple(int(random.integers(0, size)) for size in shape)
            box = Box(
                offset, tuple(int(random.integers(1, size - at + 1)) for size, at in zip(shape, offset, strict=True))
            )
            mask = np.zeros(shape, bool)
            mask[box.slices()] = True
            boxes.append(box)
            masks.append(mask)
        shared, both = intersect(*boxes), masks[0] & masks[1]
        seen_none |= shared is None
        assert (shared is None) == (not both.any())
        if shared is not None:
            mask = np.zeros(shape, bool)
            mask[shared.slices()] = True
            assert (mask == both).all() and shared.num_elements == both.sum()
    assert seen_none


def test_a_shifted_box_keeps_its_shape() -> None:
    assert Box((1, 2), (3, 4)).shifted((10, -2)) == Box((11, 0), (3, 4))
