"""Plan a run: a dry run, its cost, and changes to flags that make it fit.

The caller passes the dry run in (`DryRunner`), so that nothing here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import RunConfig
from megatron.plan.analytic_estimate import analytic_estimate, with_padded_vocabulary
from megatron.plan.cost import StepCost, step_cost
from megatron.plan.hardware import Hardware
from megatron.plan.layout_search import RECOMPUTE
from megatron.plan.setup import RunSetup
from megatron.plan.simulate.collective_matching import CollectiveMatchReport
from megatron.plan.simulate.trace import KINDS, DryRunResult, Trace
from megatron.plan.units import bytes_text

MOST_TRIED = 6


class DryRunner(Protocol):
    """`simulate.dry_run.dry_run`, or a function with its signature."""

    def __call__(self, config: RunConfig, world_size: int, ranks: Sequence[int] | None = None) -> DryRunResult:
        """Simulate one step of every distinct kind of rank, or of these ranks."""


@dataclass(frozen=True, slots=True)
class MemorySavingChange:
    """A change to the flags that was simulated. words: the flags. peak: bytes afterwards; saved: bytes. slower: ratio of a step's seconds, by formulas. fits: whether the run
    fits afterwards.
    """

    words: str
    peak: int
    saved: int
    slower: float
    fits: bool


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The plan of a run. seconds: duration of planning. advice: changes that save memory, if the run does not fit. matching: whether its ranks would
    deadlock, if that was checked.
    """

    run: DryRunResult
    cost: StepCost
    hardware: Hardware
    seconds: float
    advice: tuple[MemorySavingChange, ...] = ()
    matching: CollectiveMatchReport | None = None

    @property
    def no_rank_deadlocks(self) -> bool:
        """Whether no rank would wait forever, as far as checked."""
        return self.matching is None or not self.matching.problems

    @property
    def fits_in_memory(self) -> bool:
        """Whether every rank stays within its memory."""
        return self.run.worst_trace.peak <= self.hardware.usable_bytes()


def estimate_run(
    config: RunConfig, world_size: int, hardware: Hardware, dry_run: DryRunner, *, passes: int = 0
) -> RunEstimate:
    """Simulate a step of a resolved config with its vocabulary; return memory and time. passes: see `step_cost`."""
    started = time.monotonic()
    run = dry_run(config, world_size)
    return RunEstimate(run, step_cost(run, hardware, passes=passes), hardware, time.monotonic() - started)


def add_memory_saving_changes(
    planned: RunEstimate, setting: RunSetup, dry_run: DryRunner, *, true_vocab_size: int, seconds: float = 60.0
) -> RunEstimate:
    """Add changes that save memory to the plan of a setting that does not fit: each is simulated, alone and then combined until the run fits.

    seconds: time limit for further changes.
    """
    until, tried, advice = time.monotonic() + seconds, 0, []
    saving: list[tuple[MemorySavingChange, dict[str, Any]]] = []
    trial = _ChangeSimulator(planned, setting, dry_run, true_vocab_size)
    for words, values in memory_saving_edits(setting, planned.run.config):
        one = trial.simulate_change(words, values) if time.monotonic() < until else None
        tried += one is not None
        if one is not None and one.saved > 0:
            advice.append(one)
            saving.append((one, dict(values)))
        if tried == MOST_TRIED:
            break
    if saving and not any(one.fits for one in advice):
        saving.sort(key=lambda pair: -pair[0].saved)
        words, together = saving[0][0].words, saving[0][1]
        for one, values in saving[1:]:
            if time.monotonic() > until or set(values) & set(together):
                continue
            words, together = f"{words} {one.words}", together | values
            both = trial.simulate_change(words, together)
            if both is not None:
                advice.append(both)
                if both.fits:
                    break
    advice.sort(key=lambda one: (not one.fits, one.slower if one.fits else -one.saved))
    return replace(planned, advice=tuple(advice))


