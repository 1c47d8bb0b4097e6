"""Numbers that may get better and not worse: a measured one, and the limit that holds what was reached."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """A number, and the places that it was counted from."""

    number: float
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limit:
    """What a number must not exceed, and where it is to go.

    step: how finely the limit is written down; numbers that every commit moves a little have a coarse one. A minimum must not
    be undercut instead.
    """

    number: float
    aim: float
    step: float = 1
    is_minimum: bool = False

    def problem(self, measured: Measured) -> str:
        """What is wrong with the number; an empty string when it stands at its limit."""
        got, gained = measured.number, (measured.number - self.number) * (1 if self.is_minimum else -1)
        if gained < 0:
            places = "\n".join(measured.places)
            verb = "fell below" if self.is_minimum else "rose above"
            return f"{got:g} {verb} the limit of {self.number:g} (the aim is {self.aim:g}); undo that:\n{places}"
        if gained >= self.step:
            steps = (math.floor if self.is_minimum else math.ceil)(round(got / self.step, 6))
            return f"better than the limit of {self.number:g}: write {round(steps * self.step, 6):g} into LIMITS to keep it"
        return ""
