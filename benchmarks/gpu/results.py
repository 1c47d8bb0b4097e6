"""Figures of the scripts for a GPU: one JSON line each, in one file, written as soon as they are found.

    BENCHMARK_RESULTS=FILE        where they go; unset: nowhere

A line is {"section": ..., names and figures}. A script that is stopped and called again asks `done` what it has already measured.
`attempt` measures one thing: what fails is written with its reason, and the next follows. After a fault that no later call on the GPU
survives (an illegal address) the process ends with AGAIN, and `calls.py` starts it anew, behind what failed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
AGAIN = 75  # exit code: start me again


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
    """Whether a line of this section with these names is there, of a measurement that did not fail, or failed in this start of the step."""
    expected, start = {"section": section, **names}, os.environ.get("BENCHMARK_TOKEN")
    return any(
        ("failed" not in line or (start is not None and line.get("start") == start))
        and all(line.get(name) == value for name, value in expected.items())
        for line in read(path())
    )


def attempt(section: str, names: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """Measure one thing unless it is known, and write its figures, or why there are none."""
    if done(section, **names):
        return
    try:
        add(section, **names, **measure())
    except Exception as error:  # noqa: BLE001 - whatever a kernel says, the rest is measured
        fail(section, names, error)
    free()


def free() -> None:
    """Give what was measured back to the GPU."""
    import torch  # here, as the verdict needs none

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def fail(section: str, names: dict[str, Any], error: Exception) -> None:
    """Write why there are no figures. Ends the process if the GPU takes no more calls of it."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    add(section, **names, failed=reason, start=os.environ.get("BENCHMARK_TOKEN"))
    if not _gpu_answers():
        print("  the GPU takes no more calls of this process", flush=True)
        os._exit(AGAIN)  # what torch would do at exit could hang


def _gpu_answers() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - of any type, by version
        return False
    return True


def end() -> None:
    """End the process: with 1 if something failed since the step began, so that it is done again."""
    start = os.environ.get("BENCHMARK_TOKEN")
    sys.exit(int(any("failed" in line and line.get("start") == start for line in read(path()) if start is not None)))


def outcomes(lines: list[dict[str, Any]], step: str) -> dict[str, str]:
    """Test -> what it came to last, of a step that runs tests."""
    return {line["test"]: line["outcome"] for line in lines if line["section"] == "test" and line["step"] == step}


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
    with file.open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            cut_off = stream.read(1) != b"\n"  # a line whose writer was ended
            stream.write(b"\n" * cut_off)
        stream.write(json.dumps({"section": section, **figures}, default=str).encode() + b"\n")
