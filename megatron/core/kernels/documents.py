"""Where the documents of packed rows begin, for kernels that take sequences of different lengths, laid end to end, in the place of a mask.

    documents   0 0 0 1 1 | 0 1 1 1 1     rows of a batch
    starts      0     3     5 6       10   where each document begins, and the end of the last

How many there are is known on the host when a batch is made, and would have to be waited for later: so `remember_starts` counts them there, in numpy, and the
mask of a forward pass finds them by its tensor of documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True, slots=True)
class DocumentStarts:
    """places: int32 [documents + 1], as above. longest: most tokens of a document. tokens: of all rows."""

    places: Tensor
    longest: int
    tokens: int


@cache
def _starts_cache() -> WeakTensorKeyDictionary:
    """Tensors of documents that are still there, and their starts."""
    return WeakTensorKeyDictionary()


def remember_starts(documents: Tensor, on_host: np.ndarray) -> None:
    """Count the documents of a batch on the host. documents: [b, s], contiguous numbers, on their way to a device; on_host: the same numbers."""
    begins = np.ones(on_host.shape, dtype=bool)
    begins[:, 1:] = on_host[:, 1:] != on_host[:, :-1]
    places = np.append(np.flatnonzero(begins), on_host.size).astype(np.int32)
    there = torch.from_numpy(places).to(documents.device, non_blocking=True)
    _starts_cache()[documents] = DocumentStarts(there, int(np.diff(places).max(initial=0)), on_host.size)


def remembered_starts(documents: Tensor | None) -> DocumentStarts | None:
    """Return what was counted of documents [b, s]; None: nothing was."""
    return None if documents is None else _starts_cache().get(documents)


def starts_of(documents: Tensor, known: DocumentStarts | None = None) -> DocumentStarts:
    """Return the starts of documents [b, s], contiguous, every row of which begins a new one. known: what was counted of them, if anything; else the host waits."""
    if known is not None and known.tokens == documents.numel():
        return known
    return DocumentStarts(_find_starts(documents), documents.shape[1], documents.numel())


@lru_cache(maxsize=4)  # all layers of a microbatch ask for the same
def _find_starts(documents: Tensor) -> Tensor:
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = begins.flatten().nonzero()[:, 0]
    return torch.cat((places, places.new_full((1,), documents.numel()))).to(torch.int32)
