"""Regular expressions of other programs' files, matched against names within a limit of time and memory.

`re` may take for ever: `([a-z]+)+!` against a name of forty letters. What holds no repetition is matched here; anything else in a
process of its own, which is ended after some seconds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

_SECONDS = 5.0
_LONGEST = 10_000  # characters of an expression
# Letters, digits, dots, anchors, classes and escapes: without repetitions and alternatives the time is that of the name's length.
_PLAIN = re.compile(r"(?:[\w.^$-]|\\[.\-_dwDW]|\[[\w-]+\])*")
_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
expressions, names = json.load(sys.stdin)
try:
    print(json.dumps([[name for name in names if re.fullmatch(one, name)] for one in expressions]))
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


class RegexError(ValueError):
    """An expression that is none, or takes too long."""


def names_matching(expressions: Sequence[str], names: Iterable[str]) -> list[set[str]]:
    """Return for each expression the names that `re.fullmatch` matches whole. `RegexError` if that cannot be computed in time."""
    unique = sorted(set(names))
    if any(len(one) > _LONGEST for one in expressions):
        raise RegexError(f"a regular expression has more than {_LONGEST} characters")
    if not all(_PLAIN.fullmatch(one) for one in expressions):
        return [set(matched) for matched in _match_in_child_process(expressions, unique)]
    try:
        return [{name for name in unique if re.fullmatch(one, name)} for one in expressions]
    except re.error as error:
        raise RegexError(f"not a regular expression: {error}") from None


def _match_in_child_process(expressions: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return the names that each expression matches, computed in another process that is ended after some seconds."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([list(expressions), list(names)]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RegexError(f"matching its regular expressions takes more than {_SECONDS:g} seconds") from None
    if child.returncode:
        raise RegexError("matching its regular expressions needs more than 1 GiB or fails")
    result = json.loads(child.stdout)
    if isinstance(result, str):
        raise RegexError(f"not a regular expression: {result}")
    return list(result)
