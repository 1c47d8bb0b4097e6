"""Whether operations may read values of the device on the host. While a CUDA graph is captured they may not, and what a repeated graph
computes must not depend on values of the first time: sizes then follow from shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_READS_FORBIDDEN: ContextVar[bool] = ContextVar("reads_forbidden", default=False)


@contextmanager
def avoid_host_reads() -> Iterator[None]:
    """Context in which `host_may_read` is False, as while a CUDA graph is captured: kernels then take sizes from shapes
    alone.
    """
    token = _READS_FORBIDDEN.set(True)
    try:
        yield
    finally:
        _READS_FORBIDDEN.reset(token)


def host_may_read() -> bool:
    """Return whether values on the device may be read on the host here (False inside `avoid_host_reads`)."""
    return not _READS_FORBIDDEN.get()
