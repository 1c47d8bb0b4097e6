"""Which samples come next: against the definition, for many layouts, and across a resume."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.samplers import (
    FILL,
    collate,
    cyclic_sampler,
    microbatch_digest,
    sequential_sampler,
    single_pass_sampler,
)

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def global_batches(sampler, num_samples, *, batch, micro, ranks, steps, consumed=0, **options):
    """The samples of each step: one list a rank."""
    per_step = batch // (micro * ranks)
    layout = dict(consumed_samples=consumed, micro_batch_size=micro, num_ranks=ranks, **options)
    rows = [list(islice(sampler(num_samples, rank=rank, **layout), steps * per_step)) for rank in range(ranks)]
    return [[sum(row[step * per_step : (step + 1) * per_step], []) for row in rows] for step in range(steps)]


@pytest.mark.parametrize("micro, ranks", [(1, 1), (2, 1), (4, 3), (1, 12), (3, 2), (2, 6)])
def test_the_samples_of_a_global_batch_do_not_depend_on_the_layout(micro, ranks):
    steps = global_batches(sequential_sampler, 200, batch=12, micro=micro, ranks=ranks, steps=5, consumed=24)
    for step, rows in enumerate(steps):
        first = 24 + 12 * step
        assert sorted(sum(rows, [])) == list(range(first, first + 12))


def test_rank_r_takes_the_r_th_micro_batch_of_each_block():
    rows = [
        list(sequential_sampler(20, consumed_samples=3, micro_batch_size=2, rank=rank, num_ranks=3))
        for rank in range(3)
    ]
    assert rows == [[[3, 4], [9, 10]], [[5, 6], [11, 12]], [[7, 8], [13, 14]]]


def test_a_last_block_that_is_not_full_is_left_out():
    assert list(sequential_sampler(9, consumed_samples=0, micro_batch_size=2, rank=1, num_ranks=2)) == [[2, 3], [6, 7]]
    assert list(sequential_sampler(8, consumed_samples=0, micro_batch_size=2, rank=1, num_ranks=2)) == [[2, 3], [6, 7]]
    assert list(sequential_sampler(8, consumed_samples=8, micro_batch_size=2, rank=1, num_ranks=2)) == []


@pytest.mark.parametrize(
    "sampler, options",
    [(sequential_sampler, {}), (cyclic_sampler, {"sharded": True}), (cyclic_sampler, {"sharded": False})],
)
def test_a_resumed_run_goes_on_where_it_stopped_whatever_the_number_of_micro_batches(sampler, options):
    layout = dict(micro_batch_size=2, rank=1, num_ranks=2, **options)
    whole = list(islice(sampler(50, consumed_samples=0, **layout), 12))
    for done in range(12):
        resumed = islice(sampler(50, consumed_samples=done * 4, **layout), 12 - done)
        assert list(resumed) == whole[done:]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("num_samples, micro, ranks", [(48, 2, 4), (50, 3, 2), (13, 1, 4), (10, 10, 1)])
def test_a_cyclic_epoch_draws_every_whole_block_once_and_then_shuffles_anew(sharded, num_samples, micro, ranks):
    block = micro * ranks
    blocks = num_samples // block
    epochs = global_batches(
        cyclic_sampler, num_samples, batch=blocks * block, micro=micro, ranks=ranks, steps=3, sharded=sharded
    )
    for rows in epochs:
        drawn = sum(rows, [])
        assert len(set(drawn)) == len(drawn) == blocks * block and max(drawn) < num_samples
        if sharded:
            for rank, row in enumerate(rows):
                assert sorted(row) == list(range(rank * blocks * micro, (rank + 1) * blocks * micro))
    assert epochs[0] != epochs[1] != epochs[2]


def test_cyclic_order_is_torchs_permutation_seeded_by_the_epoch():
    generator = torch.Generator()
    generator.manual_seed(2)
    parts = torch.randperm(12, generator=generator).tolist()
    layout = dict(consumed_samples=48, micro_batch_size=3, num_ranks=2)
    rows = [sum(islice(cyclic_sampler(24, rank=rank, **layout), 4), []) for rank in range(2)]
    assert rows == [parts, [12 + place for place in parts]]
    generator.manual_seed(2)
    order = torch.randperm(24, generator=generator).tolist()
    dealt = [sum(islice(cyclic_sampler(24, rank=rank, sharded=False, **layout), 4), []) for rank in range(2)]
    assert dealt == [order[0::2], order[1::2]]


def test_cyclic_refuses_what_it_cannot_resume_or_fill():
    with pytest.raises(DataError, match="5 consumed samples end within a block of micro batch 2 x .* size 2"):
        next(cyclic_sampler(50, consumed_samples=5, micro_batch_size=2, rank=0, num_ranks=2))
    with pytest.raises(DataError, match="3 samples are fewer than one block"):
        next(cyclic_sampler(3, consumed_samples=0, micro_batch_size=2, rank=0, num_ranks=2))


def test_collate_stacks_every_key():
    samples = [{"tokens": np.arange(3) + i, "dataset_id": np.array(i)} for i in range(2)]
    batch = collate(samples)
    assert batch["tokens"].tolist() == [[0, 1, 2], [1, 2, 3]] and batch["dataset_id"].tolist() == [0, 1]


@QUICK
@given(st.data())
def test_any_data_parallel_size_reads_the_same_samples_in_a_step_of_any_size(data):
    """A growing batch: each step's size is drawn, and each step is read by another number of ranks, as after resumes."""
    kind = data.draw(st.sampled_from(["single", "dealt"]))
    sizes = data.draw(st.lists(st.integers(1, 4).map(lambda k: 12 * k), min_size=1, max_size=6))
    num_samples = -(-sum(sizes) // 12) * 12 + data.draw(st.integers(0, 2)) * 12
    sampler, options = (sequential_sampler, {}) if kind == "single" else (cyclic_sampler, {"sharded": False})
    expected = None
    for trial in range(3):
        consumed, steps = 0, []
        for size in sizes:
            micro, ranks = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 3), (3, 4), (6, 2), (1, 12), (12, 1)]))
            steps += global_batches(
                sampler, num_samples, batch=size, micro=micro, ranks=ranks, steps=1, consumed=consumed, **options
            )
            consumed += size
        result = [sorted(sum(rows, [])) for rows in steps]
        assert [len(step) for step in result] == sizes
        expected = expected or result
        assert result == expected
    drawn = sum(expected, [])
    assert len(set(drawn)) == len(drawn), "within an epoch no sample comes twice"
    if kind == "single":
        assert drawn == list(range(sum(sizes)))


