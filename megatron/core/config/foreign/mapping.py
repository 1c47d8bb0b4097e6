"""Reading a mapping that another program wrote: every key is understood, known to change nothing here, or refused by name.

    keys = ForeignMapping(config, harmless={"revision": "says where the base was fetched"}, defaults={"lora_bias": False})
    rank = keys.positive_int("r", 8)
    problems = keys.all_problems()        # of the keys taken, and of every key that is left over

A key that nobody here knows may change what the file means, so it is never passed over, unless it is off (null, false or
empty) or has the value at which the other program does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_ADVICE = "is unknown here and may change the result; if it does not, take it out"
_LONGEST = 80  # characters of a value that a message shows


class ForeignMapping:
    """A mapping of another program, taken key by key. mapping: all of it. problems: what is wrong or has no counterpart, a line each.

    harmless: key -> why it changes nothing here. defaults: key -> the value at which it does nothing; another is refused.
    advice: what a problem says of a key that nobody knows. A key that is missing or of a wrong kind is noted, and something
    harmless is returned, so that all are found at once.
    """

    def __init__(
        self,
        mapping: Mapping[str, Any],
        *,
        harmless: Collection[str] = (),
        defaults: Mapping[str, Any] = _NOTHING,
        advice: str = _ADVICE,
    ) -> None:
        self.mapping = mapping
        self._left = {name: value for name, value in mapping.items() if name not in harmless}
        self._defaults = defaults
        self._advice = advice
        self.problems: list[str] = []

    def positive_int(self, name: str, default: int | None = None) -> int:
        """Take a positive integer; null counts as missing. A problem is noted, and 1 returned, for anything else."""
        value = self._pop_or_default(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problems.append(f"{name}: {short_value(value)} is not a positive whole number")
        return 1

    def positive_int_or_none(self, name: str) -> int | None:
        """Take a positive integer, or return None if the key is missing or null."""
        return self.positive_int(name) if self._left.get(name) is not None else self.pop_or_none(name)

    def non_negative_float(self, name: str, default: float | None = None, *, positive: bool = False) -> float:
        """Take a finite number from 0 on, with `positive` above 0. A problem is noted, and 1.0 returned, for others."""
        value = self._pop_or_default(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Whole numbers of JSON have no limit, and one beyond the range of floats is no finite number either.
        if is_number and abs(value) < 10**308 and math.isfinite(value) and (value > 0 or value == 0 and not positive):
            return float(value)
        self.problems.append(
            f"{name}: {short_value(value)} is not a {'positive number' if positive else 'number from 0 on'}"
        )
        return 1.0

    def boolean(self, name: str, default: bool) -> bool:
        """Take true or false; null is false, as programs in Python take it. A problem is noted for anything else."""
        value = self._left.pop(name, default)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{name}: {short_value(value)} is neither true nor false")
        return value is True

    def text(self, name: str, default: str | None = None) -> str:
        """Take a string; null counts as missing. A problem is noted, and "" returned, for anything else."""
        value = self._pop_or_default(name, default)
        if isinstance(value, str):
            return value
        self.problems.append(f"{name}: {short_value(value)} is not a text")
        return ""

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """Take a value; a problem is noted if it is not among those allowed. default: if the key is missing or null; of a
        switch, null is false.
        """
        value = self._left.pop(name, default)
        if value is None:
            value = False if isinstance(default, bool) else default
        if value not in allowed:
            self.problems.append(
                f"{name}: {short_value(value)} has no counterpart here; "
                f"{' or '.join('null' if one is None else short_value(one) for one in allowed)} has"
            )
        return value

    def pop_or_none(self, name: str) -> Any:
        """Take a value as it is; None if it is missing."""
        return self._left.pop(name, None)

    def ignore_keys(self, *names: str) -> None:
        """Ignore these keys, as they change nothing; without names, all keys not yet taken."""
        self._left = {name: value for name, value in self._left.items() if names and name not in names}

    def set_key_defaults(self, **usual: Any) -> None:
        """Set values for keys that are missing."""
        self._left = {**usual, **self._left}

    def all_problems(self, silent: Collection[str] = ()) -> list[str]:
        """All problems, those of keys that nobody asked for included, but for those that are silent about the result."""
        strangers = [
            f"{name}: {short_value(self._left[name])} {self._advice}" for name in self.keys_left() if name not in silent
        ]
        return self.problems + strangers

    def keys_left(self) -> list[str]:
        """The keys that nobody asked for, and that may change the result."""
        return [name for name, value in self._left.items() if not self._does_nothing(name, value)]

    def _does_nothing(self, name: str, value: Any) -> bool:
        if name in self._defaults:
            return value is None or bool(value == self._defaults[name])
        return value is None or value is False or isinstance(value, (dict, list)) and not value

    def _pop_or_default(self, name: str, default: Any) -> Any:
        value = self._left.pop(name, None)
        return default if value is None else value


def short_value(value: Any) -> str:
    """Return a value as a message shows it, shortened: a foreign file may hold anything."""
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        return "a whole number of more than 80 digits"  # Python refuses to write numbers of thousands of digits
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
