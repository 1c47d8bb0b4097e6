"""What happened in each step, kept on the device until it is reported; and Megatron's words for it.

    step ends        meter.add(StepMetrics(...))              tensors stay on the device, nobody waits
    save, report     steps = meter.resolve()                  one reduction and one copy for all steps since the last time
    report           meter.report(...) -> IntervalReport      averages over the interval
                     interval_log_line(report)                the log line, byte for byte Megatron's
                     time_left_line(report)                   its companion: when the run ends

A loss travels as a tensor [sum, count] of this rank; sums and counts are added over the ranks that saw other data only
when they are resolved, so a step's loss is the mean over all its tokens. The interval's loss is the mean over its steps
that were not skipped; figures of the data alone (rewards of rollouts) count in all steps. Everything below `StepMetricsMeter` is a pure function of numbers.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import torch
from torch import Tensor

MEGABYTE = 1024.0 * 1024.0

# Dense matrix peaks in bf16 (fp16 where there is no bf16), TFLOP/s, from the makers' data sheets. First match wins.
PEAK_TFLOPS = (
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bH200\b|\bGH200\b", 989.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH[18]00\b", 989.0),
    (r"\bH20\b", 148.0),
    (r"\bA[18]00\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bA40\b", 150.0),
    (r"\bA10\b", 125.0),
    (r"\bL4\b", 121.0),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
    (r"\bRTX 4090\b", 165.0),
    (r"\bRTX 3090\b", 71.0),
)


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """How many tokens chose each expert in one step. table: [layers, e + 1], this rank's share; the last column counts
    dropped ones. A layer without experts has zeros. by_layer: report each layer too.
    """

    table: Tensor
    by_layer: bool


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one training step, whose numbers may be tensors on the device; see `ResolvedStepMetrics`.
    losses: this rank's [sum, count] of each, later the mean over all ranks; names under moe/ stay off the log line.
    loads: expert counts, later among the losses. consumed_samples: of the run, after the step. learning_rate,
    loss_scale: what the next step uses, as in Megatron's log. skipped: no optimizer step (overflow in fp16).
    data_figures: losses of the data alone, which count in a skipped step too. None: not measured.
    """

    iteration: int
    consumed_samples: int
    batch_size: int
    learning_rate: float
    losses: Mapping[str, Tensor | float]
    loads: ExpertLoads | None = None
    decoupled_learning_rate: float | None = None
    loss_scale: Tensor | float = 1.0
    grad_norm: Tensor | float | None = None
    num_zeros: Tensor | float | None = None
    params_norm: Tensor | float | None = None
    skipped: Tensor | bool = False
    data_figures: tuple[str, ...] = ()


class ResolvedStepMetrics(StepMetrics):
    """Metrics of a step as plain numbers; losses are means over all ranks."""

    __slots__ = ()
    losses: Mapping[str, float]
    loss_scale: float
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    skipped: bool

    @property
    def has_finite_losses(self) -> bool:
        """Whether every loss is a number."""
        return all(math.isfinite(loss) for loss in self.losses.values())


def unskipped_losses(step: ResolvedStepMetrics) -> Mapping[str, float]:
    """Return the losses that count: of a skipped step only those of its data."""
    return {name: loss for name, loss in step.losses.items() if not step.skipped or name in step.data_figures}


@dataclass(frozen=True, slots=True)
class Throughput:
    """Speed of a log interval. TFLOP/s are model FLOPs on one device; `peak` is that device's peak, if it is known."""

    samples_per_second: float
    tokens_per_second: float
    causal_tflops: float
    square_tflops: float
    peak: float | None = None


@dataclass(frozen=True, slots=True)
class IntervalReport:
    """Metrics of one log interval. last: its last step; losses: means over the steps not skipped, of the data over all.
    samples_left, tokens_left, seconds_left: until the run's last iteration, at this interval's speed.
    """

    last: ResolvedStepMetrics
    train_iters: int
    skipped_samples: int
    seconds_per_iteration: float
    losses: Mapping[str, float]
    skipped_iterations: int
    nan_iterations: int
    throughput: Throughput | None = None
    samples_left: int = 0
    tokens_left: int = 0
    seconds_left: float = 0.0


