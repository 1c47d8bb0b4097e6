"""What is moved out of the device's memory while rollouts are sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def offloaded(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Keep the storage of tensors (any shape) in CPU memory, as long as nobody uses them; gives the number of bytes."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    kept = [(storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)) for storage in storages.values()]
    for storage, _ in kept:
        storage.resize_(0)
    try:
        yield sum(copy.nbytes() for _, copy in kept)
    finally:
        for storage, copy in kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
