"""What a planted mistake is, and what several of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.core.distributed import finalize
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.parallel import collectives

Row = tuple[str, str]


@dataclass(frozen=True)
class Defect:
    """patches: what to replace, as (owner, name, replacement). rows: rows of the table that must notice."""

    name: str
    rows: tuple[Row, ...]
    patches: tuple[tuple[Any, str, Any], ...]


def collectives_with(**replaced: Callable[..., Any]) -> SimpleNamespace:
    """The collectives as one module sees them, some of them replaced, all of which exist."""
    assert not replaced.keys() - vars(collectives).keys(), (
        f"no collective is called {replaced.keys() - vars(collectives).keys()}"
    )
    return SimpleNamespace(**{**vars(collectives), **replaced})


def nothing(*_: Any, **__: Any) -> None:
    """Instead of something."""
    return None


def sum_replicated_but(left_out: Callable[[OwnedSegment], bool]) -> Callable[..., None]:
    """`sum_replicated_grads` that leaves some parameters out."""
    whole = finalize.sum_replicated_grads
    return lambda segments, mesh: whole([segment for segment in segments if not left_out(segment)], mesh)
