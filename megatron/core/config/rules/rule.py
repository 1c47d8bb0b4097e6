"""One rule between settings: a name, what is said when it is broken, and a sentence on what holds where it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class RuleInput:
    """What rules look at."""

    run: RunConfig
    world_size: int


@dataclass(frozen=True, slots=True)
class Rule:
    """`says` returns what is wrong and how to mend it, or an empty string. sentence: what holds where it is kept."""

    name: str
    says: Callable[[RuleInput], str]
    sentence: str = ""


def divisors(value: int, limit: int = 6) -> str:
    """The first divisors of a number, as words."""
    numbers = [str(n) for n in range(1, value + 1) if value % n == 0]
    return ", ".join(numbers[:limit]) + (", ..." if len(numbers) > limit else "")
