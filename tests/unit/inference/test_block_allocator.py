"""Blocks of the cache: never lost, never given twice, and shared only by texts that begin alike."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megatron.inference.block_allocator import BlockAllocator

SIZE = 2
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=11)  # two ids only: many begin alike


class Texts(RuleBasedStateMachine):
    """Texts come, are stored, shared, and go; `stored` says what a block must hold by what was written into it last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(14, SIZE)
        self.tables: list[tuple[list[int], list[int], range]] = []
        self.stored: dict[int, tuple[int, ...]] = {}

    @rule(ids=TEXTS, more=st.integers(0, 8))
    def come(self, ids: list[int], more: int) -> None:
        """A text takes what is stored of its beginning, and blocks for the rest, where it was promised them if it was."""
        shared = self.blocks.take_cached_prefix_blocks(ids)
        assert len(shared) * SIZE < len(ids), "its last token is left to be read"
        for place, block in enumerate(shared):
            assert self.stored[block] == tuple(ids[: (place + 1) * SIZE]), "a block of another text was shared"
        table = list(shared)
        run = self.blocks.reserve_contiguous(self.blocks.num_blocks_for_tokens(len(ids) + more) - len(shared), shared)
        others = {block for *_, other in self.tables for block in other}
        assert (
            not others & set(run)
            and not set(run) & {block for table, *_ in self.tables for block in table}
            and 0 not in run
        )
        while len(table) < self.blocks.num_blocks_for_tokens(len(ids)):
            if not self.blocks.available:
                self.blocks.release(table, run)
                return
            wish = table[-1] + 1 if table else run.start
            table.append(self.blocks.allocate_block(wish) if wish in run else self.blocks.allocate_block())
            assert table[-1] == wish or wish not in run, "nobody has used it, and it was promised"
            self.stored[table[-1]] = tuple(ids[: len(table) * SIZE])
        self.blocks.cache_full_blocks(table, ids, known=0, content=b"")
        self.tables.append((table, ids, run))

    @rule(number=st.integers(0, 20))
    def go(self, number: int) -> None:
        """A text leaves."""
        if self.tables:
            table, _, run = self.tables.pop(number % len(self.tables))
            self.blocks.release(table, run)

    @rule()
    def forget(self) -> None:
        """The weights change."""
        self.blocks.clear_prefix_cache()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        """Used ones and available ones are all there are, and only full ones of equal beginnings are used twice."""
        users = Counter(block for table, *_ in self.tables for block in table)
        assert 0 not in users and len(users) + self.blocks.available == self.blocks.capacity
        for block, count in users.items():
            beginnings = {
                tuple(ids[: (table.index(block) + 1) * SIZE]) for table, ids, _ in self.tables if block in table
            }
            assert count == 1 or len(beginnings) == 1


Texts.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTexts = Texts.TestCase


def test_the_longest_unused_beginning_is_forgotten_first_and_its_end_before_its_start() -> None:
    blocks = BlockAllocator(5, SIZE)
    first, second = [1, 1, 2, 2, 3], [4, 4, 5]
    for ids in (first, second):
        table = [blocks.allocate_block() for _ in range(len(ids) // SIZE)]
        blocks.cache_full_blocks(table, ids, known=0, content=b"")
        blocks.release(table)
    assert (blocks.cached, blocks.available) == (3, 4)
    taken = [blocks.allocate_block(), blocks.allocate_block()]  # the free one, then the second block of the first text
    assert blocks.cached == 2
    blocks.release(taken)
    shared = blocks.take_cached_prefix_blocks(first)
    assert len(shared) == 1 and len(blocks.take_cached_prefix_blocks(second)) == 1


def test_blocks_are_published_as_they_fill() -> None:
    blocks = BlockAllocator(6, SIZE)
    table, ids = [blocks.allocate_block() for _ in range(3)], [1, 2, 3, 4, 5, 6]
    content = blocks.cache_full_blocks(table, ids[:3], known=0, content=b"")
    assert blocks.take_cached_prefix_blocks([*ids, 7]) == table[:1]
    blocks.cache_full_blocks(table, ids, known=1, content=content)
    assert blocks.take_cached_prefix_blocks([*ids, 7]) == table


@pytest.mark.parametrize("tokens, count", [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_so_many_blocks_hold_so_many_tokens(tokens: int, count: int) -> None:
    assert BlockAllocator(4, SIZE).num_blocks_for_tokens(tokens) == count


def test_nothing_is_shared_when_that_is_not_wanted() -> None:
    blocks = BlockAllocator(6, SIZE, sharing=False)
    table = [blocks.allocate_block(), blocks.allocate_block()]
    blocks.cache_full_blocks(table, [1, 2, 3, 4], known=0, content=b"")
    assert blocks.take_cached_prefix_blocks([1, 2, 3, 4, 5]) == []
    blocks.release(table)
    assert (blocks.cached, blocks.available) == (0, 5)


def test_texts_are_promised_neighbours_and_stay_out_of_what_others_are_promised() -> None:
    blocks = BlockAllocator(12, SIZE)
    first, second = blocks.reserve_contiguous(4), blocks.reserve_contiguous(4)
    assert (first, second, blocks.reserve_contiguous(4)) == (range(1, 5), range(5, 9), range(0))
    taken = [blocks.allocate_block(place) for place in (1, 2, 5)]
    others = [blocks.allocate_block() for _ in range(3)]
    assert taken == [1, 2, 5] and others == [9, 10, 11], "what nobody was promised goes first"
    assert blocks.allocate_block() == 3, "then what nobody has used"
    blocks.release(taken[:2], first)
    assert blocks.reserve_contiguous(2) == range(1, 3) and blocks.reserve_contiguous(1) == range(4, 5)


def test_a_text_goes_on_behind_the_beginning_that_it_shares() -> None:
    blocks = BlockAllocator(12, SIZE)
    run, ids = blocks.reserve_contiguous(3), [1, 1, 2, 2, 3]
    table = [blocks.allocate_block(place) for place in run]
    blocks.cache_full_blocks(table, ids, known=0, content=b"")
    blocks.release(table, run)
    shared = blocks.take_cached_prefix_blocks([*ids[:4], 4, 5])
    assert shared == [1, 2] and blocks.reserve_contiguous(4, shared) == range(3, 7)
    assert blocks.reserve_contiguous(5, [5]) == range(0), "somebody else was promised what lies behind"


def test_runs_of_free_blocks_go_before_runs_that_know_something() -> None:
    blocks = BlockAllocator(9, SIZE)
    table = [blocks.allocate_block(place) for place in blocks.reserve_contiguous(4)]
    blocks.cache_full_blocks(table, [1, 1, 2, 2, 3, 3, 4, 4], known=0, content=b"")
    blocks.release(table, range(1, 5))
    assert (
        blocks.reserve_contiguous(4) == range(5, 9)
        and blocks.reserve_contiguous(3) == range(1, 4)
        and blocks.cached == 4
    )
    assert (
        blocks.allocate_block(2) == 2
        and blocks.cached == 3
        and blocks.take_cached_prefix_blocks([1, 1, 2, 2, 3]) == [1]
    )
