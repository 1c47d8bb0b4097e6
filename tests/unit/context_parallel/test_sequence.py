from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.context_parallel.zigzag import Zigzag

CPU = torch.device("cpu")
cuts = st.builds(Zigzag, st.integers(0, 200), st.integers(1, 12))


def test_four_ranks_hold_a_chunk_from_each_end() -> None:
    cut = Zigzag(16, 4)
    assert [cut.positions_of_rank(rank, CPU).tolist() for rank in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


@given(cuts)
def test_every_place_belongs_to_one_rank(cut: Zigzag) -> None:
    places = [cut.positions_of_rank(rank, CPU) for rank in range(cut.size)]
    assert torch.cat(places).sort().values.tolist() == list(range(cut.length))
    assert [len(own) for own in places] == cut.position_counts_by_rank()
    assert max(cut.position_counts_by_rank()) - min(cut.position_counts_by_rank()) <= 2


@given(st.integers(1, 20), st.integers(1, 12))
def test_all_ranks_score_the_same_number_of_causal_pairs(chunk: int, size: int) -> None:
    cut = Zigzag(2 * size * chunk, size)
    pairs = {int((cut.positions_of_rank(rank, CPU) + 1).sum()) for rank in range(size)}
    assert len(pairs) == 1, f"pairs differ between ranks: {pairs}"


@given(cuts)
def test_pieces_laid_end_to_end_and_put_in_order_are_the_whole(cut: Zigzag) -> None:
    whole = torch.arange(3 * cut.length).view(3, cut.length)
    pieces = torch.cat([cut.shard(whole, rank, dim=1) for rank in range(cut.size)], dim=1)
    assert torch.equal(pieces[:, cut.sorting_permutation(range(cut.size), CPU)], whole)
    assert torch.equal(cut.shard(whole, 0, dim=1), whole[:, cut.positions_of_rank(0, CPU)])


@given(st.integers(0, 100), st.integers(1, 4), st.integers(1, 4))
def test_neighbours_together_hold_the_chunks_of_the_coarser_cut(length: int, inner: int, outer: int) -> None:
    cut = Zigzag(length, inner * outer)
    for block in range(outer):
        held = torch.cat([cut.positions_of_rank(rank, CPU) for rank in range(block * inner, (block + 1) * inner)])
        assert held.sort().values.tolist() == cut.with_merged_ranks(inner).positions_of_rank(block, CPU).tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_a_sequence_shorter_than_the_ranks_leaves_some_without_places(size: int) -> None:
    assert sum(Zigzag(1, size).position_counts_by_rank()) == 1
