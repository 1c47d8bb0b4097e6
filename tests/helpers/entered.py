"""What code loads and enters while it runs: the modules behind `--help`, the functions of one training step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

LIST_MODULES = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, "")
sys.argv = [sys.argv[1], "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps(sorted(sys.modules)))
"""


@cache
def modules_of_help(root: Path, script: str) -> tuple[str, ...]:
    """Every module that `python script --help` has loaded when it ends."""
    command = [sys.executable, "-c", LIST_MODULES, script]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"--help of {script} failed:\n{done.stderr}"
    return tuple(json.loads(done.stdout))


def entered_per_step(work: Callable[[], object], root: Path, first: str) -> list[frozenset[tuple[str, str, int]]]:
    """Functions (file, name, line) under a folder that are entered from one call of the function named `first` to its next.

    The first set is what came before its first call, the last what came after its last.
    """
    steps: list[set[CodeType]] = [set()]
    prefix = f"{root}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        """Called by Python on every call and return."""
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            if frame.f_code.co_name == first:
                steps.append(set())
            steps[-1].add(frame.f_code)

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(previous)
    return [
        frozenset((code.co_filename.removeprefix(prefix), code.co_qualname, code.co_firstlineno) for code in step)
        for step in steps
    ]
