"""Speculative decoding: a small network guesses the next tokens, and the large one checks all guesses in one pass.

A guess counts only where it is the token that the large network picks itself, with the same random number: so texts are the
same with a draft and without, for every setting, and only the number of passes differs. (Leviathan et al., 2023, accept by a
coin instead, which needs the draft's distribution and changes which tokens a seed gives.) The draft draws with the same numbers,
which makes it guess what the large network will draw.

Both networks store a text under the same table of blocks, each in a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.inference.crew import Crew, Order, Row
from megatron.inference.running import Running

_DRAFT = 1  # number of the draft among the crew's networks

Shares = Sequence[tuple[Running, int]]


class Draft:
    """The second network of a crew, which guesses at most `most` tokens ahead. after: what never follows what."""

    def __init__(self, crew: Crew, most: int, after: Sequence[tuple[int, int]]) -> None:
        self._crew, self._most, self._after = crew, most, after

    def propose(self, chosen: Sequence[Shares]) -> int:
        """Guess for each text that is decoded in the next step, and read what is read by the others; the number of guesses."""
        guesses: dict[int, list[int]] = {one.ticket: [] for shares in chosen for one, _ in shares}
        self._pass(chosen, guesses, self._first)
        for step in range(1, self._most):
            going = [[(one, count) for one, count in shares if one.room(self._most) > step] for shares in chosen]
            if not any(going):
                break
            self._pass(going, guesses, self._next)
        for shares in chosen:
            for one, _ in shares:
                one.drafts = tuple(guesses[one.ticket])
        return sum(map(len, guesses.values()))

    def _pass(self, chosen: Sequence[Shares], guesses: dict[int, list[int]], make: Callable[[Running, int, list[int]], Row]) -> None:
        """One pass of the draft over a row of each text; its guesses are appended."""
        rows = tuple(tuple(make(one, count, guesses[one.ticket]) for one, count in shares) for shares in chosen)
        for shares, found in zip(chosen, self._crew.run(Order(_DRAFT, rows)), strict=True):
            for (one, _), what in zip(shares, found, strict=True):
                guesses[one.ticket] += [max(0, token) for token in what.ids]  # of a draft that has no idea any guess will do

    def _first(self, one: Running, count: int, _: list[int]) -> Row:
        """What the draft has not read of the tokens that the network will have read after the step."""
        end = one.computed + count
        row = Row(tuple(one.ids[one.drafted:end]), one.drafted, tuple(one.blocks))
        one.drafted = end
        return replace(row, wanted=1, draws=one.draws(self._after)) if one.room(self._most) else row

    def _next(self, one: Running, _: int, guessed: list[int]) -> Row:
        """The last guess, to be followed by another."""
        draws = one.draws(self._after)
        seen = (*draws.seen, *guessed) if draws.seen else ()
        row = Row((guessed[-1],), len(one.ids) + len(guessed) - 1, tuple(one.blocks), wanted=1,
                  draws=replace(draws, first=draws.first + len(guessed), seen=seen))
        one.drafted = row.start + 1
        return row
