"""From datasets to iterators of microbatches.

Which samples come next is a pure function of the consumed samples, so every rank reads for itself: tensor ranks read the
same samples, data-parallel ranks their own, and nothing is broadcast. Stages that need no text read nothing. Reading is
done ahead by threads: copying ids out of mapped files leaves Python's lock free for most of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch

from megatron.core.datasets.indexed import DataError
from megatron.core.parallel import collectives
from megatron.training.data.rebalance import RebalancedBatches
from megatron.training.data.sample_order import (
    MapStyleDataset,
    ReadSamplesLog,
    batch_external_samples,
    microbatch_sample_indices,
    read_and_stack_samples,
    require_iterable_dataset,
    samples_needed,
    single_pass_microbatch_indices,
    stages_read_data,
)
from megatron.training.launch.launch_info import read_launch_info
from megatron.training.state.batch import Batch, require_next_batch
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer

_AHEAD = 2  # microbatches prepared by each reading thread

# Numbered samples; with --dataloader-type external: an iterable of this data-parallel rank's samples, from where the run is.
SampleSource = MapStyleDataset | Iterable[Mapping[str, np.ndarray]]
Datasets = tuple[SampleSource | None, SampleSource | None, SampleSource | None]
DatasetProvider = Callable[[RunContext, tuple[int, int | None, int]], Datasets]
Arrays = dict[str, np.ndarray]


class ClosableBatches(Protocol):
    """Iterator of this rank's microbatches, to be closed."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def close(self) -> None:
        """End the threads that read ahead."""


@dataclass(frozen=True, slots=True)
class SplitBatches:
    """This rank's microbatches of each split; None for a split without data, or never used."""

    train: ClosableBatches | None
    valid: EvaluationData | None
    test: EvaluationData | None

    def drop_training_batches(self, count: int) -> None:
        """Read and drop the next microbatches of the training data."""
        assert self.train is not None, "build_split_batches refuses a run that trains without data"
        for _ in range(count):
            require_next_batch(self.train)

    def close(self) -> None:
        """End the threads that read ahead."""
        for batches in (self.train, *(part.batches for part in (self.valid, self.test) if part is not None)):
            if batches is not None:
                batches.close()


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """The data of a split that is evaluated at intervals. iterations: global batches of an evaluation.
    batches: continues from evaluation to evaluation. once: makes microbatches of all samples, for --full-validation.
    """

    iterations: int
    batches: ClosableBatches
    once: Callable[[], ClosableBatches] | None = None

    @contextmanager
    def open_next_evaluation(self) -> Iterator[tuple[ClosableBatches, int]]:
        """Yield the microbatches of the next evaluation and its number of global batches."""
        if self.once is None:
            yield self.batches, self.iterations
            return
        with closing(self.once()) as batches:
            yield batches, self.iterations


