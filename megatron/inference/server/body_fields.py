"""What a body may hold: each field with its kind, its limits and what it is when left out.

    FIELDS = (BodyField("tokens_to_generate", integer_range_check(0), 64), ...)
    fields = read_body_fields(FIELDS, body)          # every field has a value; `RequestRefused` lists all that is wrong

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
_MOST_NAMED = 10  # unknown fields in one message: to look for the one that was meant takes time


class RequestRefused(Exception):
    """A request that the server refuses, answered as an HTTP error. status: of HTTP; headers: of the response."""

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of a JSON body. check: returns what a value must be, or "". needed: null is not the default."""

    name: str
    check: Check
    default: Any = None
    needed: bool = False


def read_body_fields(
    fields: Sequence[BodyField], body: bytes, retired: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the value of every field of a JSON body, defaults included. retired: former fields -> what to say of them.
    Raises one `RequestRefused` with all that is wrong.
    """
    body_fields = parse_json_object(body)
    known = {field.name: field for field in fields}
    wrong = [message for name, message in (retired or {}).items() if name in body_fields]
    taken = {*known, *(retired or {})}
    wrong += _unknown_field_messages([name for name in body_fields if name not in taken], known)
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


def _unknown_field_messages(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return a message for each unknown field, the last one for all that are too many."""
    left_out = len(names) - _MOST_NAMED
    messages = [unknown_field_message(name, known) for name in names[:_MOST_NAMED]]
    return messages + [f"{left_out} more are no fields"] * (left_out > 0)


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one `RequestRefused` that lists the non-empty problems, if there are any."""
    stated = [problem for problem in problems if problem]
    if stated:
        raise RequestRefused("; ".join(stated))


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object; `RequestRefused` if it is none."""

    def refuse_nonfinite(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        fields = json.loads(body, parse_constant=refuse_nonfinite)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise RequestRefused(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestRefused("the body must be a JSON object")
    return fields


def unknown_field_message(name: str, known: Iterable[str]) -> str:
    """Return a message for an unknown field, with the known one that is spelled most like it."""
    near = difflib.get_close_matches(name[:100], list(known), n=1)
    return f"{name[:100]!r} is not a field" + (f"; is {near[0]} meant?" if near else "")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    return is_integer(value) and abs(value) < 2**1000 or isinstance(value, float) and math.isfinite(value)


def boolean_problem(value: Any) -> str:
    """Return what is wrong if a value is no boolean, else ""."""
    return "" if isinstance(value, bool) else "must be a boolean value"


def text_problem(value: Any) -> str:
    """Return what is wrong if a value is no string, else ""."""
    return "" if isinstance(value, str) else "must be a string"


def no_problem(_: Any) -> str:
    """Return "": the check of fields that are ignored, or checked where they are used."""
    return ""


def one_of_check(*values: Any) -> Check:
    """Return a check for fields that may only have one of these values."""
    return lambda value: (
        ""
        if any(type(value) is type(one) and value == one for one in values)
        else (f"can only be {' or '.join(json.dumps(one) for one in values)} here")
    )


def integer_range_check(low: int | None = None, high: int | None = None, *, rule: str = "") -> Check:
    """Return a check for integers from `low` to `high`. rule: the message, if not the standard one."""
    rule = rule or "must be an integer" + _range_text(low, high)
    return lambda value: (
        "" if is_integer(value) and (low is None or value >= low) and (high is None or value <= high) else rule
    )


def number_range_check(low: float, high: float, *, above: bool = False, rule: str = "") -> Check:
    """Return a check for numbers from `low` (`above`: greater) to `high`. rule: the message, if another."""
    rule = rule or "must be a number" + _range_text(low, high)
    return lambda value: "" if is_number(value) and (low < value if above else low <= value) and value <= high else rule


def _range_text(low: float | None, high: float | None) -> str:
    return (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
