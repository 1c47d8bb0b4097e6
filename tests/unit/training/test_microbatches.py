"""Batch schedules against Megatron's own rules, written out here as plain loops."""

import dataclasses

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.run import TrainConfig
from megatron.training.state.microbatches import BatchSchedule, StepBatchSize


def build(data_parallel_size=2, seq_length=1024, **fields):
    train = TrainConfig(**{"micro_batch_size": 2, "global_batch_size": 32, **fields})
    return BatchSchedule.build(train, data_parallel_size=data_parallel_size, seq_length=seq_length)


def ramp_by_hand(consumed, start, increment, samples, full):
    """The rule of --rampup-batch-size as the feature notes state it."""
    if consumed > samples:
        return full
    return start + increment * int(consumed / (samples / ((full - start) / increment)))


def test_a_constant_batch_is_cut_into_equal_microbatches():
    schedule = build(global_batch_size=32)
    assert (
        schedule.batch_size_after(0)
        == schedule.batch_size_after(10**12)
        == StepBatchSize(global_batch_size=32, num_microbatches=8)
    )


def test_left_out_the_global_batch_is_one_microbatch_on_every_rank():
    assert build(global_batch_size=None, data_parallel_size=5).batch_size_after(0) == StepBatchSize(10, 1)


@pytest.mark.parametrize(
    "start, increment, samples, full",
    [(16, 8, 600, 32), (4, 4, 1000, 64), (4, 4, 997, 64), (8, 4, 10, 20), (32, 8, 500, 32), (4, 12, 1, 64)],
)
def test_ramp_up_follows_the_rule_at_every_sample(start, increment, samples, full):
    schedule = build(rampup_batch_size=(start, increment, samples), global_batch_size=full)
    for consumed in range(samples + 50):
        expected = full if start == full else ramp_by_hand(consumed, start, increment, samples, full)
        assert schedule.batch_size_after(consumed).global_batch_size == expected, consumed


def test_a_ramp_over_no_samples_starts_at_the_full_batch():
    assert build(rampup_batch_size=(8, 8, 0), global_batch_size=32).batch_size_after(0).global_batch_size == 32


def test_step_thresholds_are_tokens_with_suffixes():
    schedule = build(step_batch_size_schedule="2M:16 0:8, 1.5B:32", seq_length=1000, micro_batch_size=1)
    sizes = [schedule.batch_size_after(samples).global_batch_size for samples in (0, 1999, 2000, 1_499_999, 1_500_000)]
    assert sizes == [8, 8, 16, 16, 32]
    assert schedule.final_batch_size == 32


def test_indivisible_batches_are_all_named_at_once_with_a_way_out():
    schedule = build(rampup_batch_size=(6, 2, 100), global_batch_size=12)
    with pytest.raises(ConfigError) as error:
        schedule.require_divisible_sizes()
    text = str(error.value)
    assert "batch size 6 " in text and "batch size 10 " in text and "batch size 8 " not in text
    assert "choose 4 or 8" in text and "choose 8 or 12" in text


def test_sizes_already_behind_a_resumed_run_are_not_checked():
    schedule = build(step_batch_size_schedule="0:6 100K:8", seq_length=100)
    schedule.require_divisible_sizes(consumed_samples=1000)
    with pytest.raises(ConfigError):
        schedule.require_divisible_sizes(consumed_samples=999)


def test_an_indivisible_batch_is_rounded_down_when_asked():
    schedule = build(global_batch_size=30, data_parallel_size=4, decrease_batch_size_if_needed=True)
    schedule.require_divisible_sizes()
    assert schedule.batch_size_after(0) == StepBatchSize(24, 3)
    with pytest.raises(ConfigError, match="nothing is left"):
        build(global_batch_size=6, data_parallel_size=4, decrease_batch_size_if_needed=True).require_divisible_sizes()


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"rampup_batch_size": (16, 8)}, "takes 3 numbers"),
        ({"rampup_batch_size": (16, 7, 100)}, "an increment that divides 16"),
        ({"rampup_batch_size": (64, 8, 100)}, "from 1 to the global batch size 32"),
        ({"rampup_batch_size": (16, 8, -1)}, "negative"),
        ({"step_batch_size_schedule": "0:8 nonsense"}, "'nonsense' is not TOKENS:SIZE"),
        ({"step_batch_size_schedule": "4K:8"}, "begin with an entry 0:SIZE"),
        ({"step_batch_size_schedule": "0:8 0:16"}, "two sizes, 8 and 16"),
        ({"step_batch_size_schedule": "0:0"}, "size 0 is not positive"),
        ({"step_batch_size_schedule": "0:8", "rampup_batch_size": (8, 8, 8)}, "give one"),
        ({"micro_batch_size": None}, "--micro-batch-size"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        build(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rampup_batch_size": (8, 8, 300)},
        {"step_batch_size_schedule": "0:8 10240:16 512000:32"},
        {"global_batch_size": 30, "data_parallel_size": 4, "decrease_batch_size_if_needed": True},
    ],
)
@pytest.mark.parametrize("samples", [0, 7, 31, 32, 500, 601, 1000])
def test_iterations_counts_the_whole_steps_of_a_run(fields, samples):
    schedule = build(**fields)
    consumed = steps = 0
    while consumed + schedule.batch_size_after(consumed).global_batch_size <= samples:
        consumed += schedule.batch_size_after(consumed).global_batch_size
        steps += 1
    assert schedule.num_whole_steps(samples) == steps


def test_a_schedule_is_plain_frozen_data():
    with pytest.raises(dataclasses.FrozenInstanceError):
        build().unit = 3


def test_a_checkpoint_whose_steps_took_other_batches_than_the_ramp_is_told_of() -> None:
    ramp = BatchSchedule(((0, 2), (4, 4), (12, 8)), 2)
    ramped = ramp.samples_of_next_steps(5)
    assert ramped == 2 + 2 + 4 + 4 + 8 and ramp.resume_note(5, ramped) == ""
    assert "took 40 samples, and by this run's batch sizes 20" in ramp.resume_note(5, 5 * 8)
    assert (
        BatchSchedule(((0, 8),), 2).resume_note(5, 17) == ""
    )  # the batch was another before, which is the user's word
