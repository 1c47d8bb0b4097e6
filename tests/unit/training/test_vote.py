"""Votes of several ranks: an answer at once, or one call late."""

from __future__ import annotations

from megatron.core.parallel.late_reduction import LaggedIntegerReduction
from tests.helpers import tiny
from tests.helpers.world import Worlds


def _votes(rank_that_says_yes: int) -> tuple[list[bool], bool]:
    """On every rank: three polls, in the second of which one rank says yes; then a question that it alone answers with yes."""
    mesh = tiny.run_of(tiny.config(2)).mesh
    vote = LaggedIntegerReduction(mesh.world, mesh.device, "max", first=0)
    yes = mesh.world.rank == rank_that_says_yes
    polls = [bool(vote.start_and_return_previous(answer)) for answer in (False, yes, False, False)]
    return polls, bool(vote.reduce_and_wait(yes))


def test_a_poll_gives_the_answer_of_the_call_before_on_every_rank(world: Worlds) -> None:
    assert world(2).run(_votes, 1) == [([False, False, True, False], True)] * 2


def test_a_rank_alone_answers_itself_at_once() -> None:
    mesh = tiny.run_of(tiny.config(1)).mesh
    vote = LaggedIntegerReduction(mesh.world, mesh.device, "max", first=0)
    assert [vote.start_and_return_previous(True), vote.reduce_and_wait(False)] == [True, False]
