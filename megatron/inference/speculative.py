"""Speculative decoding: a small network, or layers of the network's own, guess the next tokens, and the network checks
all guesses in one pass.

A guess counts only where it is the token that the large network picks itself, with the same random number: so texts are the
same with a draft and without, for every setting, and only the number of passes differs. (Leviathan et al., 2023, accept by a
coin instead, which needs the draft's distribution and changes which tokens a seed gives.) The draft draws with the same numbers,
which makes it guess what the large network will draw.

Both networks store a text under the same table of blocks, each in a cache of its own. So do the layers of multi-token prediction,
each of them; what they read of the network, its states, is stored beside.

    known          t0 t1 t2 t3           the network has read t0 to t2, and picked t3
    depth 1        t1 t2 t3 > g1         the state of t2 and the vector of t3: what comes after t3
    depth 2        t2 t3 g1 > g2         its last key is that of a guess, and is made again when the token is known
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


class Heads:
    """The network's own layers of multi-token prediction as its draft: depth k guesses the k-th of at most `most` tokens."""

    def __init__(self, crew: Crew, most: int, after: Sequence[tuple[int, int]]) -> None:
        self._crew, self._most, self._after = crew, most, after

    def propose(self, chosen: Sequence[Shares]) -> int:
        """Read what the network has read, and guess for each text that is decoded in the next step; the number of guesses."""
        guesses: dict[int, list[int]] = {one.ticket: [] for shares in chosen for one, _ in shares}
        for depth in range(1, self._most + 1):
            rows = [[(one, row) for one, _ in shares if (row := self._row(one, depth, guesses[one.ticket])).ids] for shares in chosen]
            if not any(rows):
                continue
            found = self._crew.run(Order(0, tuple(tuple(row for _, row in copy) for copy in rows), depth))
            for copy, whats in zip(rows, found, strict=True):
                for (one, _), what in zip(copy, whats, strict=True):
                    guesses[one.ticket] += [max(0, token) for token in what.ids]
        for shares in chosen:
            for one, _ in shares:
                one.drafted, one.drafts = one.computed, tuple(guesses[one.ticket])
        return sum(map(len, guesses.values()))

    def _row(self, one: Running, depth: int, guessed: Sequence[int]) -> Row:
        """The tokens `depth` places ahead of those that this depth has not read, or has read with a guess ahead of them."""
        known = len(one.ids) + len(guessed)
        start, end = max(0, one.drafted - depth + 1), min(one.computed, known - depth)
        ids = tuple(one.ids[start + depth:end + depth]) + tuple(guessed)
        row = Row(ids[:max(0, end - start)], start, tuple(one.blocks))
        if one.room(self._most) < depth:
            return row
        draws = one.draws(self._after)
        return replace(row, wanted=1, draws=replace(draws, first=draws.first + len(guessed), seen=(*draws.seen, *guessed) if draws.seen else ()))
