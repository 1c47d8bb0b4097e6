"""Two runs laid beside each other by their run logs: where they part, and what they were given that differs.

    steps 1 .. 11   equal to the last bit
    step  12        the first that differs, in the last bits only       step 14   the first beyond the tolerance

What differs is ranked by how likely it made the difference. Runs that are beyond the tolerance within three steps compute
something else; where the last bits only differ, sums were taken in another order:

    beyond     resumed state, data, tokenizer, network, order of samples, optimizer, number format, code, layout, machines
    last bits  layout, machines, code, number format, resumed state, data, tokenizer, network, order of samples, optimizer

Within a rank of that order settings come before what stands beside them, by name. Settings that only say what is reported
and kept cannot change a number, and stand apart. Of a run that was started more than once, those inputs count that were in
force at the step where the runs part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.settings.compilation import CompileConfig
from megatron.core.config.settings.data import DataConfig, TokenizerConfig
from megatron.core.config.settings.model import RequestedModel
from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import (
    ActivationOffloadConfig,
    CheckpointConfig,
    LogConfig,
    RecomputeConfig,
    RequestedRun,
    RequestedTraining,
)
from megatron.training.report.run_log import read_run_log_events

BEYOND = (
    "resumed state",
    "data",
    "tokenizer",
    "network",
    "order of samples",
    "optimizer",
    "number format",
    "code",
    "layout",
    "machines",
)
_SUMS = ("layout", "machines", "code", "number format")  # what takes sums in another order
LAST_BITS = (*_SUMS, *(kind for kind in BEYOND if kind not in _SUMS))
_SOON = 3  # steps in which rounding does not grow far
REPORTS = "reports"  # cannot change a number
KINDS: Mapping[type, str] = {
    RequestedModel: "network",
    ParallelConfig: "layout",
    PrecisionConfig: "number format",
    RecomputeConfig: "layout",
    OptimizerConfig: "optimizer",
    ScheduleConfig: "optimizer",
    DataConfig: "data",
    TokenizerConfig: "tokenizer",
    RequestedTraining: "order of samples",
    LogConfig: REPORTS,
    CheckpointConfig: REPORTS,
    ActivationOffloadConfig: "layout",
    CompileConfig: "layout",
}
KIND_OF: Mapping[str, str] = {
    **dict.fromkeys(("train_iters", "train_samples", "calculate_per_token_loss"), "optimizer"),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "deterministic_mode",
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
        ),
        "layout",
    ),
    **dict.fromkeys(("on_bad_step", "max_bad_steps"), "order of samples"),
    **dict.fromkeys(
        ("finetune", "ckpt_step", "load_optim", "load_rng", "pretrained_checkpoint", "load"), "resumed state"
    ),
    **dict.fromkeys(
        """
        eval_iters eval_interval exit_interval exit_duration_in_mins exit_signal_handler exit_signal manual_gc
        manual_gc_interval empty_unused_memory_level check_for_nan_in_loss_and_grad log_samples num_workers
        data_cache_path distributed_timeout_minutes
        """.split(),
        REPORTS,
    ),
}


@dataclass(frozen=True, slots=True)
class RunStart:
    """A start event of a run log and the iteration that it continued from; loaded: whether a checkpoint was loaded."""

    given: Mapping[str, Any]
    iteration: int
    loaded: bool = False


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run log's content. steps: iteration -> losses and norm, of repeated ones the last. end: why, in words."""

    path: str
    starts: tuple[RunStart, ...]
    steps: Mapping[int, Mapping[str, float]]
    end: str

    def start_in_force(self, iteration: int) -> RunStart:
        """Return the latest start before an iteration."""
        return next((start for start in reversed(self.starts) if start.iteration < iteration), self.starts[0])


@dataclass(frozen=True, slots=True)
class StepDifference:
    """A step whose numbers differ between two runs. size: the largest relative difference; values: name -> (a, b)."""

    iteration: int
    size: float
    values: Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True, slots=True)
class RunSetupDifference:
    """What differs between two runs. kind: what it can change. origins: where a setting came from in each."""

    kind: str
    name: str
    a: Any
    b: Any
    origins: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RunDivergence:
    """Where two runs diverge. first: the first step that is not bitwise equal; beyond: the first that differs by more
    than the tolerance. common: the steps that both runs have. inputs: what differs, the likeliest cause first. idle:
    differences that cannot change numbers. restarts: iterations before the divergence from which only one of the runs
    was resumed.
    """

    common: tuple[int, ...]
    first: StepDifference | None
    beyond: StepDifference | None
    inputs: tuple[RunSetupDifference, ...]
    idle: tuple[RunSetupDifference, ...]
    restarts: tuple[int, ...]


def read_run_history(path: str | Path) -> RunHistory:
    """Read a run log file, or the one in this folder. Raises `OSError`; `ValueError` if it has no start event."""
    starts: list[RunStart] = []
    steps: dict[int, dict[str, float]] = {}
    end = "nothing more was heard of it"
    for event in read_run_log_events(path):
        if event["event"] == "start":
            starts.append(RunStart(event, 0))
            end = "nothing more was heard of it"
        elif event["event"] == "loaded" and starts:
            starts[-1] = dataclasses.replace(starts[-1], iteration=event["iteration"], loaded=True)
            steps = {iteration: step for iteration, step in steps.items() if iteration <= event["iteration"]}
        elif event["event"] == "steps":
            steps |= _metrics_by_iteration(event)
        elif event["event"] == "end":
            end = event["reason"]
    if not starts:
        raise ValueError(f"{path} holds no start of a run")
    return RunHistory(str(path), tuple(starts), steps, end)


