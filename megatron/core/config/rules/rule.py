"""One rule between settings: a name, what is said when it is broken, and a sentence on what holds where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.config.flags import flag_name
from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class RuleInput:
    """What rules look at."""

    run: RunConfig
    world_size: int


@dataclass(frozen=True, slots=True)
class Rule:
    """find: what is wrong and how to mend it, one message (empty where nothing is) or several. sentence: what holds where it is kept."""

    name: str
    find: Callable[[RuleInput], str | Iterator[str]]
    sentence: str = ""

    def says(self, setting: RuleInput) -> str:
        """All that is wrong, a line each; an empty string where the rule is kept."""
        messages = self.find(setting)
        return messages if isinstance(messages, str) else "\n  ".join(messages)


def flags_given(config: Any, names: Iterable[str] = (), *, without: Collection[str] = ()) -> list[str]:
    """The flags of a config's fields that are not at their defaults. names: of these fields alone; none: of all but those in `without`."""
    usual = {field.name: field.default for field in fields(config)}
    return [flag_name(name) for name in names or usual if name not in without and getattr(config, name) != usual[name]]


def divisors(value: int, limit: int = 6) -> str:
    """The first divisors of a number, as words."""
    numbers = [str(n) for n in range(1, value + 1) if value % n == 0]
    return ", ".join(numbers[:limit]) + (", ..." if len(numbers) > limit else "")
