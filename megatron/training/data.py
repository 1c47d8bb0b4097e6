"""From datasets to iterators of microbatches.

Which samples come next is a pure function of the consumed samples, so every rank reads for itself: tensor ranks read the
same samples, data-parallel ranks their own, and nothing is broadcast. Stages that need no text read nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from typing import Any, Protocol

import numpy as np

from megatron.core.config.plan import StageSpec
from megatron.core.config.run import RunConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.samplers import collate, cyclic, single
from megatron.training.batch import Batch
from megatron.training.microbatches import BatchSchedule
from megatron.training.run import Run

_AHEAD = 2  # microbatches prepared by each reading thread


class Dataset(Protocol):
    """Numbered samples, each a mapping of names to arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


def samples_needed(config: RunConfig, schedule: BatchSchedule) -> tuple[int, int, int]:
    """How many samples a run draws from its training, validation and test sets (Megatron's counts)."""
    train = config.train
    iterations = schedule.iterations(train.train_samples) if train.train_samples is not None else train.train_iters or 0
    training = train.train_samples if train.train_samples is not None else iterations * train.global_batch_size
    valid = (iterations // train.eval_interval + 1) * train.eval_iters * train.global_batch_size
    return training, valid, train.eval_iters * train.global_batch_size


def needs_text(config: RunConfig, stages: Sequence[StageSpec]) -> bool:
    """Whether a rank with these stages reads the data: ends of the network do, and all when documents are told apart."""
    return any(s.embeds or s.heads for s in stages) or config.data.reset_attention_mask or config.data.reset_position_ids


def microbatches(run: Run, dataset: Dataset | None, *, consumed_samples: int, reads: bool) -> Iterator[Batch]:
    """This rank's microbatches, from the sample after `consumed_samples` on."""
    if dataset is None or not reads:
        return repeat(Batch())
    config, axis = run.config, run.mesh.dp
    sampler: Callable[..., Iterator[list[int]]] = single if config.data.dataloader_type == "single" else cyclic
    indices = sampler(len(dataset), consumed_samples=consumed_samples, micro_batch_size=config.train.micro_batch_size,
                      rank=axis.rank, num_ranks=axis.size)
    arrays = _read_ahead(dataset, indices, config.data.num_workers)
    positions = config.data.reset_position_ids
    return (Batch.from_arrays(array, run.mesh.device, positions=positions) for array in arrays)


def take(batches: Iterator[Batch]) -> Batch:
    """The next microbatch; `DataError` when there is none."""
    try:
        return next(batches)
    except StopIteration:
        raise DataError("the data ended before the run did; train on fewer samples or give more data") from None


def _read_ahead(dataset: Dataset, indices: Iterator[list[int]], num_threads: int) -> Iterator[dict[str, np.ndarray]]:
    """Collated samples in order, prepared by threads while the model computes."""
    def read(numbers: list[int]) -> dict[str, np.ndarray]:
        return collate([dataset[number] for number in numbers])

    if num_threads == 0:
        yield from map(read, indices)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="data") as pool:
        waiting: deque[Future[Any]] = deque()
        for numbers in indices:
            waiting.append(pool.submit(read, numbers))
            if len(waiting) > _AHEAD * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
