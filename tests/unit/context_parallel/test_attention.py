"""Attention of pieces under every transport equals attention of the whole: outputs, and gradients of all inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.context_parallel.ring import visible_chunk_pairs
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.kernels.ops.mask import AttentionMaskSpec
from tests.helpers.world import Worlds
from tests.unit.context_parallel import ranks
from tests.unit.context_parallel.ranks import Case

TOLERANCE = 1e-10
KINDS = ("p2p", "a2a", "allgather", "a2a+p2p")
NAMES = ("output", "dq", "dk", "dv", "dsink")
windows = st.none() | st.tuples(st.integers(-1, 6), st.integers(-1, 6))
WORLD_TESTS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    """Any attention that `size` ranks can share: any length, even one with fewer places than ranks."""
    groups = draw(st.sampled_from([1, 2, 4]))
    return Case(
        length=draw(st.integers(1, 26)),
        batch=draw(st.integers(1, 2)),
        heads=4 * draw(st.integers(1, 2)),
        groups=groups,
        value_size=draw(st.sampled_from([6, 4, 8])),
        causal=draw(st.booleans()),
        window=draw(windows),
        documents=draw(st.booleans()),
        padding=draw(st.booleans()),
        sink=draw(st.booleans()),
        softcap=draw(st.none() | st.just(2.0)),
        scale=draw(st.none() | st.just(0.3)),
        inner=draw(st.sampled_from([n for n in (1, 2, 4) if size % n == 0])),
        kernel=draw(st.sampled_from(["fused", "reference"])),
        seed=draw(st.integers(0, 99)),
    )


def compare(world: Worlds, size: int, case: Case, kind: str) -> None:
    """Every rank's result against the reference on one rank."""
    expected = ranks.whole(case)
    for found in world(size).run(ranks.in_pieces, case, kind):
        gaps = {name: float((a - b).abs().max()) for name, a, b in zip(NAMES, found, expected, strict=True)}
        assert all(gap <= TOLERANCE for gap in gaps.values()), f"{kind} over {size} ranks, {case}: {gaps}"


@pytest.mark.parametrize("kind", KINDS)
@WORLD_TESTS
@given(data=st.data())
def test_two_ranks_attend_as_one(world: Worlds, kind: str, data: st.DataObject) -> None:
    compare(world, 2, data.draw(cases(2)), kind)


@pytest.mark.parametrize("kind", KINDS)
@WORLD_TESTS
@given(data=st.data())
def test_four_ranks_attend_as_one(world: Worlds, kind: str, data: st.DataObject) -> None:
    compare(world, 4, data.draw(cases(4)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_eight_ranks_attend_as_one(world: Worlds, kind: str) -> None:
    compare(world, 8, Case(length=37, heads=8, groups=2, value_size=4, documents=True, sink=True, inner=4), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"padding": True, "documents": True, "seed": 3},
        {"window": (0, 0), "length": 19},
        {"window": (4, 0), "groups": 2},
        {"length": 3, "sink": True},
        {"causal": False, "window": (2, 1)},
    ],
    ids=str,
)
def test_corners_that_must_not_be_left_to_chance(world: Worlds, kind: str, changes: dict[str, object]) -> None:
    compare(world, 4, Case(inner=2, **changes), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [0, 2])
def test_a_rank_whose_queries_see_no_key_gives_zero_and_has_no_gradient(world: Worlds, kind: str, hidden: int) -> None:
    case = Case(length=16, window=(0, 0), padding=True, sink=True, inner=2, hidden=hidden)
    compare(world, 4, case, kind)
    output, dq, *_ = world(4).run(ranks.in_pieces, case, kind)[0]
    blind = Zigzag(16, 4).positions_of_rank(hidden, ranks.CPU)
    assert not output[blind].any() and not dq[blind].any() and output.any()


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_near_the_whole_in_fp64(world: Worlds, kind: str) -> None:
    case = Case(length=32, heads=4, groups=2, size=16, value_size=16, inner=2, dtype=torch.bfloat16)
    expected = ranks.whole(
        Case(**{**{field: getattr(case, field) for field in Case.__dataclass_fields__}, "dtype": torch.float64})
    )
    for name, a, b in zip(NAMES, world(4).run(ranks.in_pieces, case, kind)[0], expected, strict=True):
        assert float((a.double() - b).abs().max()) <= 3e-2 * max(1.0, float(b.abs().max())), name


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_keeps_the_mean_of_the_output_and_matches_its_own_gradient(world: Worlds, kind: str) -> None:
    found = world(4).run(ranks.dropout_gap, Case(length=12, groups=2, inner=2), kind, 0.3)
    for slope, difference, one, many in found:
        assert math.isclose(slope, difference, rel_tol=1e-6, abs_tol=1e-7), "the gradient is not that of the same draws"
        assert one > 0.2, "dropout changes an output"
        assert many < one / 10, f"over many draws, dropout leaves the mean as it is: {one} and {many}"


masks = st.builds(AttentionMaskSpec, st.booleans(), windows)


@given(st.integers(0, 60), st.integers(1, 5), masks, st.data())
def test_pairs_of_chunks_cover_what_the_mask_shows_and_never_twice(
    length: int, size: int, mask: AttentionMaskSpec, data: st.DataObject
) -> None:
    cut, rank, source = Zigzag(length, size), *(data.draw(st.integers(0, size - 1)) for _ in range(2))
    queries, keys = cut.positions_of_rank(rank, ranks.CPU), cut.positions_of_rank(source, ranks.CPU)
    seen = mask.as_bool_tensor(length, length, ranks.CPU)[0, 0][queries][:, keys]
    counted = torch.zeros_like(seen, dtype=torch.int64)
    for pair in visible_chunk_pairs(cut.chunk_ranges(rank), cut.chunk_ranges(source), mask):
        part = seen[pair.queries, pair.keys]
        counted[pair.queries, pair.keys] += 1
        if pair.kind == "all":
            assert part.all(), "a pair without a mask shows everything"
        if pair.kind == "causal":
            assert torch.equal(part, torch.ones_like(part).tril()), "a causal pair is the lower triangle"
    assert counted.max() <= 1 if counted.numel() else True
    assert not seen[counted == 0].any(), "what is left out is never seen"


@pytest.mark.parametrize("size", [2, 4])
def test_under_causality_every_step_of_the_ring_is_as_long_for_all_ranks(size: int) -> None:
    cut = Zigzag(16 * size, size)
    for step in range(1, size):
        scored = {
            sum(
                (pair.queries.stop - pair.queries.start) * (pair.keys.stop - pair.keys.start)
                for pair in visible_chunk_pairs(
                    cut.chunk_ranges(rank), cut.chunk_ranges((rank - step) % size), AttentionMaskSpec()
                )
            )
            for rank in range(size)
        }
        assert scored == {16 * 16 // 2}, f"step {step}: {scored}"
