"""Whether Triton's interpreter can run kernels here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

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


@contextmanager
def interpreted(*files: str) -> Iterator[dict[str, ModuleType]]:
    """Files of megatron/core/kernels, such as "triton.norm", imported anew so that their kernels are interpreted, as tensors are on a CPU."""
    names = {file: f"megatron.core.kernels.{file}" for file in files}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if type(import_module("triton.language").sum).__name__ != "InterpretedFunction":
            pytest.skip("triton was imported without its interpreter before; run this file with TRITON_INTERPRET=1")
        for name in names.values():
            patch.delitem(sys.modules, name, raising=False)
        yield {file: import_module(name) for file, name in names.items()}
        for name in names.values():
            patch.delitem(sys.modules, name, raising=False)