def find_divergence(a: RunHistory, b: RunHistory, tolerance: float) -> RunDivergence:
    """Find where two runs diverge, and likely causes. tolerance: relative difference of a loss or gradient norm."""
    common = tuple(sorted(a.steps.keys() & b.steps.keys()))
    apart = [_step_difference(iteration, a.steps[iteration], b.steps[iteration]) for iteration in common]
    first = next((one for one in apart if one.values), None)
    beyond = next((one for one in apart if one.size > tolerance), None)
    parting = first.iteration if first else common[-1] if common else 1
    soon = max((one.size for one in apart if one.iteration < parting + _SOON), default=0.0)
    order = LAST_BITS if first and soon <= tolerance else BEYOND
    known, idle = _sorted_setup_differences(a.start_in_force(parting), b.start_in_force(parting), order)
    resumed = _resume_iterations_before(parting, a) ^ _resume_iterations_before(parting, b)
    return RunDivergence(common, first, beyond, known, idle, tuple(sorted(resumed)))


def _sorted_setup_differences(
    mine: RunStart, theirs: RunStart, order: Sequence[str]
) -> tuple[tuple[RunSetupDifference, ...], tuple[RunSetupDifference, ...]]:
    """Return (differing inputs of the kinds in `order`, in that order; the others)."""
    causes = list(run_setup_differences(mine.given, theirs.given))
    # A --load that nothing was loaded from is only where the run saves.
    kinds = [kind for kind in order if kind != "resumed state" or mine.loaded or theirs.loaded]
    known = sorted((one for one in causes if one.kind in kinds), key=lambda one: kinds.index(one.kind))
    return tuple(known), tuple(one for one in causes if one not in known)


def _resume_iterations_before(iteration: int, run: RunHistory) -> set[int]:
    """Return the iterations that a run started or resumed from before an iteration."""
    return {start.iteration for start in run.starts if start.iteration < iteration}


def run_setup_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[RunSetupDifference]:
    """Yield everything that differs between two start events."""
    kinds = affected_area_by_setting()
    for name, (mine, theirs) in _unequal_items(a, b, "settings"):
        origins = tuple(one.get("origins", {}).get(name, "default") for one in (a, b))
        yield RunSetupDifference(kinds.get(name, REPORTS), flag_name(name), mine, theirs, origins)
    for name, (mine, theirs) in _unequal_items(a, b, "data"):
        yield RunSetupDifference("data", f"files of {name}", mine, theirs)
    for part, kind in (
        ("tokenizer", "tokenizer"),
        ("code", "code"),
        ("layout", "layout"),
        ("kernels", "machines"),
        ("environment", "machines"),
    ):
        for name, (mine, theirs) in _unequal_items(a, b, part):
            if name in ("sources", "ranks") or part in ("tokenizer", "kernels"):
                yield RunSetupDifference(kind, f"{part}: {name}", mine, theirs)
            elif part == "code" or name == "hosts":  # what changed in the code, `sources` says
                yield RunSetupDifference(REPORTS, f"{part}: {name}", mine, theirs)
            elif part == "environment" and name != "variables":
                yield RunSetupDifference(kind, f"{part}: {name}", mine, theirs)
    left, right = ({"variables": one.get("environment", {}).get("variables", {})} for one in (a, b))
    for name, (mine, theirs) in _unequal_items(left, right, "variables"):
        # What the launcher tells of this very start says nothing of the numbers.
        yield RunSetupDifference(
            REPORTS if name.startswith(("TORCHELASTIC_", "SLURM_")) else "machines", f"${name}", mine, theirs
        )


def affected_area_by_setting() -> dict[str, str]:
    """Return setting -> the kind of what it changes (network, layout, ..)."""
    return dict(_affected_area_by_field(RequestedRun(), REPORTS)) | dict(KIND_OF)


def _affected_area_by_field(config: Any, above: str) -> Iterator[tuple[str, str]]:
    """Yield (setting, kind) for all fields of a nested config; above: the kind of a config class without an own."""
    kind = KINDS.get(type(config), above)
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if dataclasses.is_dataclass(value):
            yield from _affected_area_by_field(value, kind)
        else:
            yield one.name, kind


def _unequal_items(a: Mapping[str, Any], b: Mapping[str, Any], part: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield name -> (value in a, value in b) for the entries of a mapping field that differ."""
    mine, theirs = a.get(part) or {}, b.get(part) or {}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield name, (mine.get(name), theirs.get(name))


def _metrics_by_iteration(event: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return iteration -> losses and gradient norm by name, from a "steps" event."""
    columns: dict[str, Sequence[Any]] = dict(event["losses"])
    columns |= {"gradient norm": event["grad_norm"]} if "grad_norm" in event else {}
    return {
        iteration: {name: float(values[place]) for name, values in columns.items() if values[place] is not None}
        for place, iteration in enumerate(event["iterations"])
    }


def _step_difference(iteration: int, a: Mapping[str, float], b: Mapping[str, float]) -> StepDifference:
    """Return which numbers of a step differ between two runs."""
    values = {
        name: (a.get(name), b.get(name))
        for name in dict.fromkeys((*a, *b))
        if not _same_number(a.get(name), b.get(name))
    }
    return StepDifference(
        iteration, max((_relative_difference(*pair) for pair in values.values()), default=0.0), values
    )


def _same_number(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def _relative_difference(a: float | None, b: float | None) -> float:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