@dataclass(frozen=True, slots=True)
class FlopsPerSample:
    """Model FLOPs of one sample, and number and peak of the devices: what turns time into throughput."""

    seq_length: int
    causal_flops: float
    square_flops: float
    num_devices: int
    peak: float | None = None

    def throughput_of(self, samples: int, seconds: float) -> Throughput:
        """Return the throughput of `samples` samples in `seconds` seconds."""
        rate = samples / seconds
        scale = rate / (1e12 * self.num_devices)
        return Throughput(rate, rate * self.seq_length, self.causal_flops * scale, self.square_flops * scale, self.peak)


class IntervalClock:
    """Seconds of training since the last log line, without pauses for evaluations and saves."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Begin a new interval."""
        self._since = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds of the interval so far."""
        return time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the seconds within."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began


class StepMetricsMeter:
    """Collects step metrics on the device. reduce: sums a tensor over the ranks whose losses belong together."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        self._reduce = reduce
        self._pending: list[StepMetrics] = []
        self._interval: list[ResolvedStepMetrics] = []

    @property
    def num_steps(self) -> int:
        """Steps since the last report."""
        return len(self._interval) + len(self._pending)

    def add(self, step: StepMetrics) -> None:
        """Keep a step's metrics, without computing or waiting."""
        self._pending.append(step)

    def resolve(self) -> list[ResolvedStepMetrics]:
        """Return the steps added since the last call, as plain numbers. Collective over the ranks of `reduce`."""
        steps, self._pending = self._pending, []
        records = _resolve_step_metrics(steps, self._reduce)
        self._interval += records
        return records

    def report(
        self,
        *,
        train_iters: int,
        seconds: float,
        skipped_samples: int = 0,
        work: FlopsPerSample | None = None,
        samples_left: int = 0,
        seq_length: int = 0,
    ) -> IntervalReport:
        """Return the metrics of the interval since the last report, which took `seconds`, and begin a new one.
        samples_left: until the run ends, each of seq_length tokens. All steps must be resolved.
        """
        assert self._interval and not self._pending, "a report needs steps, and all of them resolved"
        steps, self._interval = self._interval, []
        names = dict.fromkeys(name for step in steps for name in step.losses)
        valid = [unskipped_losses(step) for step in steps]
        samples = sum(step.batch_size for step in steps)
        means = {}
        for name in names:
            values = [losses[name] for losses in valid if name in losses]
            if values:
                means[name] = sum(values) / len(values)
        return IntervalReport(
            last=steps[-1],
            train_iters=train_iters,
            skipped_samples=skipped_samples,
            seconds_per_iteration=seconds / len(steps),
            losses=means,
            skipped_iterations=sum(step.skipped for step in steps),
            nan_iterations=sum(not step.has_finite_losses for step in steps),
            throughput=None if work is None else work.throughput_of(samples, seconds),
            samples_left=samples_left,
            tokens_left=samples_left * seq_length,
            seconds_left=samples_left * seconds / samples,
        )


_NUMBERS = ("loss_scale", "grad_norm", "num_zeros", "params_norm", "skipped")


def _resolve_step_metrics(
    steps: Sequence[StepMetrics], reduce: Callable[[Tensor], Tensor]
) -> list[ResolvedStepMetrics]:
    """Resolve all tensors of all steps by one sum over ranks and one copy to the host."""
    pairs = [torch.as_tensor(loss) for step in steps for loss in step.losses.values()]
    loads = [step.loads for step in steps if step.loads is not None]
    scalars = [value for step in steps for value in _scalar_tensors_by_name(step).values()]
    values = iter(_reduce_and_copy_to_host([*pairs, *(load.table for load in loads)], scalars, reduce))
    means = iter([(next(values), next(values)) for _ in pairs])
    figures = iter(
        [_expert_balance_metrics([[next(values) for _ in row] for row in load.table], load.by_layer) for load in loads]
    )
    records = []
    for step in steps:
        losses = _means_of_sums_and_counts({name: next(means) for name in step.losses})
        losses |= next(figures) if step.loads is not None else {}
        records.append(_step_metrics_with_host_values(step, losses, values))
    return records