def memory_saving_edits(setting: RunSetup, config: RunConfig) -> list[tuple[str, Mapping[str, Any]]]:
    """Return changes that can save memory and that this run has not made yet, as (flags, settings), those that cost the
    least time first. config: the resolved setting.
    """
    parallel, train, ranks = config.parallel, config.train, setting.world_size
    dp = parallel.data_parallel_size(ranks)
    savings: list[tuple[str, Mapping[str, Any]]] = []
    granularity = config.recompute.recompute_granularity
    if not parallel.use_distributed_optimizer and dp * parallel.context_parallel_size > 1:
        savings.append(("--use-distributed-optimizer", {"use_distributed_optimizer": True}))
    if parallel.tp > 1 and not parallel.sequence_parallel:
        savings.append(("--sequence-parallel", {"sequence_parallel": True}))
    if granularity is None:
        selective = {"recompute_granularity": "selective", "recompute_activations": False}
        savings.append(("--recompute-granularity selective", selective))
    if train.micro_batch_size % 2 == 0:
        half = train.micro_batch_size // 2
        savings.append(
            (f"--micro-batch-size {half}", {"micro_batch_size": half, "global_batch_size": train.global_batch_size})
        )
    if granularity != "full":
        savings.append(
            ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", RECOMPUTE["full"])
        )
    if dp % 2 == 0:
        tp, pp = 2 * parallel.tp, 2 * parallel.pp
        keep = {"global_batch_size": train.global_batch_size}
        savings.append(
            (
                f"--tensor-model-parallel-size {tp} --sequence-parallel",
                {"tensor_model_parallel_size": tp, "sequence_parallel": True, **keep},
            )
        )
        savings.append((f"--pipeline-model-parallel-size {pp}", {"pipeline_model_parallel_size": pp, **keep}))
    return savings


@dataclass(frozen=True, slots=True)
class _ChangeSimulator:
    """The setting and the plan that changes are compared with."""

    planned: RunEstimate
    setting: RunSetup
    dry_run: DryRunner
    true_vocab_size: int

    def simulate_change(self, words: str, values: Mapping[str, Any]) -> MemorySavingChange | None:
        """Simulate a change; None if rules forbid it."""
        ranks, before, hardware = self.setting.world_size, self.planned.run, self.planned.hardware
        config, problems = resolve_and_examine(self.setting.with_values(values).config, ranks)
        if problems:
            return None
        config = with_padded_vocabulary(config, self.true_vocab_size)
        times = [
            analytic_estimate(one, ranks, hardware, stage_specs_of_run(one), passes=self.setting.passes).time.seconds
            for one in (before.config, config)
        ]
        # The fullest rank stays the fullest when only what all ranks do alike changes.
        same = all(
            getattr(before.config.parallel, size) == getattr(config.parallel, size)
            for size in ("tp", "pp", "context_parallel_size", "expert_model_parallel_size")
        )
        peak = self.dry_run(config, ranks, [before.worst_trace.rank] if same else None).worst_trace.peak
        return MemorySavingChange(
            words, peak, before.worst_trace.peak - peak, times[1] / times[0] - 1.0, peak <= hardware.usable_bytes()
        )


def fullest_vs_emptiest_rank_lines(run: DryRunResult) -> list[str]:
    """Return lines on what the fullest rank holds more of than the emptiest, and which part of the layout causes it."""
    worst, least = run.worst_trace, min(run.traces, key=lambda trace: trace.peak)
    if worst.peak - least.peak < 0.001 * worst.peak:
        return ["all ranks hold the same" + ("" if worst.peak == least.peak else ", but for less than a thousandth")]
    ahead = {kind: getattr(worst.at_peak, kind) - getattr(least.at_peak, kind) for kind in KINDS}
    more = [
        f"{kind} {bytes_text(getattr(worst.at_peak, kind))} against {bytes_text(getattr(least.at_peak, kind))}"
        for kind in sorted(ahead, key=lambda kind: -ahead[kind])[:2]
        if ahead[kind] > 0.01 * worst.peak
    ]
    reasons = [
        f"rank {worst.rank} holds {bytes_text(worst.peak - least.peak)} more than rank {least.rank}: " + ", ".join(more)
    ]
    facts = [(stage_contents_text(run, trace), max_forwards_in_flight(run, trace)) for trace in (worst, least)]
    if facts[0] != facts[1]:
        for trace, (what, alive) in zip((worst, least), facts):
            waiting = (
                f"{alive} forward passes at once still await their"
                if alive > 1
                else "1 forward pass at once still awaits its"
            )
            reasons.append(
                f"rank {trace.rank} holds {what or 'neither embedding nor head'}, and at most {waiting} backward pass"
            )
    return reasons


def stage_contents_text(run: DryRunResult, trace: Trace) -> str:
    """Name what a rank's stages hold besides layers."""
    stages = [stage for stage in stage_specs_of_run(run.config) if stage.rank == trace.place.get("pp", 0)]
    has = [
        name
        for name, there in (
            ("the embedding", any(stage.has_embedding for stage in stages)),
            ("the head", any(stage.has_output for stage in stages)),
        )
        if there
    ]
    return " and ".join(has)


def max_forwards_in_flight(run: DryRunResult, trace: Trace) -> int:
    """Return the largest number of forward passes of a rank that wait for their backward pass."""
    live = most = 0
    for action in run.whole_plan[trace.place.get("pp", 0)]:
        live += {"F": 1, "B": -1}.get(action.op, 0)
        most = max(most, live)
    return most