@QUICK
@given(num_samples=st.integers(1, 100), micro=st.integers(1, 5), ranks=st.integers(1, 5), spare=st.integers(0, 3))
def test_a_whole_pass_has_every_sample_once_and_ends_at_the_same_step_on_all_ranks(num_samples, micro, ranks, spare):
    blocks = -(-num_samples // (micro * ranks)) + spare
    rows = [
        list(single_pass_sampler(num_samples, micro_batch_size=micro, rank=rank, num_ranks=ranks, blocks=blocks))
        for rank in range(ranks)
    ]
    assert all(len(row) == blocks and all(len(part) == micro for part in row) for row in rows)
    numbers = sorted(number for row in rows for part in row for number in part)
    assert numbers == [FILL] * (blocks * micro * ranks - num_samples) + list(range(num_samples))


def test_a_digest_tells_key_type_shape_and_content_apart():
    one = {"tokens": np.arange(6).reshape(2, 3), "loss_mask": np.ones((2, 3), np.float32)}
    others = [
        {**one, "tokens": one["tokens"] + 1},
        {**one, "tokens": one["tokens"].reshape(3, 2)},
        {**one, "tokens": one["tokens"].astype(np.uint64)},
        {"tokens": one["tokens"]},
        {"labels": one["tokens"], "loss_mask": one["loss_mask"]},
        {**one, "loss_mask": 1 - one["loss_mask"]},
    ]
    again = {"loss_mask": one["loss_mask"].copy(), "tokens": np.asfortranarray(one["tokens"])}
    assert (
        microbatch_digest(again) == microbatch_digest(one)
        and len({microbatch_digest(other) for other in [one, *others]}) == 7
    )
