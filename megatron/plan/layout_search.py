"""Find the layouts in which a run fits, ranked by estimated time, and say why the others do not fit.

Every division of the ranks into tensor x context x pipeline x data, with interleaving, expert sizes, micro batch, recomputation and the
distributed optimizer, passes four filters, the cheapest first:

    rules       the run's own; a layout that breaks one is rejected with the rule and its numbers
    formulas    memory and time by analytic_estimate.py; what exceeds the memory without temporaries cannot fit
    layers      the best remaining ones, from dry runs of one layer of each kind (stage_estimate.py)
    dry runs    the best of these, with their real peak memory and the time of their real schedule

The network, the global batch and the number formats stay as given. The first two filters look at all layouts, the third until the
BEST are known, the last at as many as allowed. A layout is shown before those of which less is known. Whether a layout fits that
the third filter finds closer to the limit than its estimates are exact, only its dry run decides. Whatever machine searches, the
last filter has half of the time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.flags.declare import flag_name
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.run import RunConfig
from megatron.plan.analytic_estimate import AnalyticEstimate, analytic_estimate, with_padded_vocabulary
from megatron.plan.cost import StepTime
from megatron.plan.hardware import Hardware
from megatron.plan.setup import RunSetup
from megatron.plan.stage_estimate import estimate_tolerance
from megatron.plan.units import bytes_text

_NOTHING: Mapping[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_activations": False,
}
_EVERYTHING = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "recompute_modules": None,
}
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": _NOTHING,
    "selective": {**_NOTHING, "recompute_granularity": "selective"},
    "full": {**_NOTHING, **_EVERYTHING},
}
MICRO = (1, 2, 4, 8)
LONG = 8192  # tokens from which context parallelism is worth a try
MOST_CHUNKS = 8
BEST = 10  # layouts that are estimated from their layers
Progress = Callable[[int, int, str], None]
# Peak bytes and time of a step, from a dry run. `TimeoutError` if its time is up.
Planner = Callable[[RunConfig, int], tuple[int, StepTime]]
# As `profiled_estimate`; None if the layout cannot be estimated so. `TimeoutError` if its time is up.
LayerEstimator = Callable[[RunConfig, int], AnalyticEstimate | None]
Source = Literal["dry run", "layers", "formulas"]  # of an estimate, the best first


@dataclass(frozen=True, slots=True)
class CandidateLayout:
    """One parallel layout. dp follows from the other sizes and the number of ranks. chunks: virtual stages per rank;
    micro: micro batch; sharded: distributed optimizer.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    chunks: int
    ep: int
    etp: int
    micro: int
    recompute: str
    sharded: bool

    def __str__(self) -> str:
        words = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}"]
        words += [
            f"{name} {size}" for name, size in (("cp", self.cp), ("vpp", self.chunks), ("ep", self.ep)) if size > 1
        ]
        words += [f"etp {self.etp}"] * (self.ep > 1 and self.etp > 1)
        words += [f"micro {self.micro}"] * (self.micro > 0) + [f"recompute {self.recompute}"] * (
            self.recompute != "none"
        )
        return ", ".join(words + ["zero"] * self.sharded)

    def setting_values(self, setting: RunSetup) -> dict[str, Any]:
        """Return the settings of this layout, by field name."""
        parallel = setting.config.parallel
        values: dict[str, Any] = {
            "tensor_model_parallel_size": self.tp,
            "context_parallel_size": self.cp,
            "pipeline_model_parallel_size": self.pp,
            "num_virtual_stages_per_pipeline_rank": self.chunks if self.chunks > 1 else None,
            "num_layers_per_virtual_pipeline_stage": None,
            "sequence_parallel": self.tp > 1,
            "micro_batch_size": self.micro,
            "use_distributed_optimizer": self.sharded,
            "expert_model_parallel_size": self.ep,
            "overlap_param_gather": parallel.overlap_param_gather and self.sharded,
            **RECOMPUTE[self.recompute],
        }
        if self.pp != parallel.pp:
            values |= {
                "pipeline_model_parallel_layout": None,
                "decoder_first_pipeline_num_layers": None,
                "decoder_last_pipeline_num_layers": None,
                "microbatch_group_size_per_virtual_pipeline_stage": None,
            }
        if setting.config.model.moe.num_experts:
            values["expert_tensor_parallel_size"] = self.etp
        if self.cp != parallel.context_parallel_size:
            values["hierarchical_context_parallel_sizes"] = None
        return values

    def changed_flags_text(self, setting: RunSetup) -> str:
        """Return the flags that turn the given command into this layout, as text."""
        given, left_out = [], []
        for name, value in self.setting_values(setting).items():
            before, flag = setting.value(name), flag_name(name)
            if value != before and value is not None and value != () and value is not False:
                given.append(flag if value is True else f"{flag} {value}")
            elif value != before and before not in (None, ()):
                left_out.append(f"(without {flag})")
        return " ".join(given + left_out)


