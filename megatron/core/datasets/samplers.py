"""Which samples come next, from the number of consumed samples alone; so resuming needs no other state.

A block is one micro batch for every data-parallel rank: `micro_batch_size * num_ranks` samples. Each sampler yields
this rank's lists of sample numbers, one list a micro batch, and so does not care how many micro batches make a step
(the batch may ramp up). `single` takes the samples in the order of the dataset, which is already shuffled, and ends
with it; `cyclic` shuffles anew in every epoch and never ends; `whole` goes through everything once, for an evaluation.
The dataloader type `external` has no sampler: the user's own iterable says what comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron.core.datasets.indexed import DataError

FILL = -1  # stands where the data is over and a micro batch must be filled


def sequential_sampler(
    num_samples: int, *, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Yield this rank's sample numbers of each microbatch, from `consumed_samples` upward; an incomplete last block is
    left out.

    The samples of a global batch are the same for any number of ranks that divides it.
    """
    block = micro_batch_size * num_ranks
    for start in range(consumed_samples, num_samples - block + 1, block):
        first = start + rank * micro_batch_size
        yield list(range(first, first + micro_batch_size))


def cyclic_sampler(
    num_samples: int, *, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int, sharded: bool = True
) -> Iterator[list[int]]:
    """Yield this rank's sample numbers of each microbatch, endlessly, in a new random order each epoch (seeded by its
    number).

    sharded: each rank shuffles its own contiguous part of the dataset; else one order is dealt to the ranks, so a
    global batch within an epoch is the same for any number of them. An epoch is as many whole blocks as the dataset
    has. `DataError` if that is none, or if `consumed_samples` is not at the end of a block.
    """
    block = micro_batch_size * num_ranks
    epoch_samples = num_samples - num_samples % block
    if epoch_samples == 0:
        raise DataError(
            f"{num_samples} samples are fewer than one block of micro batch {micro_batch_size} x "
            f"data-parallel size {num_ranks} = {block}; use more data or fewer ranks"
        )
    epoch, offset = divmod(consumed_samples, epoch_samples)
    if offset % block:
        raise DataError(
            f"{consumed_samples} consumed samples end within a block of micro batch {micro_batch_size} x "
            f"data-parallel size {num_ranks} = {block}: with --dataloader-type cyclic, resume with the "
            "same micro batch and data-parallel size"
        )
    while True:
        if sharded:
            part = epoch_samples // num_ranks
            order = _torch_permutation(part, epoch)[offset // num_ranks :] + rank * part
        else:
            # Whole blocks only: all ranks must start the next epoch at the same step.
            order = _torch_permutation(num_samples - num_samples % micro_batch_size, epoch)[offset:epoch_samples][
                rank::num_ranks
            ]
        for micro_batch in order.reshape(-1, micro_batch_size):
            yield micro_batch.tolist()
        epoch, offset = epoch + 1, 0


def _torch_permutation(size: int, seed: int) -> np.ndarray:
    """The permutation that torch draws. int64 [size]"""
    import torch  # late: the other orders, and the tools that show them, do without

    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(size, generator=generator).numpy()


def single_pass_sampler(
    num_samples: int, *, micro_batch_size: int, rank: int, num_ranks: int, blocks: int
) -> Iterator[list[int]]:
    """Yield this rank's numbers of each of `blocks` microbatches, every sample once; `FILL` when the data has ended."""
    block = micro_batch_size * num_ranks
    assert blocks * block >= num_samples, f"{blocks} blocks of {block} hold {num_samples} samples"
    for start in range(rank * micro_batch_size, blocks * block, block):
        yield [number if number < num_samples else FILL for number in range(start, start + micro_batch_size)]


def collate(samples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack samples to a microbatch: each key's arrays along a new first dimension, [...] -> [b, ...].

    Images are concatenated instead, [n, channels, height, width], as their number varies; `image_slots` are shifted to
    count the rows of all images of the microbatch.
    """
    together = {key: np.stack([sample[key] for sample in samples]) for key in samples[0] if key != "images"}
    if "images" in samples[0]:
        counts = np.cumsum([0, *(int(sample["image_rows"]) for sample in samples[:-1])])
        slots = together["image_slots"]
        together["image_slots"] = np.where(slots >= 0, slots + counts[:, None], -1)
        together["images"] = np.concatenate([sample["images"] for sample in samples])
    return together


def microbatch_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return 16 hex digits of a microbatch: a hash of every key, dtype, shape and content. arrays: any shape."""
    content = hashlib.blake2b(digest_size=8)
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        content.update(f"{key} {array.dtype.str} {array.shape} ".encode())
        content.update(array.tobytes())
    return content.hexdigest()
