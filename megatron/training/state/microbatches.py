"""How many samples each optimizer step takes in, and in how many microbatches.

A batch schedule is a short list of steps (from this many consumed samples on, the global batch is this large). A constant
batch, `--rampup-batch-size` and `--step-batch-size-schedule` are three ways to write that list; afterwards they are the
same thing, so the size of a step is a pure function of the samples consumed before it and a resumed run needs no state.

    samples consumed   0 ........ 300 ........ 600 ........
    global batch       16         24           32                (--rampup-batch-size 16 8 600, --global-batch-size 32)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.settings.run import TrainConfig

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class StepBatchSize:
    """One optimizer step: samples over all ranks, and microbatches on each data-parallel rank."""

    global_batch_size: int
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The global batch sizes of all steps, as a function of the samples consumed.
    steps: (first consumed sample count, global batch size) in rising order, the first at 0.
    unit: samples that all data-parallel ranks together take in one microbatch.
    rounds_down: whether a size that `unit` does not divide is rounded down (`--decrease-batch-size-if-needed`).
    asked_of_evaluation: samples in a global batch of an evaluation (`--eval-global-batch-size`), or None.
    """

    steps: tuple[tuple[int, int], ...]
    unit: int
    rounds_down: bool = False
    asked_of_evaluation: int | None = None

    @classmethod
    def build(cls, train: TrainConfig, *, data_parallel_size: int, seq_length: int) -> BatchSchedule:
        """Make the schedule; the default batch is one microbatch a rank. `ConfigError` if flags do not fit."""
        if train.micro_batch_size is None or train.micro_batch_size < 1:
            raise ConfigError(
                f"--micro-batch-size {train.micro_batch_size} is not a positive number; give the samples "
                "that one rank takes at a time"
            )
        if train.rampup_batch_size and train.step_batch_size_schedule:
            raise ConfigError("--rampup-batch-size and --step-batch-size-schedule both set the batch size; give one")
        unit = train.micro_batch_size * data_parallel_size
        size = train.global_batch_size or unit
        if train.step_batch_size_schedule:
            steps = parse_batch_size_steps(train.step_batch_size_schedule, seq_length)
        elif train.rampup_batch_size:
            steps = rampup_steps(train.rampup_batch_size, size)
        else:
            steps = ((0, size),)
        return cls(steps, unit, bool(train.decrease_batch_size_if_needed), train.eval_global_batch_size)

    def batch_size_after(self, consumed_samples: int) -> StepBatchSize:
        """Return the batch size of the step that follows `consumed_samples` samples."""
        target = self.steps[bisect_right(self.steps, (consumed_samples, math.inf)) - 1][1]
        count, rest = divmod(target, self.unit)
        assert count > 0 and (self.rounds_down or rest == 0), "check() refused the sizes that cannot be cut"
        return StepBatchSize(count * self.unit, count)

    @property
    def final_batch_size(self) -> int:
        """The global batch that the schedule ends with."""
        return self.batch_size_after(self.steps[-1][0]).global_batch_size

    @property
    def evaluation_batch_size(self) -> int:
        """The global batch of an evaluation."""
        if self.asked_of_evaluation is None:
            return self.final_batch_size
        return self.asked_of_evaluation // self.unit * self.unit

    def require_divisible_sizes(self, consumed_samples: int = 0) -> None:
        """Raise `ConfigError` listing every global batch size that the ranks' microbatches do not divide. Sizes that
        lie before `consumed_samples` no longer matter: a run may resume on more ranks than it began with.
        """
        now = bisect_right(self.steps, (consumed_samples, math.inf)) - 1
        raise_config_error_if(self._size_problem(size) for _, size in self.steps[max(now, 0) :])

    def _size_problem(self, size: int) -> str:
        """Return why `unit` does not divide this global batch size, or an empty string."""
        below, above = size // self.unit * self.unit, -(-size // self.unit) * self.unit
        if size < self.unit and self.rounds_down:
            return (
                f"global batch size {size} is smaller than micro batch size x data-parallel size = {self.unit}, so "
                f"nothing is left when it is rounded down; choose at least {self.unit}"
            )
        if size % self.unit and not self.rounds_down:
            choices = " or ".join(str(choice) for choice in (below, above) if choice)
            return (
                f"global batch size {size} is not a multiple of micro batch size x data-parallel size = "
                f"{self.unit}; choose {choices}, or round down with --decrease-batch-size-if-needed"
            )
        return ""

    def samples_of_next_steps(self, steps: int, consumed: int = 0) -> int:
        """Return how many samples the next `steps` steps consume, after `consumed` samples."""
        begin = consumed
        for end in [start for start, _ in self.steps[1:]]:
            size = self.batch_size_after(consumed).global_batch_size
            here = min(steps, max(0, -(-(end - consumed) // size)))
            consumed, steps = consumed + here * size, steps - here
        return consumed + steps * self.batch_size_after(consumed).global_batch_size - begin

    def resume_note(self, iterations: int, consumed: int) -> str:
        """Return what a resumed run should know if the iterations before it took other batches than a schedule of several
        sizes would have; "" if they took these, or the batch is constant.

        iterations, consumed: of the checkpoint. A run moves along the schedule by its samples, and ends by its iterations.
        """
        planned = self.samples_of_next_steps(iterations)
        if len(self.steps) == 1 or planned == consumed:
            return ""
        return (
            f"the {iterations} iterations of the checkpoint took {consumed} samples, and by this run's batch sizes {planned}: the next step "
            f"takes {self.batch_size_after(consumed).global_batch_size}, and the run may end before or after its data does. "
            "Megatron ignores --rampup-batch-size since 0.19; to go on as it did, leave the flag out"
        )

    def num_iterations(self, train: TrainConfig) -> int:
        """Return the number of iterations of the run, from --train-iters or --train-samples."""
        return train.train_iters or self.num_whole_steps(train.train_samples or 0)

    def num_whole_steps(self, samples: int, consumed: int = 0) -> int:
        """Return how many whole steps fit between `consumed` and `samples` samples; a last partial batch is not run."""
        steps = 0
        ends = [start for start, _ in self.steps[1:]] + [samples]
        for end in ends:
            size = self.batch_size_after(consumed).global_batch_size
            fit = max(0, (samples - consumed) // size)
            here = min(fit, max(0, -(-(end - consumed) // size)))
            consumed, steps = consumed + here * size, steps + here
        return steps


def rampup_steps(ramp: tuple[int, ...], full: int) -> tuple[tuple[int, int], ...]:
    """Return `--rampup-batch-size START INCREMENT SAMPLES` as (first sample, batch size) steps, even up to `full`."""
    if len(ramp) != 3:
        raise ConfigError(f"--rampup-batch-size takes 3 numbers (start, increment, samples), not {len(ramp)}")
    start, increment, samples = (int(value) for value in ramp)
    problems = []
    if start < 1 or start > full:
        problems.append(f"--rampup-batch-size starts at {start}; choose a start from 1 to the global batch size {full}")
    if increment < 1:
        problems.append(f"--rampup-batch-size increment {increment} is not positive")
    elif (full - start) % increment:
        problems.append(
            f"--rampup-batch-size cannot get from {start} to the global batch size {full} in steps of "
            f"{increment}; choose an increment that divides {full - start}"
        )
    if samples < 0:
        problems.append(f"--rampup-batch-size samples {samples} is negative")
    raise_config_error_if(problems)
    count = (full - start) // increment
    if count == 0 or samples == 0:
        return ((0, full),)
    each = samples / count
    return (
        (0, start),
        *((_samples_until_increment(k, each, samples), start + k * increment) for k in range(1, count + 1)),
    )


def _samples_until_increment(increments: int, each: float, samples: int) -> int:
    """Return the smallest whole c with int(c / each) >= increments, in the float arithmetic that defines the ramp."""
    first = max(0, math.floor(increments * each) - 1)
    while int(first / each) < increments and first <= samples:
        first += 1
    return first


def parse_batch_size_steps(schedule: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Parse `--step-batch-size-schedule "0:768 250B:1536"` (tokens:samples) into (first sample, batch size) steps."""
    steps, problems = [], []
    for entry in schedule.replace(",", " ").split():
        threshold, _, size = entry.partition(":")
        try:
            steps.append((_parse_count(threshold) // seq_length, _parse_count(size)))
        except (ValueError, OverflowError):
            problems.append(f"--step-batch-size-schedule entry {entry!r} is not TOKENS:SIZE, such as 250B:1536")
    steps.sort()
    if not problems and (not steps or steps[0][0] != 0):
        problems.append("--step-batch-size-schedule says no size for the start; begin with an entry 0:SIZE")
    problems += [
        f"--step-batch-size-schedule gives two sizes, {first[1]} and {second[1]}, for sample {second[0]}"
        for first, second in zip(steps, steps[1:])
        if first[0] == second[0]
    ]
    problems += [f"--step-batch-size-schedule size {size} is not positive" for _, size in steps if size < 1]
    raise_config_error_if(problems)
    return tuple(steps)


def _parse_count(text: str) -> int:
    """Parse a number with an optional suffix K, M, B or T: "250B" is 250 * 10**9."""
    text = text.strip().upper()
    factor = SUFFIXES.get(text[-1:], 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)
