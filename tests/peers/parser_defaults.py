"""The complete namespaces of Megatron-LM's parsers, by release: 455 names in 0.12.3, 837 in the newest. Every checkpoint holds one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "arguments.json.gz"


@cache
def parser_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Release -> the name and the default of every argument."""
    return json.loads(gzip.decompress(FILE.read_bytes()))


def complete_arguments(release: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run: the parser's defaults, and what was given. Raises `KeyError` for names that the release lacks."""
    defaults = parser_defaults()[release]
    if strangers := given.keys() - defaults.keys():
        raise KeyError(f"Megatron-LM {release} has no {', '.join(sorted(strangers))}")
    return {**defaults, **given}