def build_split_batches(trainer: Trainer, provider: DatasetProvider) -> SplitBatches:
    """Build the datasets and this rank's microbatches of each split, from the sample that the counters say on."""
    run, progress, train = trainer.run, trainer.progress, trainer.run.config.train
    reads = stages_read_data(run.config, trainer.specs)
    datasets = _build_datasets_in_order(run, provider, samples_needed(run.config, trainer.batches))
    if datasets[0] is None and not train.skip_train:
        raise DataError("the training split holds no data; give it a share in --split")
    if run.config.data.dataloader_type == "external":
        for dataset in datasets:
            if dataset is not None:
                require_iterable_dataset(dataset)

    def evaluation_data(dataset: SampleSource | None, split: str, consumed: int) -> EvaluationData | None:
        complete = split == "valid" and run.config.data.full_validation
        if dataset is None or not (train.eval_iters or complete):
            return None
        batches = iterate_split_microbatches(run, dataset, split=split, consumed_samples=consumed, reads=reads)
        if not complete:
            return EvaluationData(train.eval_iters, batches)
        full = trainer.batches.evaluation_batch_size
        assert is_map_style(dataset), "a rule refuses --full-validation of what has no length"
        return EvaluationData(
            -(-len(dataset) // full),
            batches,
            once=lambda: single_pass_microbatches(run, dataset, split=split, full_batch=full, reads=reads),
        )

    training = iterate_split_microbatches(
        run, datasets[0], consumed_samples=progress.consumed_train_samples, reads=reads
    )
    # A run that only evaluates has a validation set for one evaluation, and begins at its beginning.
    seen = 0 if train.skip_train else progress.consumed_valid_samples
    return SplitBatches(
        None if datasets[0] is None else training,
        evaluation_data(datasets[1], "valid", seen),
        evaluation_data(datasets[2], "test", 0),
    )


def _build_datasets_in_order(
    run: RunContext, provider: DatasetProvider, counts: tuple[int, int | None, int]
) -> Datasets:
    """Call the provider in turns, so that index caches are built once: by the first rank, then by the first rank of
    each machine, then by the others. Collective.
    """
    world = run.mesh.world
    wave = 0 if world.is_first else 1 if read_launch_info().local_rank == 0 else 2
    datasets: Datasets = (None, None, None)
    for turn in range(3):
        if turn == wave:
            datasets = provider(run, counts)
        collectives.barrier(world)
    return datasets


def is_map_style(dataset: SampleSource) -> TypeGuard[MapStyleDataset]:
    """Whether a dataset has numbered samples (`__getitem__` and `__len__`)."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def iterate_split_microbatches(
    run: RunContext, dataset: SampleSource | None, *, consumed_samples: int, reads: bool, split: str = "train"
) -> ClosableBatches:
    """Return this rank's microbatches from sample `consumed_samples` on, to be closed; empty unless `reads`."""
    if dataset is None or not reads:
        return _empty_batches()
    if run.config.data.dataloader_type == "external":
        assert isinstance(dataset, Iterable), "external data are read in their own order"
        samples = (dict(sample) for sample in dataset)
        arrays = ((None, arrays) for arrays in batch_external_samples(samples, run.config.train.micro_batch_size))
        return _device_batches(run, arrays, split)
    assert is_map_style(dataset), "only external data are not numbered"
    order_of = partial(microbatch_sample_indices, run.config, len(dataset), consumed_samples=consumed_samples)
    return _microbatches_in_sample_order(run, dataset, order_of, split)


def single_pass_microbatches(
    run: RunContext, dataset: MapStyleDataset, *, full_batch: int, reads: bool, split: str
) -> ClosableBatches:
    """Return this rank's microbatches of an evaluation that sees every sample once; the last global batch is padded.
    full_batch: samples of a global batch. reads: whether this rank reads the data; else its batches are empty.
    """
    if not reads:
        return _empty_batches()
    order_of = partial(single_pass_microbatch_indices, run.config, len(dataset), full_batch=full_batch)
    return _microbatches_in_sample_order(run, dataset, order_of, split)


def _microbatches_in_sample_order(
    run: RunContext, dataset: MapStyleDataset, order_of: Callable[..., Iterator[list[int]]], split: str
) -> ClosableBatches:
    """Return this rank's microbatches, all ranks' if sequences are divided. order_of: (rank, num_ranks) -> numbers."""
    regroups, dp = run.config.parallel.hybrid_context_parallel, run.mesh.dp
    order = order_of(rank=0, num_ranks=1) if regroups else order_of(rank=dp.rank, num_ranks=dp.size)
    batches = _device_batches(run, _read_ahead(run, dataset, order), split)
    return RebalancedBatches(batches, run.mesh, run.config) if regroups else batches


def _empty_batches() -> Generator[Batch]:
    """Yield batches without tensors, for ever."""
    yield from repeat(Batch())


def _device_batches(
    run: RunContext, source: Generator[tuple[list[int] | None, Arrays]], split: str
) -> Generator[Batch]:
    """Yield batches on the device, sharded over context ranks; samples are logged when taken, not when read ahead."""
    data, log = run.config.data, None
    if data.log_samples:
        log = ReadSamplesLog(
            data.log_samples,
            rank=run.mesh.world.rank,
            data_rank=run.mesh.dp.rank,
            split=split,
            clock=lambda: run.progress.iteration + (split == "train"),
        )
    with closing(source):
        for numbers, arrays in source:
            if log is not None:
                log.add(numbers, arrays)
            batch = Batch.from_arrays(arrays, run.mesh.device, positions=data.restarts_positions)
            batch = batch if numbers is None else replace(batch, samples=tuple(numbers))
            yield batch.with_future_tokens(
                run.config.model.mtp.mtp_num_layers or 0, per_token=run.config.train.calculate_per_token_loss
            ).shard_over_context(run.mesh.cp)


def _read_ahead(
    run: RunContext, dataset: MapStyleDataset, order: Iterator[list[int]]
) -> Generator[tuple[list[int] | None, Arrays]]:
    """Yield (sample numbers, arrays) in order, read by threads ahead of their use."""
    num_threads = run.config.data.num_workers

    def read_and_pin(numbers: list[int]) -> tuple[list[int], Arrays]:
        arrays = read_and_stack_samples(dataset, numbers)
        return numbers, pin_arrays(arrays) if run.mesh.device.type == "cuda" else arrays

    if num_threads == 0:
        yield from map(read_and_pin, order)
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="data")
    try:
        waiting: deque[Future[Any]] = deque()
        for numbers in order:
            waiting.append(pool.submit(read_and_pin, numbers))
            if len(waiting) > _AHEAD * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def pin_arrays(arrays: Arrays) -> Arrays:
    """Copy arrays (any shape) into pinned memory, from where copies to the device overlap with computation."""
    return {name: torch.from_numpy(array).pin_memory().numpy() for name, array in arrays.items()}
