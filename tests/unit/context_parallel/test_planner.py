"""The plan that divides sequences by their length, against what is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.context_parallel.sequence_assignment import (
    SequenceAssignment,
    assign_sequences_to_ranks,
    context_ranks_needed,
    sequence_cost,
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, float]:
    """Lengths that fit, ranks, the limit of one, and the weight of the linear part."""
    ranks, limit = draw(st.integers(1, 12)), draw(st.integers(1, 30))
    lengths = draw(st.lists(st.integers(1, limit * 2 ** (ranks.bit_length() - 1)), max_size=40))
    return lengths, ranks, limit, draw(st.sampled_from([0.0, 50.0]))


def plan_of(problem: tuple[list[int], int, int, float]) -> SequenceAssignment:
    lengths, ranks, limit, linear = problem
    return assign_sequences_to_ranks(lengths, ranks=ranks, limit=limit, linear=linear)


@given(problems())
def test_every_sequence_is_in_one_share_of_a_block_that_its_length_deserves(
    problem: tuple[list[int], int, int, float],
) -> None:
    lengths, ranks, limit, _ = problem
    plan = plan_of(problem)
    assert sorted(number for share in plan.shares for number in share.sequences) == list(range(len(lengths)))
    for share in plan.shares:
        assert (
            share.first % share.size == 0 and share.first + share.size <= ranks and share.size & (share.size - 1) == 0
        )
        assert sum(lengths[number] for number in share.sequences) <= limit * share.size, (
            "no rank holds more than the limit"
        )
        for number in share.sequences:
            fewer = share.size // 2
            assert fewer == 0 or lengths[number] > limit * fewer, "half as many ranks would not hold it"


@given(problems())
def test_loads_are_the_work_of_the_shares(problem: tuple[list[int], int, int, float]) -> None:
    lengths, ranks, _, linear = problem
    plan = plan_of(problem)
    if ranks & (ranks - 1) == 0:  # else a block may wait for one that is no part of a larger
        for rank in range(ranks):
            own = sum(
                sequence_cost(lengths[number], linear) / share.size
                for share in plan.shares
                if share.includes_rank(rank)
                for number in share.sequences
            )
            assert plan.loads[rank] == pytest.approx(own)
    assert plan.balance == pytest.approx(sum(plan.loads) / ranks / max(plan.loads) if lengths else 1.0)


@given(problems())
def test_no_rank_has_more_to_do_than_the_mean_and_one_sequence(problem: tuple[list[int], int, int, float]) -> None:
    lengths, ranks, limit, linear = problem
    plan = plan_of(problem)
    if lengths and ranks & (ranks - 1) == 0:
        one = max(sequence_cost(length, linear) / context_ranks_needed(length, limit) for length in lengths)
        assert max(plan.loads) <= sum(plan.loads) / ranks + one + 1e-6


def test_the_plan_of_the_docstring() -> None:
    plan = assign_sequences_to_ranks([15, 7, 4, 4, 3, 1], ranks=8, limit=4)
    assert [(share.first, share.size, share.sequences) for share in plan.shares] == [
        (0, 4, (0,)),
        (4, 2, (1,)),
        (6, 1, (2,)),
        (7, 1, (3,)),
        (6, 1, (4,)),
        (7, 1, (5,)),
    ]


def test_equal_short_sequences_are_shared_out_evenly() -> None:
    plan = assign_sequences_to_ranks([5] * 32, ranks=8, limit=10)
    assert plan.balance == 1.0 and len(plan.shares) == 16, "two go into each microbatch"
    assert all(share.size == 1 and len(share.sequences) == 2 for share in plan.shares)


def test_a_sequence_longer_than_all_ranks_hold_is_refused() -> None:
    with pytest.raises(AssertionError, match="41 positions does not fit on 4 ranks of 10"):
        assign_sequences_to_ranks([41], ranks=4, limit=10)
