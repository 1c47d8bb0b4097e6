"""A checkpoint of any dialect, seen as global tensors under our names: the one door through which weights come in.

    our own folders (store), Hugging Face folders (families), Megatron's legacy files and torch_dist folders

Whoever loads, converts, compares or shows a checkpoint asks a `Source` for boxes and does not know what lies behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.parallel.boxes import Box


@dataclass(frozen=True, slots=True)
class Format:
    """What a checkpoint's tensor looks like: its global shape and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """Global tensors by name, wherever they lie. No process group is needed to read one.

    where: what messages call it, a path as a rule. formats: every tensor, by the names of a saved state
    (`model.<parameter>`, `optimizer.<slot>.<parameter>`, ...). values: everything else that was saved, as JSON has it
    (`run.progress`, ...); empty in a dialect that holds weights only. settings: the settings of the run that saved, by
    field name as in config.json: all of them, or those of the model alone where the dialect says no more.
    """

    @property
    def where(self) -> str:
        """A path as a rule."""

    @property
    def formats(self) -> Mapping[str, Format]:
        """Name -> dtype and shape."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Name -> what JSON has."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Field -> value."""

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, in the dtype it was saved in. Often a view of mapped memory: it is not written to.

        Raises `CheckpointError` that names the file, when it is missing, damaged or ends early.
        """
