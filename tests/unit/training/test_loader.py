"""Datasets to microbatches: who reads which samples, in which order, and how many are needed."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.samplers import collate, microbatch_digest
from megatron.core.parallel.mesh import Axis
from megatron.training.data.sample_order import samples_needed, stages_read_data
from megatron.training.loader import (
    build_split_batches,
    iterate_split_microbatches,
    pin_arrays,
    single_pass_microbatches,
)
from megatron.training.state.batch import Batch, require_next_batch
from megatron.training.state.microbatches import BatchSchedule
from megatron.training.state.run import RunContext
from tests.helpers import tiny
from tests.helpers.world import Worlds

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
        return {
            "tokens": row,
            "labels": row + 1,
            "loss_mask": np.ones(LENGTH, np.float32),
            "position_ids": np.arange(LENGTH),
            "document_ids": row % 2,
            "dataset_id": np.array(0),
        }


def run_of(*, rank: int = 0, ranks: int = 1, **changes: Any) -> RunContext:
    """A run at one place of the data axis."""
    run = tiny.run_of(tiny.config(ranks, **{"micro_batch_size": 2, "global_batch_size": 12, **changes}))
    mesh = dataclasses.replace(
        run.mesh, dp=Axis(name="dp", size=ranks, rank=rank, ranks=tuple(range(ranks)), group=None)
    )
    return dataclasses.replace(run, mesh=mesh)


def rows(batches: Iterator[Batch], count: int | None = None) -> list[list[int]]:
    """The sample numbers of each microbatch."""
    return [batch.tokens[:, 0].tolist() for batch in islice(batches, count)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("consumed", [0, 12])
def test_data_parallel_ranks_share_out_the_samples_in_their_order(ranks: int, consumed: int) -> None:
    found = [
        rows(
            iterate_split_microbatches(
                run_of(rank=rank, ranks=ranks), Numbers(37), consumed_samples=consumed, reads=True
            )
        )
        for rank in range(ranks)
    ]
    # A block is one microbatch on every rank: rank r has its r-th pair. What is less than a block is dropped.
    blocks = (37 - consumed) // (2 * ranks)
    for rank in range(ranks):
        first = [consumed + (block * ranks + rank) * 2 for block in range(blocks)]
        assert found[rank] == [[number, number + 1] for number in first]


def test_a_global_batch_holds_the_same_samples_for_any_number_of_ranks() -> None:
    sets = []
    for ranks in (1, 2, 3):
        per_rank = 12 // (2 * ranks)
        sets.append(
            [
                sorted(
                    number
                    for rank in range(ranks)
                    for row in rows(
                        iterate_split_microbatches(
                            run_of(rank=rank, ranks=ranks), Numbers(48), consumed_samples=start, reads=True
                        ),
                        per_rank,
                    )
                    for number in row
                )
                for start in (0, 12, 24)
            ]
        )
    assert sets[0] == sets[1] == sets[2] == [list(range(start, start + 12)) for start in (0, 12, 24)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_reading_threads_give_what_reading_in_the_loop_gives(kind: str) -> None:
    by_hand, threaded = Numbers(40), Numbers(40)
    expected = rows(
        iterate_split_microbatches(
            run_of(dataloader_type=kind, num_workers=0), by_hand, consumed_samples=4, reads=True
        ),
        17,
    )
    found = rows(
        iterate_split_microbatches(
            run_of(dataloader_type=kind, num_workers=3), threaded, consumed_samples=4, reads=True
        ),
        17,
    )
    assert found == expected and len(found) == 17
    assert by_hand.readers == {threading.current_thread().name}
    assert len(threaded.readers) > 1 and all(name.startswith("data") for name in threaded.readers)


def test_cyclic_reading_goes_on_in_a_new_order() -> None:
    batches = rows(
        iterate_split_microbatches(run_of(dataloader_type="cyclic"), Numbers(8), consumed_samples=0, reads=True), 8
    )
    first, second = ([number for row in part for number in row] for part in (batches[:4], batches[4:]))
    assert sorted(first) == sorted(second) == list(range(8)) and first != second
    again = rows(
        iterate_split_microbatches(run_of(dataloader_type="cyclic"), Numbers(8), consumed_samples=10, reads=True), 3
    )
    assert again == batches[5:], "a resumed run does not go on where it was"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_fails_when_its_turn_comes(workers: int) -> None:
    batches = iterate_split_microbatches(
        run_of(num_workers=workers), Numbers(40, fails_at=5), consumed_samples=0, reads=True
    )
    assert rows(batches, 2) == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="sample 5 is damaged"):
        next(batches)


def test_reading_ahead_is_bounded() -> None:
    asked: list[int] = []

    class Counted(Numbers):
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            asked.append(index)
            return super().__getitem__(index)

    batches = iterate_split_microbatches(run_of(num_workers=2), Counted(10_000), consumed_samples=0, reads=True)
    next(batches)
    time.sleep(0.2)
    assert max(asked) < 2 * 2 * 4, "threads read far ahead of the training"
    batches.close()


def test_a_batch_carries_positions_and_documents_only_where_they_matter() -> None:
    plain = next(iterate_split_microbatches(run_of(), Numbers(4), consumed_samples=0, reads=True))
    assert plain.positions is None
    packed = next(
        iterate_split_microbatches(run_of(reset_position_ids=True), Numbers(4), consumed_samples=0, reads=True)
    )
    assert torch.equal(packed.positions, torch.arange(LENGTH).expand(2, -1))
    assert torch.equal(packed.documents, torch.tensor([[0] * LENGTH, [1] * LENGTH]))
    assert torch.equal(packed.labels, packed.tokens + 1) and packed.loss_mask.dtype == torch.float32


def test_a_stage_that_needs_no_text_reads_nothing() -> None:
    data = Numbers(4)
    batches = iterate_split_microbatches(run_of(), data, consumed_samples=0, reads=False)
    assert [next(batches) for _ in range(5)] == [Batch()] * 5 and not data.readers


def test_the_ends_of_the_network_read_and_all_when_documents_are_told_apart() -> None:
    def readers(**changes: Any) -> list[bool]:
        config = tiny.config(4, pipeline_model_parallel_size=4, **changes)
        return [
            stages_read_data(config, [stage for stage in stage_specs_of_run(config) if stage.rank == rank])
            for rank in range(4)
        ]

    assert readers() == [True, False, False, True]
    assert readers(reset_attention_mask=True) == readers(reset_position_ids=True) == [True] * 4


@pytest.mark.parametrize("interval, iterations", [(3, 10), (5, 10), (10, 10), (11, 10), (1, 4)])
def test_counts_are_megatrons_for_iterations(interval: int, iterations: int) -> None:
    config = tiny.config(train_iters=iterations, eval_interval=interval, eval_iters=7, global_batch_size=8)
    schedule = BatchSchedule.build(config.train, data_parallel_size=1, seq_length=16)
    assert samples_needed(config, schedule) == (iterations * 8, (iterations // interval + 1) * 7 * 8, 7 * 8)


def test_counts_are_megatrons_for_samples_and_a_growing_batch() -> None:
    config = tiny.config(
        train_iters=None,
        train_samples=100,
        eval_interval=2,
        eval_iters=3,
        global_batch_size=8,
        rampup_batch_size=(4, 4, 20),
    )
    schedule = BatchSchedule.build(config.train, data_parallel_size=1, seq_length=16)
    iterations, consumed = 0, 0  # by hand: 4 samples a step until 20 are seen, then 8
    while consumed + (8 if consumed >= 20 else 4) <= 100:
        consumed += 8 if consumed >= 20 else 4
        iterations += 1
    assert samples_needed(config, schedule) == (100, (iterations // 2 + 1) * 3 * 8, 3 * 8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5)), max_size=4),
    begin=st.integers(0, 150),
    steps=st.integers(0, 40),
)
def test_steps_and_samples_of_a_growing_batch_are_counted_as_by_walking(
    sizes: list[tuple[int, int]], begin: int, steps: int
) -> None:
    starts = [0, *accumulate(length for length, _ in sizes)]
    schedule = BatchSchedule(tuple(zip(starts, [4, *(4 * size for _, size in sizes)])), unit=4)
    consumed = begin
    for done in range(steps):
        assert schedule.samples_of_next_steps(done, begin) == consumed - begin
        for sample in (consumed, consumed + schedule.batch_size_after(consumed).global_batch_size - 1):
            assert schedule.num_whole_steps(sample, begin) == done, "the step that takes in this sample"
        consumed += schedule.batch_size_after(consumed).global_batch_size


def test_a_run_that_only_evaluates_needs_no_training_samples() -> None:
    config = tiny.config(train_iters=None, skip_train=True, eval_iters=2, global_batch_size=8, eval_interval=10)
    schedule = BatchSchedule.build(config.train, data_parallel_size=1, seq_length=16)
    assert samples_needed(config, schedule) == (0, 16, 16)


def test_taking_from_data_that_is_over_names_the_matter() -> None:
    with pytest.raises(DataError, match="the data ended before the run did"):
        require_next_batch(iter(()))


class Broken(Numbers):
    """A programme error at one sample."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {}["no such key"] if index == 5 else super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_reading_thread_comes_with_the_sample_and_its_traceback(workers: int) -> None:
    batches = iterate_split_microbatches(run_of(num_workers=workers), Broken(40), consumed_samples=0, reads=True)
    assert rows(batches, 2) == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="sample 5 cannot be read: KeyError: 'no such key'") as error:
        next(batches)
    cause = error.value.__cause__
    assert isinstance(cause, KeyError)
    assert traceback.extract_tb(cause.__traceback__)[-1].line.startswith('return {}["no such key"]')


