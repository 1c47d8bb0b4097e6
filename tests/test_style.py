"""The formatter and the linter have nothing to say; the type checker, which takes a minute, is asked nightly."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(module: str, *arguments: str) -> None:
    """Run a tool over the repository; its findings are the message of the failure."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; requirements-dev.txt has it")
    result = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("arguments", [("check", "."), ("format", "--check", ".")], ids=" ".join)
def test_ruff_has_no_findings(arguments: tuple[str, ...]) -> None:
    run("ruff", *arguments)


@pytest.mark.nightly
def test_mypy_has_no_findings() -> None:
    run("mypy")
