"""Figures of the scripts for a GPU: one JSON line each, in one file, written as soon as they are found.

    BENCHMARK_RESULTS=FILE        where they go; unset: nowhere

A line is {"section": ..., names and figures}. A script that is stopped and called again asks `done` what it has already measured.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "results.jsonl"


def path() -> Path | None:
    """Where lines go; None: nowhere."""
    name = os.environ.get("BENCHMARK_RESULTS")
    return Path(name) if name else None


def read(file: Path | None) -> list[dict[str, Any]]:
    """The lines of a file; of one that was cut off, those that are whole."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    figures = []
    for line in lines:
        try:
            figures.append(json.loads(line))
        except ValueError:
            continue
    return figures


def done(section: str, **names: Any) -> bool:
    """Whether a line of this section with these names is there, of a measurement that did not fail."""
    expected = {"section": section, **names}
    return any(
        "failed" not in line and all(line.get(name) == value for name, value in expected.items())
        for line in read(path())
    )


def add(section: str, **figures: Any) -> None:
    """Print a line, and append it to the file."""
    words = (
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in figures.items()
    )
    print(f"  {section:10} " + "  ".join(words), flush=True)
    keep(section, **figures)


def keep(section: str, **figures: Any) -> None:
    """Append a line to the file, and print nothing."""
    file = path()
    if file is not None:
        append(file, section, **figures)


def append(file: Path, section: str, **figures: Any) -> None:
    """Append a line to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps({"section": section, **figures}, default=str) + "\n")