def data_threads() -> int:
    return sum(thread.name.startswith("data") for thread in threading.enumerate())


def test_threads_end_when_the_data_is_closed_or_breaks() -> None:
    before = data_threads()
    batches = iterate_split_microbatches(run_of(num_workers=3), Numbers(1000), consumed_samples=0, reads=True)
    next(batches)
    assert data_threads() > before
    batches.close()
    assert data_threads() == before
    broken = iterate_split_microbatches(run_of(num_workers=3), Broken(1000), consumed_samples=0, reads=True)
    with pytest.raises(RuntimeError):
        list(broken)
    assert data_threads() == before


def provide(*datasets: Any) -> Any:
    return lambda run, counts: datasets


def test_evaluations_that_see_everything_begin_anew_and_leave_no_threads() -> None:
    run = tiny.run_of(
        tiny.config(full_validation=True, num_workers=2, micro_batch_size=2, global_batch_size=8, eval_iters=0)
    )
    before = data_threads()
    data = build_split_batches(tiny.trainer_of(run), provide(Numbers(64), Numbers(13), None))
    for _ in range(3):
        with data.valid.open_next_evaluation() as (batches, iterations):
            found = [batch for batch in islice(batches, iterations * 4)]
        assert iterations == 2
        counted = [
            number
            for batch in found
            for number, mask in zip(batch.tokens[:, 0].tolist(), batch.loss_mask)
            if mask.any()
        ]
        assert counted == list(range(13)), "every sample has its loss counted once"
        assert data_threads() == before
    next(data.train)
    data.close()
    assert data_threads() == before and data.test is None


