"""A hash of the values of a tensor that is a sum over its elements: boxes of it can be hashed by themselves, in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.parallel.boxes import Box

_BLOCK = 1 << 22  # elements that are hashed together
_ODD = 6364136223846793005


def box_hash(values: Tensor, box: Box, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the hash of a box of a tensor, int64 []: a sum over its elements, so hashes of disjoint boxes add up.

    values: the box's values, hashed as bf16. shape: of the whole tensor, which gives each element its position.
    """
    place = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        steps = torch.arange(start, start + size, device=values.device)
        place = place * shape[dim] + steps.view(-1, *(1,) * (len(shape) - 1 - dim))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.to(torch.bfloat16).contiguous().view(torch.int16).flatten()
    for numbers, places in zip(bits.split(_BLOCK), place.expand(box.shape).flatten().split(_BLOCK), strict=True):
        factors = places * _ODD + seed
        total += ((numbers.to(torch.int64) + 40503) * ((factors ^ (factors >> 29)) | 1)).sum()
    return total
