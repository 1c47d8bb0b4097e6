"""What a body may hold: each field with its kind, its limits and what it is when left out.

    PUT = (Field("tokens_to_generate", integer(0), 64), ...)
    asked = read(PUT, body)          # every field has a value; `Refused` lists all that is wrong

A number is never a boolean, and never NaN or infinite. Unknown fields are refused by name: one that is misspelt would
change nothing, and nobody would know.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any], str]


class Refused(Exception):
    """A call that is not served. status: of HTTP; headers: that go with the answer."""

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


@dataclass(frozen=True, slots=True)
class Field:
    """check: says what a value must be, or nothing when it is that. A field without `needed` may be null, which leaves it out."""

    name: str
    check: Check
    default: Any = None
    needed: bool = False


def read(fields: Sequence[Field], body: bytes, retired: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The value of every field. retired: fields of old, and what to say of them. Raises `Refused` with all that is wrong."""
    body_fields = parse(body)
    known = {field.name: field for field in fields}
    wrong = [message for name, message in (retired or {}).items() if name in body_fields]
    wrong += [
        unknown_field_message(name, known) for name in body_fields if name not in known and name not in (retired or {})
    ]
    values = {}
    for field in fields:
        value = body_fields.get(field.name)
        if value is None and not field.needed:
            values[field.name] = field.default
        elif field.name not in body_fields:
            wrong.append(f"{field.name} argument required")
        else:
            values[field.name] = value
            problem = field.check(value)
            wrong += [f"{field.name} {problem}"] if problem else []
    raise_problems(wrong)
    return values


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one `Refused` that lists all problems, if there are any."""
    stated = [problem for problem in problems if problem]
    if stated:
        raise Refused("; ".join(stated))


def parse(body: bytes) -> dict[str, Any]:
    """The object of a JSON body; `Refused` if it is none."""

    def no_number(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        fields = json.loads(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused("the body must be a JSON object")
    return fields


def unknown_field_message(name: str, known: Iterable[str]) -> str:
    """What to say of a field that there is not."""
    near = difflib.get_close_matches(name[:100], list(known), n=1)
    return f"{name[:100]!r} is not a field" + (f"; is {near[0]} meant?" if near else "")


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    return is_integer(value) and abs(value) < 2**1000 or isinstance(value, float) and math.isfinite(value)


def check_boolean(value: Any) -> str:
    """A check."""
    return "" if isinstance(value, bool) else "must be a boolean value"


def check_text(value: Any) -> str:
    """A check."""
    return "" if isinstance(value, str) else "must be a string"


def accept_any_value(_: Any) -> str:
    """The check of fields that say nothing to the network, or are checked where they are used."""
    return ""


def one_of_check(*values: Any) -> Check:
    """A check for fields of which one value can be served."""
    return lambda value: (
        ""
        if any(type(value) is type(one) and value == one for one in values)
        else (f"can only be {' or '.join(json.dumps(one) for one in values)} here")
    )


def integer_check(low: int | None = None, high: int | None = None, *, rule: str = "") -> Check:
    """A check for whole numbers. said: in words."""
    rule = rule or "must be an integer" + _range_text(low, high)
    return lambda value: (
        "" if is_integer(value) and (low is None or value >= low) and (high is None or value <= high) else rule
    )


def number_check(low: float, high: float, *, above: bool = False, rule: str = "") -> Check:
    """A check for numbers from low, or from above it, to high."""
    rule = rule or "must be a number" + _range_text(low, high)
    return lambda value: "" if is_number(value) and (low < value if above else low <= value) and value <= high else rule


def _range_text(low: float | None, high: float | None) -> str:
    return (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