def test_evaluations_by_iterations_go_on_where_the_last_ended() -> None:
    run = tiny.run_of(tiny.config(num_workers=2, micro_batch_size=2, global_batch_size=4, eval_iters=2))
    run.progress.consumed_valid_samples = 8
    data = build_split_batches(tiny.trainer_of(run), provide(Numbers(64), Numbers(40), Numbers(8)))
    seen = []
    for _ in range(2):
        with data.valid.open_next_evaluation() as (batches, iterations):
            seen += [number for row in rows(batches, 2 * iterations) for number in row]
    assert seen == list(range(8, 24))
    data.close()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_ranks_together_see_everything_once(ranks: int) -> None:
    seen, lengths = [], set()
    for rank in range(ranks):
        batches = list(
            single_pass_microbatches(
                run_of(rank=rank, ranks=ranks, global_batch_size=2 * ranks),
                Numbers(37),
                full_batch=4 * ranks,
                reads=True,
                split="valid",
            )
        )
        lengths.add(len(batches))
        seen += [
            number
            for batch in batches
            for number, mask in zip(batch.tokens[:, 0].tolist(), batch.loss_mask)
            if mask.any()
        ]
    assert sorted(seen) == list(range(37)) and len(lengths) == 1


class Stream:
    """Samples from outside: 100, 101, 102, ... without numbers."""

    def __init__(self, first: int, stop: int) -> None:
        self.first, self.stop = first, stop

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (Numbers(10**6)[number] for number in range(self.first, self.stop))


