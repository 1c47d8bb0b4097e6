"""Which samples each microbatch of a run takes, and how one is read: arithmetic and arrays, without torch.

The training reads by these rules, and `inspect_samples.py` says by them what a step saw or will see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.samplers import (
    FILL,
    collate,
    cyclic_sampler,
    microbatch_digest,
    sequential_sampler,
    single_pass_sampler,
)
from megatron.training.report.run_log import LogFile
from megatron.training.state.microbatches import BatchSchedule


class MapStyleDataset(Protocol):
    """Numbered samples, each a mapping of names to arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


def samples_needed(config: RunConfig, schedule: BatchSchedule) -> tuple[int, int | None, int]:
    """Return how many samples (training, validation or None for --full-validation, test) draw, as in Megatron."""
    train = config.train
    iterations = schedule.num_iterations(train)
    training = train.train_samples if train.train_samples is not None else iterations * train.global_batch_size
    evaluation = train.eval_iters * (train.eval_global_batch_size or train.global_batch_size)
    valid = (iterations // train.eval_interval + 1) * evaluation
    return training, None if config.data.full_validation else valid, evaluation


def stages_read_data(config: RunConfig, stages: Sequence[StageSpec]) -> bool:
    """Whether a rank with these stages reads the data: the first and the last stage, those with MTP or with experts,
    whose losses and loads are of the tokens that are not padding, and all where documents or padding are told apart.
    """
    told_apart = config.data.separates_documents or config.data.restarts_positions or config.model.architecture.pads
    return told_apart or any(
        s.has_embedding or s.has_mtp or s.has_output or any(row.mlp == "moe" for row in s.layers) for s in stages
    )


def microbatch_sample_indices(
    config: RunConfig, num_samples: int, *, consumed_samples: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Yield the sample numbers of each microbatch of one data-parallel rank, from sample `consumed_samples` on."""
    place = {"consumed_samples": consumed_samples, "rank": rank, "num_ranks": num_ranks}
    place["micro_batch_size"] = config.train.micro_batch_size
    if config.data.dataloader_type == "single":
        return sequential_sampler(num_samples, **place)
    return cyclic_sampler(num_samples, **place, sharded=config.data.data_sharding)


def single_pass_microbatch_indices(
    config: RunConfig, num_samples: int, *, full_batch: int, rank: int, num_ranks: int
) -> Iterator[list[int]]:
    """Yield the sample numbers of each microbatch of a data rank, in an evaluation that sees every sample once."""
    unit = config.train.micro_batch_size * num_ranks
    return single_pass_sampler(
        num_samples,
        micro_batch_size=config.train.micro_batch_size,
        rank=rank,
        num_ranks=num_ranks,
        blocks=-(-num_samples // full_batch) * (full_batch // unit),
    )


def read_and_stack_samples(dataset: MapStyleDataset, numbers: Sequence[int]) -> dict[str, np.ndarray]:
    """Read the samples of these numbers, stacked [b, ...]; `FILL` gives a sample without loss."""
    return collate([_read_sample_naming_errors(dataset, number) for number in numbers])


def _read_sample_naming_errors(dataset: MapStyleDataset, number: int) -> dict[str, np.ndarray]:
    """Return a sample, for `FILL` sample 0 with a loss mask of zeros; an error names its number."""
    if number == FILL:
        sample = _read_sample_naming_errors(dataset, 0)
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}
    try:
        return dataset[number]
    except DataError as error:
        raise DataError(f"sample {number}: {error}") from error
    except Exception as error:
        # The message names the sample; the cause keeps the traceback, also out of a reading thread.
        raise RuntimeError(f"sample {number} cannot be read: {type(error).__name__}: {error}") from error


def batch_external_samples(samples: Iterator[dict[str, np.ndarray]], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield microbatches [size, ...] from an external iterable of samples; an incomplete last one is dropped."""
    waiting: list[dict[str, np.ndarray]] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == size:
            yield collate(waiting)
            waiting = []


def require_iterable_dataset(dataset: Any) -> None:
    """Raise `ConfigError` if a dataset for --dataloader-type external is not an iterable."""
    if not hasattr(type(dataset), "__iter__"):
        raise ConfigError(
            f"--dataloader-type external takes iterables of samples from the script's provider, but this one "
            f"gives a {type(dataset).__name__}, which is read by number; choose single or cyclic"
        )


class ReadSamplesLog:
    """Log of the samples that this rank read (`--log-samples`): one JSON line a microbatch, in FOLDER/rank00000.jsonl.
    clock: returns the current iteration. A run that resumes appends.
    """

    def __init__(self, folder: str, *, rank: int, data_rank: int, split: str, clock: Callable[[], int]) -> None:
        self.path = Path(folder) / f"rank{rank:05d}.jsonl"
        self._file = LogFile(self.path, "--log-samples")
        self._fixed = {"split": split, "data_rank": data_rank}
        self._clock = clock
        self._iteration, self._count = -1, 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise ConfigError(
                f"--log-samples {folder} cannot be written: {error.strerror}; give a folder that this user may write"
            ) from error

    def add(self, numbers: Sequence[int] | None, arrays: Mapping[str, np.ndarray]) -> None:
        """Log one more microbatch, arrays [b, ...]; numbers: of its samples, where they have some."""
        now = self._clock()
        self._count = self._count + 1 if now == self._iteration else 0
        self._iteration = now
        line = {**self._fixed, "iteration": now, "microbatch": self._count}
        line |= {"samples": None if numbers is None else list(numbers), "hash": microbatch_digest(arrays)}
        self._file.add(json.dumps(line) + "\n")
