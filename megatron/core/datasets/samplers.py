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
    """Samples from `consumed_samples` upward, a block at a time; a last block that is not full is left out.

    The samples of a global batch are the same for any number of ranks that divides it.
    """
    block = micro_batch_size * num_ranks
    for start in range(consumed_samples, num_samples - block + 1, block):
        first = start + rank * micro_batch_size
        yield list(range(first, first + micro_batch_size))


def cyclic_sampler(
    num_samples: int, *, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int, sharded: bool = True
) -> Iterator[list[int]]:
    """A new random order every epoch, seeded by the epoch's number, for ever.

    sharded: each rank shuffles a contiguous part of the dataset of its own; otherwise one order is dealt to the ranks,
    and a global batch within an epoch holds the same samples for any number of them. An epoch is as many whole blocks as
    the dataset holds.
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
    """Every sample once, in `blocks` micro batches on each rank; where the data is over stands `FILL`."""
    block = micro_batch_size * num_ranks
    assert blocks * block >= num_samples, f"{blocks} blocks of {block} hold {num_samples} samples"
    for start in range(rank * micro_batch_size, blocks * block, block):
        yield [number if number < num_samples else FILL for number in range(start, start + micro_batch_size)]


def collate(samples: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Samples to one micro batch: every key's arrays stacked along a new first dimension. [...] -> [b, ...]

    Images are laid end to end, [n, channels, height, width]: a sample may have any number. So the slots of a sample, which count
    the rows of its own images, go on counting from those of the samples before.
    """
    together = {key: np.stack([sample[key] for sample in samples]) for key in samples[0] if key != "images"}
    if "images" in samples[0]:
        counts = np.cumsum([0, *(int(sample["image_rows"]) for sample in samples[:-1])])
        slots = together["image_slots"]
        together["image_slots"] = np.where(slots >= 0, slots + counts[:, None], -1)
        together["images"] = np.concatenate([sample["images"] for sample in samples])
    return together


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return 16 hex digits that identify a microbatch:

    a hash of every key, dtype, shape and content. arrays: any shape.
    """
    content = hashlib.blake2b(digest_size=8)
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        content.update(f"{key} {array.dtype.str} {array.shape} ".encode())
        content.update(array.tobytes())
    return content.hexdigest()
