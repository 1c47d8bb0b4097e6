"""Source: a checkpoint of any format, seen as global tensors under our parameter names.

    our own folders (saved.py), Hugging Face folders (families), Megatron's legacy and torch_dist folders

All code that loads, converts, compares or shows checkpoints reads boxes from a `Source`, whatever its format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.parallel.boxes import Box


@dataclass(frozen=True, slots=True)
class ShapeAndDtype:
    """Global shape and dtype of a checkpoint's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.num_elements * self.dtype.itemsize


class CheckpointSource(Protocol):
    """Global tensors by name. No process group is needed to read one.

    where: name for messages, usually a path. formats: every tensor, by its name in a saved state (`model.<parameter>`,
    `optimizer.<slot>.<parameter>`, ...). values: everything else that was saved, as JSON (`run.progress`, ...); empty
    in formats with weights only. settings: the settings of the run that saved, by field name as in config.json, or only
    those of the model.
    """

    @property
    def where(self) -> str:
        """Name for messages, usually a path."""

    @property
    def formats(self) -> Mapping[str, ShapeAndDtype]:
        """Name -> shape and dtype of every tensor."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Name -> JSON value of everything saved that is no tensor."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Field name -> value of the settings of the run that saved."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor (any shape), in its saved dtype. Often a view of mapped memory: do not write to it.

        Raises `CheckpointError` that names the file if it is missing, damaged or truncated.
        """


class FilteredCheckpointSource:
    """A source with the tensors and values alone that are kept, by their names."""

    def __init__(self, source: CheckpointSource, keep: Callable[[str], bool]) -> None:
        self.where, self.settings, self.read = source.where, source.settings, source.read
        self.formats = {name: one for name, one in source.formats.items() if keep(name)}
        self.values = {name: value for name, value in source.values.items() if keep(name)}
