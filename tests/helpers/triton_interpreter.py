"""Whether Triton's interpreter can run kernels here."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import numpy
import pytest


def missing_interpreter(triton: str, numpy_version: str) -> str:
    """Why it cannot, or "". triton: its version, "" without it. Interpreters before 3.7 take no numpy from 2.4 on (triton issue 9171)."""
    if not triton:
        return "triton is not installed: pip install triton"
    old, new = (tuple(int(part) for part in one.split(".")[:2]) for one in (triton, numpy_version))
    return (
        f"the interpreter of triton {triton} takes no numpy {numpy_version}" if old < (3, 7) and new >= (2, 4) else ""
    )


REASON = missing_interpreter(version("triton") if find_spec("triton") else "", numpy.__version__)
needs_triton = pytest.mark.skipif(bool(REASON), reason=REASON)
