"""Where the documents of packed rows begin, for kernels that take sequences of different lengths, laid end to end, in the place of a mask.

    documents   0 0 0 1 1 | 0 1 1 1 1     rows of a batch
    starts      0     3     5 6       10   where each document begins, and the end of the last

How many there are is known on the host when a batch is made, and would have to be waited for later: so `memoize_packed_document_starts` counts them there, in numpy, and the
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
class PackedDocumentStarts:
    """Where the packed documents of a batch [b, s] begin, laid end to end. places: int32 [documents + 1], offset of
    each document's first token, and the number of all tokens (cu_seqlens). longest: length of the longest document in
    tokens, or an upper limit of it. tokens: number of all tokens.
    """

    places: Tensor
    longest: int
    tokens: int


@cache
def _packed_document_starts_cache() -> WeakTensorKeyDictionary:
    """Return the cache from tensors of document numbers to their starts; an entry goes with its tensor."""
    return WeakTensorKeyDictionary()


def memoize_packed_document_starts(documents: Tensor, on_host: np.ndarray) -> None:
    """Compute the document starts of a batch on the host and remember them for `cached_packed_document_starts`.

    documents: [b, s], numbers of documents, each document contiguous, on their way to a device; it is the key of the
    cache. on_host: the same numbers in numpy.
    """
    begins = np.ones(on_host.shape, dtype=bool)
    begins[:, 1:] = on_host[:, 1:] != on_host[:, :-1]
    places = np.append(np.flatnonzero(begins), on_host.size).astype(np.int32)
    there = torch.from_numpy(places).to(documents.device, non_blocking=True)
    _packed_document_starts_cache()[documents] = PackedDocumentStarts(
        there, int(np.diff(places).max(initial=0)), on_host.size
    )


def cached_packed_document_starts(documents: Tensor | None) -> PackedDocumentStarts | None:
    """Return the starts that `memoize_packed_document_starts` computed for this tensor of documents [b, s]; None if it
    computed none.
    """
    return None if documents is None else _packed_document_starts_cache().get(documents)


def document_starts_from_ids(documents: Tensor, known: PackedDocumentStarts | None = None) -> PackedDocumentStarts:
    """Return the document starts of documents [b, s], each contiguous; every row begins a new document.

    known: starts that were computed on the host, used if they are of as many tokens; otherwise they are computed on the
    device, for which the host waits.
    """
    if known is not None and known.tokens == documents.numel():
        return known
    return PackedDocumentStarts(_cu_seqlens_of_document_ids(documents), documents.shape[1], documents.numel())


@lru_cache(maxsize=4)  # all layers of a microbatch ask for the same
def _cu_seqlens_of_document_ids(documents: Tensor) -> Tensor:
    """Compute the offsets of document starts from document numbers [b, s] on their device, int32 [documents + 1]."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = begins.flatten().nonzero()[:, 0]
    return torch.cat((places, places.new_full((1,), documents.numel()))).to(torch.int32)