def _step_metrics_with_host_values(
    step: StepMetrics, losses: Mapping[str, float], values: Iterator[float]
) -> ResolvedStepMetrics:
    """Return a step with its losses, and with each scalar tensor replaced by the next of `values`."""
    plain: dict[str, Any] = {name: next(values) for name in _scalar_tensors_by_name(step)}
    if "skipped" in plain:
        plain["skipped"] = bool(plain["skipped"])
    given = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    return ResolvedStepMetrics(**given | plain | {"losses": losses, "loads": None})


def _scalar_tensors_by_name(step: StepMetrics) -> dict[str, Tensor]:
    """Return the scalar fields of a step that are tensors, by name."""
    return {name: value for name in _NUMBERS if torch.is_tensor(value := getattr(step, name))}


def _reduce_and_copy_to_host(
    summed: Sequence[Tensor], scalars: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]
) -> list[float]:
    """Return all numbers. summed: tensors summed over ranks before, in fp64 (counts up to 2^53); scalars are not."""
    flat = [value.detach().double().flatten() for value in summed]
    flat = [reduce(torch.cat(flat))] if flat else []
    device = next((tensor.device for tensor in (*summed, *scalars)), None)
    flat += [scalar.detach().double().reshape(1).to(device) for scalar in scalars]
    return torch.cat(flat).tolist() if flat else []


def _expert_balance_metrics(table: list[list[float]], by_layer: bool) -> dict[str, float]:
    """Return how evenly experts were used, means over layers. moe/load_max_over_mean: busiest over mean, 1 if even.
    moe/load_entropy: entropy of the loads over that of even ones. moe/dropped: share of choices dropped.
    """
    figures: dict[str, list[float]] = {}
    for layer, (*loads, dropped) in enumerate(table):
        total = sum(loads)
        if not total:
            continue
        entropy = -sum(load / total * math.log(load / total) for load in loads if load)
        for name, figure in (
            ("moe/load_max_over_mean", max(loads) * len(loads) / total),
            ("moe/dropped", dropped / total),
            ("moe/load_entropy", entropy / math.log(len(loads)) if len(loads) > 1 else 1.0),
        ):
            figures.setdefault(name, []).append(figure)
            if by_layer:
                figures[f"{name}_layer_{layer}"] = [figure]
        if by_layer:
            figures |= {f"moe/load_layer_{layer}_expert_{expert}": [load / total] for expert, load in enumerate(loads)}
    return {name: sum(values) / len(values) for name, values in figures.items()}


def _means_of_sums_and_counts(pairs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each (sum, count). Those with count 0 are left out, but NaN if all counts are 0."""
    counts = any(count for _, count in pairs.values())
    return {name: total / count if count else math.nan for name, (total, count) in pairs.items() if count or not counts}


def known_peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return a device's peak TFLOP/s for matrices of this dtype, or None if it is not in the table."""
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, device_name)), None)


def interval_log_line(report: IntervalReport, now: datetime) -> str:
    """Return Megatron's log line of an interval, followed by fields of ours (tokens per second, MFU)."""
    last, speed = report.last, report.throughput
    decoupled, norm, zeros, params = last.decoupled_learning_rate, last.grad_norm, last.num_zeros, last.params_norm
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {last.iteration:8d}/{report.train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"skipped samples: {report.skipped_samples:12d}" if report.skipped_samples > 0 else "",
        f"elapsed time per iteration (ms): {report.seconds_per_iteration * 1000.0:.1f}",
        "" if speed is None else f"throughput per GPU (TFLOP/s/GPU): {_tflops_text(speed.causal_tflops)}",
        f"learning rate: {last.learning_rate:.6E}",
        "" if decoupled is None else f"decoupled learning rate: {decoupled:.6E}",
        f"global batch size: {last.batch_size:5d}",
        *(f"{name}: {loss:.6E}" for name, loss in report.losses.items() if not name.startswith("moe/")),
        f"loss scale: {last.loss_scale:.1f}",
        "" if norm is None else f"grad norm: {norm:.3f}",
        "" if zeros is None else f"num zeros: {zeros}",
        "" if params is None else f"params norm: {params:.3f}",
        f"number of skipped iterations: {report.skipped_iterations:3d}",
        f"number of nan iterations: {report.nan_iterations:3d}",
        "" if speed is None else f"tokens per second: {speed.tokens_per_second:.1f}",
    ]
    if speed is not None and speed.peak:
        causal, square = speed.causal_tflops / speed.peak, speed.square_tflops / speed.peak
        parts.append(f"MFU: {causal:.1%} causal, {square:.1%} square, of {speed.peak:g} TFLOP/s")
    return " | ".join(filter(None, parts)) + " |"


