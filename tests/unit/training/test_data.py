"""Datasets to microbatches: who reads which samples, in which order, and how many are needed."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.rules import stages_of
from megatron.core.datasets.indexed import DataError
from megatron.core.parallel.mesh import Axis
from megatron.training.batch import Batch
from megatron.training.data import microbatches, needs_text, samples_needed, take
from megatron.training.microbatches import BatchSchedule
from megatron.training.run import Run
from tests.helpers import tiny

LENGTH = 4


class Numbers:
    """Sample k is LENGTH times k; reading takes longer for even numbers, so that threads finish out of order."""

    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.size, self.fails_at = size, fails_at
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index == self.fails_at:
            raise DataError(f"sample {index} is damaged")
        time.sleep(0.002 * (index % 2 == 0))
        self.readers.add(threading.current_thread().name)
        row = np.full(LENGTH, index, np.int64)
        return {"tokens": row, "labels": row + 1, "loss_mask": np.ones(LENGTH, np.float32), "position_ids": np.arange(LENGTH),
                "document_ids": row % 2, "dataset_id": np.array(0)}


def run_of(*, rank: int = 0, ranks: int = 1, **changes: Any) -> Run:
    """A run at one place of the data axis."""
    run = tiny.run_of(tiny.config(ranks, **{"micro_batch_size": 2, "global_batch_size": 12, **changes}))
    mesh = dataclasses.replace(run.mesh, dp=Axis(name="dp", size=ranks, rank=rank, ranks=tuple(range(ranks)), group=None))
    return dataclasses.replace(run, mesh=mesh)


def rows(batches: Iterator[Batch], count: int | None = None) -> list[list[int]]:
    """The sample numbers of each microbatch."""
    return [batch.tokens[:, 0].tolist() for batch in islice(batches, count)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("consumed", [0, 12])
def test_data_parallel_ranks_share_out_the_samples_in_their_order(ranks: int, consumed: int) -> None:
    found = [rows(microbatches(run_of(rank=rank, ranks=ranks), Numbers(37), consumed_samples=consumed, reads=True))
             for rank in range(ranks)]
    # A block is one microbatch on every rank: rank r has its r-th pair. What is less than a block is dropped.
    blocks = (37 - consumed) // (2 * ranks)
    for rank in range(ranks):
        first = [consumed + (block * ranks + rank) * 2 for block in range(blocks)]
        assert found[rank] == [[number, number + 1] for number in first]


def test_a_global_batch_holds_the_same_samples_for_any_number_of_ranks() -> None:
    sets = []
    for ranks in (1, 2, 3):
        per_rank = 12 // (2 * ranks)
        sets.append([sorted(number for rank in range(ranks) for row in
                            rows(microbatches(run_of(rank=rank, ranks=ranks), Numbers(48), consumed_samples=start, reads=True), per_rank)
                            for number in row) for start in (0, 12, 24)])
    assert sets[0] == sets[1] == sets[2] == [list(range(start, start + 12)) for start in (0, 12, 24)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_reading_threads_give_what_reading_in_the_loop_gives(kind: str) -> None:
    by_hand, threaded = Numbers(40), Numbers(40)
    expected = rows(microbatches(run_of(dataloader_type=kind, num_workers=0), by_hand, consumed_samples=4, reads=True), 17)
    found = rows(microbatches(run_of(dataloader_type=kind, num_workers=3), threaded, consumed_samples=4, reads=True), 17)
    assert found == expected and len(found) == 17
    assert by_hand.readers == {threading.current_thread().name}
    assert len(threaded.readers) > 1 and all(name.startswith("data") for name in threaded.readers)


def test_cyclic_reading_goes_on_in_a_new_order() -> None:
    batches = rows(microbatches(run_of(dataloader_type="cyclic"), Numbers(8), consumed_samples=0, reads=True), 8)
    first, second = ([number for row in part for number in row] for part in (batches[:4], batches[4:]))
    assert sorted(first) == sorted(second) == list(range(8)) and first != second
    again = rows(microbatches(run_of(dataloader_type="cyclic"), Numbers(8), consumed_samples=10, reads=True), 3)
    assert again == batches[5:], "a resumed run does not go on where it was"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_fails_when_its_turn_comes(workers: int) -> None:
    batches = microbatches(run_of(num_workers=workers), Numbers(40, fails_at=5), consumed_samples=0, reads=True)
    assert rows(batches, 2) == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="sample 5 is damaged"):
        next(batches)


def test_reading_ahead_is_bounded() -> None:
    asked: list[int] = []

    class Counted(Numbers):
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            asked.append(index)
            return super().__getitem__(index)

    batches = microbatches(run_of(num_workers=2), Counted(10_000), consumed_samples=0, reads=True)
    next(batches)
    time.sleep(0.2)
    assert max(asked) < 2 * 2 * 4, "threads read far ahead of the training"
    batches.close()


def test_a_batch_carries_positions_and_documents_only_where_they_matter() -> None:
    plain = next(microbatches(run_of(), Numbers(4), consumed_samples=0, reads=True))
    assert plain.positions is None
    packed = next(microbatches(run_of(reset_position_ids=True), Numbers(4), consumed_samples=0, reads=True))
    assert torch.equal(packed.positions, torch.arange(LENGTH).expand(2, -1))
    assert torch.equal(packed.documents, torch.tensor([[0] * LENGTH, [1] * LENGTH]))
    assert torch.equal(packed.labels, packed.tokens + 1) and packed.loss_mask.dtype == torch.float32


def test_a_stage_that_needs_no_text_reads_nothing() -> None:
    data = Numbers(4)
    batches = microbatches(run_of(), data, consumed_samples=0, reads=False)
    assert [next(batches) for _ in range(5)] == [Batch()] * 5 and not data.readers


def test_the_ends_of_the_network_read_and_all_when_documents_are_told_apart() -> None:
    def readers(**changes: Any) -> list[bool]:
        config = tiny.config(4, pipeline_model_parallel_size=4, **changes)
        return [needs_text(config, [stage for stage in stages_of(config) if stage.rank == rank]) for rank in range(4)]

    assert readers() == [True, False, False, True]
    assert readers(reset_attention_mask=True) == readers(reset_position_ids=True) == [True] * 4


@pytest.mark.parametrize("interval, iterations", [(3, 10), (5, 10), (10, 10), (11, 10), (1, 4)])
def test_counts_are_megatrons_for_iterations(interval: int, iterations: int) -> None:
    config = tiny.config(train_iters=iterations, eval_interval=interval, eval_iters=7, global_batch_size=8)
    schedule = BatchSchedule.build(config.train, data_parallel_size=1, seq_length=16)
    assert samples_needed(config, schedule) == (iterations * 8, (iterations // interval + 1) * 7 * 8, 7 * 8)


def test_counts_are_megatrons_for_samples_and_a_growing_batch() -> None:
    config = tiny.config(train_iters=None, train_samples=100, eval_interval=2, eval_iters=3, global_batch_size=8,
                         rampup_batch_size=(4, 4, 20))
    schedule = BatchSchedule.build(config.train, data_parallel_size=1, seq_length=16)
    iterations, consumed = 0, 0  # by hand: 4 samples a step until 20 are seen, then 8
    while consumed + (8 if consumed >= 20 else 4) <= 100:
        consumed += 8 if consumed >= 20 else 4
        iterations += 1
    assert samples_needed(config, schedule) == (100, (iterations // 2 + 1) * 3 * 8, 3 * 8)


def test_a_run_that_only_evaluates_needs_no_training_samples() -> None:
    config = tiny.config(train_iters=None, skip_train=True, eval_iters=2, global_batch_size=8, eval_interval=10)
    schedule = BatchSchedule.build(config.train, data_parallel_size=1, seq_length=16)
    assert samples_needed(config, schedule) == (0, 16, 16)


def test_taking_from_data_that_is_over_names_the_matter() -> None:
    with pytest.raises(DataError, match="the data ended before the run did"):
        take(iter(()))
