"""What a step saw or will see, worked out from a run's settings alone: no model, no training, no torch.

    a step  ->  consumed samples (BatchSchedule)  ->  each rank's sample numbers (sample_order.py)  ->  documents (sources)
    a document  ->  the samples that hold it (`samples_with_document`)  ->  where these come in the order  ->  steps

Every arrow is the code, or the inverse of the code, that the run itself reads by. A run that resumed with the settings it
began with goes on in the same order, and needs nothing more; one that resumed with another batch size is given the
counters it resumed from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.blend import BlendedDataset, build_split_datasets
from megatron.core.datasets.data_splits import SPLITS
from megatron.core.datasets.dataset_protocols import TokenSpan
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.kinds import KINDS
from megatron.core.datasets.samplers import FILL, microbatch_digest
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.data.sample_order import (
    microbatch_sample_indices,
    read_and_stack_samples,
    samples_needed,
    single_pass_microbatch_indices,
)
from megatron.training.state.microbatches import BatchSchedule

# What samples hold whose texts are masked, and no longer lie piece by piece.
WHOLE_TEXTS = ("text", "text_enc", "text_dec")


@dataclass(frozen=True, slots=True)
class ResumeCounters:
    """The counters that a run begins with (0), or resumed from."""

    iteration: int = 0
    train_samples: int = 0
    valid_samples: int = 0


@dataclass(frozen=True, slots=True)
class SampleDescription:
    """One sample of a microbatch; `sample` None is padding at the end of a full validation, without loss.
    dataset, dataset_sample: the blend's source, and the number there. texts: of a masked sample, by array name. loss:
    ranges of positions. position_restarts, attention_restarts: where position ids or the mask start anew.
    """

    sample: int | None
    dataset: int
    dataset_sample: int
    pieces: tuple[TokenSpan, ...]
    texts: dict[str, str]
    loss: tuple[tuple[int, int], ...]
    position_restarts: tuple[int, ...]
    attention_restarts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicrobatchDescription:
    """What one data-parallel rank reads as one microbatch. hash: as --log-samples writes it."""

    split: str
    step: int
    microbatch: int
    data_rank: int
    hash: str
    samples: tuple[SampleDescription, ...]


@dataclass(frozen=True, slots=True)
class DocumentOccurrence:
    """One place where the run reads a document: split, step, microbatch, data-parallel rank, sample."""

    split: str
    step: int
    microbatch: int
    data_rank: int
    sample: int


class RunDataInspector:
    """Tells which samples each step of a run over `world_size` ranks reads. Datasets are opened when first asked about."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        *,
        world_size: int,
        entry: str,
        start: ResumeCounters = ResumeCounters(),
    ) -> None:
        if config.data.dataloader_type == "external":
            raise ConfigError(
                "--dataloader-type external: what comes is up to the script's own iterables; --log-samples "
                "records the hashes of what came"
            )
        self.config, self.tokenizer, self.start = config, tokenizer, start
        self.kind = KINDS[entry](config, tokenizer)
        self.num_ranks = config.parallel.data_parallel_size(world_size)
        self.schedule = BatchSchedule.build(
            config.train, data_parallel_size=self.num_ranks, seq_length=config.train.seq_length
        )
        self.schedule.require_divisible_sizes(start.train_samples)
        self.num_iterations = self.schedule.num_iterations(config.train)
        self._opened: dict[str, Any] = {}

    def dataset(self, split: str) -> Any:
        """Return the dataset of a split, opened once; `DataError` if the run has none."""
        if split not in self._opened:
            counts = samples_needed(self.config, self.schedule)
            train, valid, test = (count if name == split else 0 for name, count in zip(SPLITS, counts))
            self._opened[split] = build_split_datasets(self.config.data, self.kind, (train, valid, test))[
                SPLITS.index(split)
            ]
        if self._opened[split] is None:
            raise DataError(f"the run has no {split} data, or asks for none of it")
        return self._opened[split]

    def sample_numbers(self, split: str, step: int) -> list[list[list[int]]]:
        """Return the sample numbers of a step's microbatches: `[data-parallel rank][microbatch][sample]`."""
        size = len(self.dataset(split))
        if split == "valid" and self.config.data.full_validation:
            self._evaluations_at_iteration(split, step)
            order_of = partial(
                single_pass_microbatch_indices, self.config, size, full_batch=self.schedule.evaluation_batch_size
            )
            return [list(order_of(rank=rank, num_ranks=self.num_ranks)) for rank in range(self.num_ranks)]
        taken: list[list[list[int]]] = [[] for _ in range(self.num_ranks)]
        for consumed, count in self._consumed_and_microbatch_counts(split, step):
            for numbers, order in zip(taken, self._orders_of_ranks(size, consumed), strict=True):
                numbers += islice(order, count)
        return taken

    def _orders_of_ranks(self, size: int, consumed: int) -> list[Iterator[list[int]]]:
        """Return the sample numbers of each rank's microbatches after `consumed` samples of a dataset of this size."""
        order_of = partial(microbatch_sample_indices, self.config, size, consumed_samples=consumed)
        return [order_of(rank=rank, num_ranks=self.num_ranks) for rank in range(self.num_ranks)]

    def microbatches_of_step(
        self, split: str, step: int, ranks: Sequence[int] | None = None
    ) -> Iterator[MicrobatchDescription]:
        """Yield what a step reads, microbatch by microbatch. step: for train the iteration in the log; for valid the
        iteration after which it is done; for test the last iteration. ranks: data-parallel ranks, None for all.
        """
        numbers = self.sample_numbers(split, step)
        for place in range(max(map(len, numbers))):
            for rank in range(self.num_ranks) if ranks is None else ranks:
                if place < len(numbers[rank]):
                    yield self._build_microbatch_description(split, step, place, rank, numbers[rank][place])

    def occurrences(self, split: str, prefix: str, document: int) -> list[DocumentOccurrence]:
        """Return in order of time where the run reads a document: number `document` of the source file `prefix`."""
        samples = self._samples_with_document(split, prefix, document)
        if not samples:
            return []
        if split == "train" and self.config.data.dataloader_type == "cyclic":
            steps = self._samples_of_all_training_steps()
        else:
            reading = self._steps_reading_samples(split, sorted(samples))
            steps = ((step, self.sample_numbers(split, step)) for step in reading)
        return [
            DocumentOccurrence(split, step, place, rank, sample)
            for step, numbers in steps
            for rank, rows in enumerate(numbers)
            for place, row in enumerate(rows)
            for sample in row
            if sample in samples
        ]

    def _samples_with_document(self, split: str, prefix: str, document: int) -> set[int]:
        """Return a split's samples that hold part of a document; `DataError` if the prefix is no source of it."""
        dataset = self.dataset(split)
        parts = dataset.datasets if isinstance(dataset, BlendedDataset) else (dataset,)
        numbers = [number for number, part in enumerate(parts) if part.prefix == prefix]
        if not numbers:
            raise DataError(
                f"{prefix} is not a source of the {split} data; its sources are "
                f"{' '.join(dict.fromkeys(part.prefix for part in parts))}"
            )
        if not isinstance(dataset, BlendedDataset):
            return set(parts[0].samples_with_document(document).tolist())
        held = ((number, parts[number].samples_with_document(document)) for number in numbers)
        return {sample for one in held for sample in dataset.positions_of_dataset_samples(*one).tolist()}

    def _samples_of_all_training_steps(self) -> Iterator[tuple[int, list[list[list[int]]]]]:
        """Yield (step, sample numbers as of `sample_numbers`) for all training steps, drawing each sample order once."""
        size, begin = len(self.dataset("train")), self.start
        for first, last, consumed in (
            (0, begin.iteration, 0),
            (begin.iteration, self.num_iterations, begin.train_samples),
        ):
            orders = self._orders_of_ranks(size, consumed)
            for step in range(first, last):
                now = self.schedule.batch_size_after(consumed)
                yield step + 1, [list(islice(order, now.num_microbatches)) for order in orders]
                consumed += now.global_batch_size

    def _evaluation_iterations(self, split: str) -> list[int]:
        """Return the iterations after which a split is evaluated; the last evaluation follows the training."""
        train = self.config.train
        if train.skip_train:
            return [self.start.iteration]
        between = range(train.eval_interval, self.num_iterations + 1, train.eval_interval) if split == "valid" else ()
        return [iteration for iteration in between if iteration > self.start.iteration] + [self.num_iterations]

    def _evaluations_at_iteration(self, split: str, step: int) -> list[int]:
        """Return which evaluations of a split (0: first after the start) follow an iteration; `ConfigError` if none."""
        at = self._evaluation_iterations(split)
        numbers = [number for number, iteration in enumerate(at) if iteration == step]
        if not numbers:
            iterations = ", ".join(map(str, at[:6])) + (", ..." if len(at) > 6 else "")
            raise ConfigError(
                f"--step {step}: the run reads no {split} data then; it does after iteration {iterations}"
            )
        return numbers

    def _consumed_and_microbatch_counts(self, split: str, step: int) -> list[tuple[int, int]]:
        """Return (samples consumed before, microbatches of each rank) for each run of samples that a step reads."""
        train = self.config.train
        if split != "train":
            count = train.eval_iters * self.schedule.evaluation_batch_size
            begin = self.start.valid_samples if split == "valid" and not train.skip_train else 0
            evaluations = self._evaluations_at_iteration(split, step)
            return [(begin + number * count, count // self.schedule.unit) for number in evaluations]
        if not 1 <= step <= self.num_iterations:
            raise ConfigError(f"--step {step}: the run goes from iteration 1 to {self.num_iterations}")
        late = self.start if step > self.start.iteration else ResumeCounters()
        before = late.train_samples + self.schedule.samples_of_next_steps(step - 1 - late.iteration, late.train_samples)
        return [(before, self.schedule.batch_size_after(before).num_microbatches)]

    def _steps_reading_samples(self, split: str, samples: Sequence[int]) -> list[int]:
        """Return the steps that read these samples, in order; for evaluations all that may."""
        if split != "train":
            return list(dict.fromkeys(self._evaluation_iterations(split)))
        begin = self.start
        steps = []
        for sample in samples:
            late = begin if sample >= begin.train_samples else ResumeCounters()
            steps.append(late.iteration + self.schedule.num_whole_steps(sample, late.train_samples) + 1)
        return sorted({step for step in steps if step <= self.num_iterations})

    def _build_microbatch_description(
        self, split: str, step: int, place: int, rank: int, numbers: Sequence[int]
    ) -> MicrobatchDescription:
        dataset = self.dataset(split)
        arrays = read_and_stack_samples(dataset, numbers)
        samples = tuple(
            self._build_sample_description(dataset, number, {key: array[row] for key, array in arrays.items()})
            for row, number in enumerate(numbers)
        )
        return MicrobatchDescription(split, step, place, rank, microbatch_digest(arrays), samples)

    def _build_sample_description(self, dataset: Any, number: int, sample: dict[str, np.ndarray]) -> SampleDescription:
        """Describe one sample: its spans with their text, loss ranges and restarts. number: `FILL` for padding."""
        real = 0 if number == FILL else number
        blended = isinstance(dataset, BlendedDataset)
        spans, ids = dataset.token_sources(real), sample.get("tokens", np.empty(0, np.int64))
        slots = sample.get("image_slots", np.full(len(ids), -1))
        if len(ids) and spans and spans[-1].start + spans[-1].length > len(ids):
            # A window's last label is a token of its own.
            ids, slots = np.append(ids, sample["labels"][-1]), np.append(slots, -1)
        places = [slice(span.start, span.start + span.length) for span in spans]
        texts = [self._text_with_image_marks(ids[place], slots[place]) for place in places]
        positions, documents = sample.get("position_ids"), sample.get("document_ids")
        return SampleDescription(
            sample=None if number == FILL else number,
            dataset=int(dataset.dataset_index[real]) if blended else 0,
            dataset_sample=int(dataset.dataset_sample_index[real]) if blended else real,
            pieces=tuple(replace(span, text=text) for span, text in zip(spans, texts, strict=True)),
            texts={key: self.tokenizer.detokenize(sample[key].tolist()) for key in WHOLE_TEXTS if key in sample},
            loss=_true_runs(sample["loss_mask"] > 0),
            position_restarts=() if positions is None else _change_positions(np.diff(positions) != 1),
            attention_restarts=() if documents is None else _change_positions(np.diff(documents) != 0),
        )

    def _text_with_image_marks(self, ids: np.ndarray, slots: np.ndarray) -> str:
        """Detokenize ids; each run of image slots is written as its length, "[image rows: 576]"."""
        if (slots < 0).all():
            return self.tokenizer.detokenize(ids.tolist())
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(slots >= 0)) + 1)
        texts = (
            f"[image rows: {len(run)}]" if slots[run[0]] >= 0 else self.tokenizer.detokenize(ids[run].tolist())
            for run in runs
        )
        return "".join(texts)


def _true_runs(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return [start, end) of every run of True in a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))).tolist()
    return tuple(zip(edges[::2], edges[1::2]))


def _change_positions(where: np.ndarray) -> tuple[int, ...]:
    """Return the positions at which something changes. where: [i] says whether position i + 1 differs from i."""
    return tuple((np.flatnonzero(where) + 1).tolist())
