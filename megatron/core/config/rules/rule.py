"""One rule between settings: a name, what is said when it is broken, and a sentence on what holds where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core.config.plan.layers import nearest_multiples_text
from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class ConfigRuleInput:
    """What a rule is given: the resolved config and the number of ranks."""

    run: RunConfig
    world_size: int


Find = Callable[[ConfigRuleInput], str | Iterator[str]]


@dataclass(frozen=True, slots=True)
class Rule:
    """find: what is wrong and how to mend it, one message (empty where nothing is) or several. needs_sizes: whether it
    can only be asked once sizes are known to be there and positive.
    """

    name: str
    find: Find
    needs_sizes: bool

    @property
    def sentence(self) -> str:
        """What holds where the rule is kept: the docstring of `find`."""
        return " ".join((self.find.__doc__ or "").split()).rstrip(".")

    def problem_message(self, setting: ConfigRuleInput) -> str:
        """Return all that is wrong by this rule, a line for each problem; "" if the rule is kept."""
        messages = self.find(setting)
        return messages if isinstance(messages, str) else "\n  ".join(messages)


def config_rule(name: str, *, needs_sizes: bool = False) -> Callable[[Find], Rule]:
    """Return the decorator that makes a `Rule` of a function, whose docstring says what holds where the rule is kept."""
    return lambda find: Rule(name, find, needs_sizes)


def division_problem(size: str, value: int, over: str, parts: int) -> Iterator[str]:
    """Yield that a size, by its flag, cannot be divided over so many ranks, if so, with the nearest values that can."""
    if value % parts:
        yield f"{size} {value} cannot be divided over {over}; choose {nearest_multiples_text(value, parts)}"


def divisors_text(value: int, limit: int = 6) -> str:
    """Return the first `limit` divisors of a number as text, such as "1, 2, 3, 6"."""
    numbers = [str(n) for n in range(1, value + 1) if value % n == 0]
    return ", ".join(numbers[:limit]) + (", ..." if len(numbers) > limit else "")