def test_samples_from_outside_are_taken_as_they_come() -> None:
    run = run_of(dataloader_type="external")
    batches = iterate_split_microbatches(run, Stream(100, 105), consumed_samples=4, reads=True)
    assert rows(batches) == [[100, 101], [102, 103]]
    endless = iterate_split_microbatches(run, (Numbers(10**6)[k] for k in count()), consumed_samples=0, reads=True)
    assert rows(endless, 2) == [[0, 1], [2, 3]]


def test_numbered_samples_are_refused_where_an_iterable_is_announced() -> None:
    run = tiny.run_of(tiny.config(dataloader_type="external"))
    with pytest.raises(ConfigError, match="takes iterables .* gives a Numbers, which is read by number"):
        build_split_batches(tiny.trainer_of(run), provide(Numbers(64), None, None))
    data = build_split_batches(tiny.trainer_of(run), provide(Stream(0, 9), None, None))
    assert rows(data.train, 2) == [[0], [1]]
    data.close()


def test_a_log_has_what_was_taken_and_not_what_was_read_ahead(tmp_path: Path) -> None:
    run = run_of(rank=1, ranks=2, log_samples=str(tmp_path / "log"), num_workers=2)
    data = Numbers(100)
    batches = iterate_split_microbatches(run, data, consumed_samples=12, reads=True)
    for iteration, taken in ((3, 2), (4, 1)):
        run.progress.iteration = iteration - 1
        rows(batches, taken)
    batches.close()
    lines = [json.loads(line) for line in (tmp_path / "log" / "rank00000.jsonl").read_text().splitlines()]
    assert lines == [
        {
            "split": "train",
            "data_rank": 1,
            "iteration": iteration,
            "microbatch": place,
            "samples": samples,
            "hash": microbatch_digest(collate([data[number] for number in samples])),
        }
        for iteration, place, samples in ((3, 0, [14, 15]), (3, 1, [18, 19]), (4, 0, [22, 23]))
    ]


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    batches = iterate_split_microbatches(
        run_of(log_samples=str(tmp_path / "file")), Numbers(9), consumed_samples=0, reads=True
    )
    with pytest.raises(ConfigError, match="--log-samples .* cannot be written"):
        next(batches)


def build_once(folder: str, machines: int) -> int:
    """Build the data of a run whose ranks stand on some machines, each with a cache of its own (or one for all)."""
    rank, per_machine = torch.distributed.get_rank(), torch.distributed.get_world_size() // 2
    os.environ["LOCAL_RANK"] = str(rank % per_machine)
    cache = Path(folder) / (str(rank // per_machine) if machines == 2 else "shared")
    built = []

    def provider(run: RunContext, counts: Any) -> Any:
        if not cache.exists():
            time.sleep(0.2)  # so that a rank that does not wait would find nothing
            cache.mkdir()
            built.append(rank)
        return Numbers(64), None, None

    try:
        build_split_batches(tiny.trainer_of(tiny.run_of(tiny.config(4))), provider).close()
    finally:
        os.environ["LOCAL_RANK"] = str(rank)
    return len(built)


@pytest.mark.parametrize("machines, expected", [(1, [1, 0, 0, 0]), (2, [1, 0, 1, 0])])
def test_caches_are_built_once_where_the_folder_is_shared_and_once_a_machine_elsewhere(
    world: Worlds, tmp_path: Path, machines: int, expected: list[int]
) -> None:
    assert world(4).run(build_once, str(tmp_path), machines) == expected


@pytest.mark.gpu
def test_pinned_microbatches_reach_the_device_unchanged() -> None:
    arrays = collate([Numbers(9)[number] for number in range(8)])
    held = pin_arrays(arrays)
    for name, array in arrays.items():
        assert torch.from_numpy(held[name]).is_pinned() and (held[name] == array).all()
    batch = Batch.from_arrays(held, torch.device("cuda"), positions=True)
    assert batch.tokens.cpu().tolist() == arrays["tokens"].tolist()
