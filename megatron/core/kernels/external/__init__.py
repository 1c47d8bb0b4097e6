"""Kernels of optional packages: flash-attn, Transformer Engine, DeepEP, torchao."""

from __future__ import annotations

from functools import cache
from importlib import import_module


@cache
def import_problem(module: str) -> str:
    """Return the error message if importing an installed module fails (it was compiled for another torch, for
    instance); "" if it can be imported.
    """
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a broken package raises, another kernel is taken or the message tells it
        first_line = (str(error).splitlines() or [""])[0]
        return f"{module} is installed, but importing it fails: {type(error).__name__}: {first_line}"
    return ""