@dataclass(frozen=True, slots=True)
class RejectedLayout:
    """A rejected layout. rules: those that it breaks, or `memory`, `near-limit` or `no-gain`. says: the reason with its numbers."""

    layout: CandidateLayout
    rules: tuple[str, ...]
    says: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FittingLayout:
    """A layout that fits. needs: bytes of its fullest rank. source: what its bytes and its time are known from."""

    layout: CandidateLayout
    config: RunConfig
    needs: float
    time: StepTime
    source: Source = "formulas"


@dataclass(slots=True)
class LayoutRanking:
    """Result of a search, the fastest layout first. limit: bytes that a rank may take. complete: nothing was skipped for lack of time."""

    limit: float
    fits: list[FittingLayout] = field(default_factory=list)
    rejected: list[RejectedLayout] = field(default_factory=list)
    tried: int = 0
    complete: bool = True

    def rejections_by_rule(self) -> Counter[str]:
        """Count the rejected layouts by rule."""
        return Counter(rule for one in self.rejected for rule in one.rules)


def divisors(value: int, most: int) -> list[int]:
    """Return all divisors of a number up to `most`."""
    return [size for size in range(1, min(value, most) + 1) if value % size == 0]


def rank_divisions(setting: RunSetup, node: int) -> Iterator[CandidateLayout]:
    """Yield every division of the ranks, with micro batch 0 and nothing else set. node: largest tensor size, which needs fast links."""
    model, train, ranks = setting.config.model, setting.config.train, setting.world_size
    layers = model.num_layers or (model.encoder_num_layers or 0) + (model.decoder_num_layers or 0) or 1
    length = train.seq_length or 0
    long = length >= LONG or setting.config.parallel.context_parallel_size > 1
    for tp in _only_powers_of_two(divisors(ranks, node)):
        for cp in _only_powers_of_two(divisors(ranks // tp, max(1, length // 2048) if long else 1)):
            for pp in divisors(ranks // tp // cp, layers):
                chunks = [1] if pp == 1 else _virtual_stage_counts(layers, pp)
                for ep, etp in _expert_parallel_sizes(setting, tp, ranks // pp):
                    yield from (
                        CandidateLayout(tp, cp, pp, ranks // (tp * cp * pp), size, ep, etp, 0, "none", False)
                        for size in chunks
                    )


def _only_powers_of_two(numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if number & (number - 1) == 0]


def _virtual_stage_counts(layers: int, pp: int) -> list[int]:
    """Return the numbers of virtual stages per rank that divide the layers evenly; at least one number."""
    return [size for size in range(1, MOST_CHUNKS + 1) if layers % (pp * size) == 0 or size == 1]


def _expert_parallel_sizes(setting: RunSetup, tp: int, ranks: int) -> list[tuple[int, int]]:
    """Return (expert, expert-tensor) sizes for this many ranks of a stage."""
    count = setting.config.model.moe.num_experts
    if not count:
        return [(1, tp)]
    return [
        (ep, etp) for etp in dict.fromkeys((1, tp)) for ep in divisors(count, ranks // etp) if ranks % (ep * etp) == 0
    ]


def search_layouts(
    setting: RunSetup,
    hardware: Hardware,
    *,
    true_vocab_size: int,
    planner: Planner | None,
    estimator: LayerEstimator | None = None,
    plans: int = 3,
    seconds: float = 120.0,
    progress: Progress = lambda done, whole, what: None,
) -> LayoutRanking:
    """Search all layouts of a setting. estimator, planner: None leaves out the third, the fourth filter. plans: number of
    layouts that are to fit by a dry run. seconds: limit of time by the clock.
    """
    started, ranking = time.monotonic(), LayoutRanking(hardware.usable_bytes())
    divisions = list(rank_divisions(setting, hardware.node))
    random.Random(0).shuffle(divisions)  # so that a search that is cut short has seen some of all kinds
    later = (planner is not None) + (estimator is not None)
    for done, shape in enumerate(divisions):
        progress(done, len(divisions), "rules and formulas")
        if time.monotonic() - started > seconds / (1 + 2 * later):
            ranking.complete = False
            break
        _add_layout_variants_to_ranking(setting, shape, hardware, true_vocab_size, ranking)
    progress(len(divisions), len(divisions), "rules and formulas")
    ranking.fits.sort(key=_layout_sort_key)
    if estimator is not None:
        until = started + seconds_until_dry_runs(seconds, plans if planner else 0)
        _estimate_best_layouts(ranking, setting.world_size, hardware, estimator, until=until, progress=progress)
    if planner is not None:
        _dry_run_best_layouts(
            ranking, setting.world_size, hardware, planner, plans=plans, until=started + seconds, progress=progress
        )
    for one in [one for one in ranking.fits if one.needs > ranking.limit]:
        ranking.fits.remove(one)
        says = f"{_memory_excess_text(one.needs, hardware, None)} by dry runs of its layers, so near that only its own decides"
        ranking.rejected.append(RejectedLayout(one.layout, ("near-limit",), (says,)))
    return ranking


def seconds_until_dry_runs(seconds: float, plans: int) -> float:
    """Return after how many of a search's seconds its layers are no longer estimated. plans: dry runs that are to follow.

    A dry run takes longer than the layers of many layouts, and must end in what is left, else all of it was in vain.
    """
    return seconds / 2 if plans else seconds


def _layout_sort_key(one: FittingLayout) -> tuple[int, float, float]:
    """Sort key: the layouts of which most is known first, then by time, then by memory."""
    return get_args(Source).index(one.source), round(one.time.seconds, 9), one.needs


def _add_layout_variants_to_ranking(
    setting: RunSetup, shape: CandidateLayout, hardware: Hardware, true_vocab_size: int, ranking: LayoutRanking
) -> None:
    """Estimate a division in all its variants, and add each to the fitting or the rejected ones."""
    first = _resolve_layout_or_reject(setting, replace(shape, micro=1), ranking)
    if first is None:
        return
    requested_micro, batch, stages = (
        setting.config.train.micro_batch_size,
        first.train.global_batch_size,
        stage_specs_of_run(first),
    )

    def estimate(config: RunConfig) -> AnalyticEstimate:
        return analytic_estimate(config, setting.world_size, hardware, stages, passes=setting.passes)

    for micro in sorted({*MICRO, *([requested_micro] if requested_micro else [])}):
        layout = replace(shape, micro=micro)
        if micro * shape.dp > batch:
            break
        one = first if micro == 1 else _resolve_layout_or_reject(setting, layout, ranking)
        if one is None:
            continue
        variants = _recompute_variants(layout, one, true_vocab_size)
        least = estimate(variants[0][1])
        if least.needs > hardware.usable_bytes():  # what keeps the least; a larger micro batch keeps more
            ranking.tried += 1
            reason = f"{_memory_excess_text(least.needs, hardware, least.position)}, however much is recomputed or cut"
            ranking.rejected.append(RejectedLayout(layout, ("memory",), (reason,)))
            break
        drawn = [(*variants[0], least), *((variant, config, estimate(config)) for variant, config in variants[1:])]
        _keep_pareto_variants(drawn, hardware, ranking)


def _recompute_variants(
    layout: CandidateLayout, plain: RunConfig, true_vocab_size: int
) -> list[tuple[CandidateLayout, RunConfig]]:
    """Return all recomputation modes of a layout, with and without the distributed optimizer, least memory first. plain: its resolved config."""
    made = []
    for sharded in (True, False) if layout.dp * layout.cp > 1 else (False,):
        for name in reversed(list(RECOMPUTE)):
            changes = RECOMPUTE[name]
            recompute = replace(plain.recompute, **changes)
            if name == "selective" and not recompute.recompute_modules:
                recompute = replace(recompute, recompute_modules=("core_attn",))
            parallel = replace(
                plain.parallel,
                use_distributed_optimizer=sharded,
                overlap_param_gather=plain.parallel.overlap_param_gather and sharded,
            )
            config = with_padded_vocabulary(replace(plain, recompute=recompute, parallel=parallel), true_vocab_size)
            made.append((replace(layout, recompute=name, sharded=sharded), config))
    return made


def _keep_pareto_variants(
    drawn: list[tuple[CandidateLayout, RunConfig, AnalyticEstimate]], hardware: Hardware, ranking: LayoutRanking
) -> None:
    """Keep those variants of one layout that fit and that no other variant beats in both time and memory."""
    ranking.tried += len(drawn)
    fitting: list[FittingLayout] = []
    for layout, config, one in sorted(drawn, key=lambda row: (row[2].time.seconds, row[2].needs)):
        if one.needs > hardware.usable_bytes():
            ranking.rejected.append(
                RejectedLayout(layout, ("memory",), (_memory_excess_text(one.needs, hardware, one.position),))
            )
        elif fitting and one.needs >= min(other.needs for other in fitting):
            ranking.rejected.append(
                RejectedLayout(
                    layout,
                    ("no-gain",),
                    (f"needs {bytes_text(one.needs)}, no less than with {fitting[-1].layout}, and takes longer",),
                )
            )
        else:
            fitting.append(FittingLayout(layout, config, one.needs, one.time))
    ranking.fits += fitting


def _resolve_layout_or_reject(setting: RunSetup, layout: CandidateLayout, ranking: LayoutRanking) -> RunConfig | None:
    """Return the resolved config of a layout; None if rules forbid it, which is noted in the ranking."""
    given = setting.with_values(layout.setting_values(setting))
    config, problems = resolve_and_examine(given.config, setting.world_size)
    if not problems:
        return config
    ranking.tried += 1
    ranking.rejected.append(
        RejectedLayout(
            layout,
            tuple(dict.fromkeys(rule for rule, _ in problems)),
            tuple(" ".join(message.split()) for _, message in problems),
        )
    )
    return None


def _estimate_best_layouts(
    ranking: LayoutRanking,
    world_size: int,
    hardware: Hardware,
    estimator: LayerEstimator,
    *,
    until: float,
    progress: Progress,
) -> None:
    """Estimate the best layouts from their layers until the BEST are known; the next is always the one that is expected to be the fastest
    of those that are expected to fit. until: when this ends once one is known; before, the estimator's own limit ends it.
    """
    unknown, best = list(ranking.fits), list[FittingLayout]()
    wrong = _FormulaErrors()

    def expected(one: FittingLayout) -> tuple[bool, float]:
        needs, seconds = wrong.expected(one)
        return needs > hardware.usable_bytes(), seconds

    while unknown:
        unknown.sort(key=expected)
        excess, seconds = expected(unknown[0])
        fitting = [one for one in best if one.needs <= ranking.limit]
        if len(fitting) >= BEST and (excess or seconds >= fitting[BEST - 1].time.seconds):
            break
        one = unknown.pop(0)
        progress(len(wrong.ratios), len(wrong.ratios) + len(unknown), f"layers of {one.layout}")
        try:
            if best and time.monotonic() > until:
                raise TimeoutError
            estimate = estimator(one.config, world_size)
        except TimeoutError:
            ranking.complete = False
            unknown.append(one)
            break
        if estimate is None:
            continue
        ranking.fits.remove(one)
        wrong.learn(one, estimate)
        if estimate.needs > hardware.usable_bytes() * (1 + estimate_tolerance(one.config)):
            says = _memory_excess_text(estimate.needs, hardware, estimate.position) + " by dry runs of its layers"
            ranking.rejected.append(RejectedLayout(one.layout, ("memory",), (says,)))
            continue
        best.append(replace(one, needs=estimate.needs, time=estimate.time, source="layers"))
        best.sort(key=_layout_sort_key)
    left = [one for one in ranking.fits if one.source == "formulas"]
    ranking.fits = best + sorted(left, key=expected)


@dataclass(slots=True)
class _FormulaErrors:
    """By how much formulas were wrong: (recomputation, true bytes over theirs, true seconds over theirs) of each layout that is known."""

    ratios: list[tuple[str, float, float]] = field(default_factory=list)

    def learn(self, one: FittingLayout, estimate: AnalyticEstimate) -> None:
        """Note what a layout that formulas estimated is now known to take."""
        ratio = estimate.needs / one.needs, estimate.time.seconds / one.time.seconds
        self.ratios.append((one.layout.recompute, *ratio))

    def expected(self, one: FittingLayout) -> tuple[float, float]:
        """Return bytes and seconds if formulas are as wrong as on average, where it is known for layouts that recompute as much."""
        alike = [ratio for ratio in self.ratios if ratio[0] == one.layout.recompute] or self.ratios
        if not alike:
            return one.needs, one.time.seconds
        return (
            one.needs * statistics.fmean(needs for _, needs, _ in alike),
            one.time.seconds * statistics.fmean(seconds for _, _, seconds in alike),
        )


def _dry_run_best_layouts(
    ranking: LayoutRanking,
    world_size: int,
    hardware: Hardware,
    planner: Planner,
    *,
    plans: int,
    until: float,
    progress: Progress,
) -> None:
    """Make dry runs of the best layouts until `plans` of them fit; these are ranked first, by their dry run."""
    fitting, done = 0, 0
    for place, one in enumerate(list(ranking.fits)):
        if fitting == plans:
            break
        if time.monotonic() > until:
            ranking.complete = False
            break
        progress(fitting, plans, f"dry run {done + 1}: {one.layout}")
        try:
            peak, step = planner(one.config, world_size)
        except TimeoutError:
            ranking.complete = False
            break
        done += 1
        if peak > hardware.usable_bytes():
            ranking.fits.remove(one)
            ranking.rejected.append(
                RejectedLayout(one.layout, ("memory",), (_memory_excess_text(peak, hardware, None) + " by a dry run",))
            )
        else:
            fitting += 1
            ranking.fits[ranking.fits.index(one)] = replace(one, needs=peak, time=step, source="dry run")
    progress(plans, plans, "dry runs")
    ranking.fits.sort(key=_layout_sort_key)


def _memory_excess_text(needs: float, hardware: Hardware, position: int | None) -> str:
    where = "" if position is None else f" on pipeline rank {position}"
    return f"needs {bytes_text(needs)}{where} of {bytes_text(hardware.usable_bytes())}"