def time_left_line(report: IntervalReport, now: datetime) -> str | None:
    """Return a line with the estimated end of the run and the tokens left; None in its last iteration."""
    if not report.samples_left:
        return None
    left = timedelta(seconds=round(report.seconds_left))
    return f" ETA: {now + left:%Y-%m-%d %H:%M:%S}, in {left} | tokens left: {report.tokens_left} |"


def _tflops_text(rate: float) -> str:
    """Format TFLOP/s with one decimal like Megatron; small values with two significant digits."""
    return f"{rate:.1f}" if rate >= 0.095 or rate <= 0 else f"{rate:.{1 - math.floor(math.log10(rate))}f}"


def validation_text(losses: Mapping[str, float], where: str) -> str:
    """Return Megatron's framed validation line. where: `iteration 100`, then ` on validation set` or ` on test set`."""
    line = f" validation loss at {where} | "
    for name, loss in losses.items():
        line += f"{name} value: {loss:.6E} | "
        if has_perplexity(name):
            line += f"{name} PPL: {perplexity(loss):.6E} | "
    frame = "-" * (len(line) + 1)
    return f"{frame}\n{line}\n{frame}"


def has_perplexity(name: str) -> bool:
    """Whether a metric of this name is a token cross entropy, so that its exp is a perplexity."""
    return name.endswith("loss") and not name.startswith("preference")


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss capped at 20 as in Megatron."""
    return math.exp(min(20.0, loss))


def memory_line(rank: int, iteration: int, memory: Mapping[str, float]) -> str:
    """Return Megatron's memory line; memory: bytes, as `device.device_memory_stats` gives them."""
    parts = [f"[Rank {rank}] (after {iteration} iterations) memory (MB)"]
    parts += [
        f"{name}: {memory[name] / MEGABYTE:.2f}" for name in ("allocated", "max allocated", "reserved", "max reserved")
    ]
    return " | ".join(parts)


def theoretical_memory_line(weights_and_optimizer: float, activations: float) -> str:
    """Return Megatron's line for the memory footprint computed from the config; arguments in bytes."""
    total = weights_and_optimizer + activations
    return (
        f"Theoretical memory footprints: weight and optimizer={weights_and_optimizer / MEGABYTE:.2f} MB, "
        f"activation={activations / MEGABYTE:.2f} MB, total={total / MEGABYTE:.2f} MB"
    )


def progress_file_line(
    event: str,
    *,
    now: datetime,
    job_id: str,
    num_devices: int,
    iteration: int,
    job_tflops: float,
    total_flops: float,
    total_tokens: int,
) -> str:
    """Return a line of progress.txt, tab-separated: time, job, event, speed of this job, and the run's work so far."""
    fields = [
        f"{now:%Y-%m-%d %H:%M:%S}",
        f"Job ID: {job_id}",
        f"# GPUs: {num_devices}",
        event,
        f"Iteration: {iteration}",
        f"Job throughput: {_tflops_text(job_tflops)} TFLOP/s/GPU",
        f"Floating-point operations: {total_flops:.2e}",
        f"Tokens (in billions): {total_tokens / 1e9:.2f}",
    ]
    return "\t".join(fields) + "\n"
