"""How long a training step takes: the time of every event of a dry run, placed on the schedule that is really run.

    operation    the larger of (FLOPs / the rate that a product of its size reaches) and (bytes / memory bandwidth), plus a kernel launch.
                 An operation that moves no bytes is a view and takes no time
    collective   a ring, a tree or an all-to-all over the links of its group (hardware.py)
    action       the sum of its events: one forward or backward pass of one stage
    step         the schedule, simulated with these durations and the times of messages (timeline.py). Gradient reductions run beside it
                 from the moment they are started; what remains at its end is exposed; then the update

So the bubble is that of the real schedule with its uneven stages, not (p-1)/(m+p-1). Not included: reading data, writing checkpoints, slow
ranks, experts with more tokens than others, and links shared by two axes at once. Collectives of tensor, context and expert ranks
count in full, though some overlap with products: the estimate is pessimistic there.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

from megatron.core.config.settings.run import RunConfig
from megatron.core.models.flops import flops_per_sample
from megatron.core.pipeline_parallel.schedules import forward_only_plan, num_plan_stages, stage_placement_of_plan
from megatron.core.pipeline_parallel.timeline import Timeline, simulate_pipeline_plan
from megatron.plan.hardware import Hardware, collective_seconds
from megatron.plan.simulate.trace import ConsecutiveEvents, DryRunResult, StepEvent, Trace, split_into_event_spans

DATA_AXES = ("dp", "dp_cp", "edp")  # over which gradients are summed and new weights gathered
ATTENTION = re.compile(r"attention|flash|sdpa")
# What runs nothing: memory that is only taken, and tensors that share it.
FREE = re.compile(r"aten\.(new_)?empty|aten\.(detach|alias|_unsafe_view|lift_fresh|_reshape_alias)")
# What reads a few rows of a table: it moves what it makes.
PICKS = re.compile(r"aten\.(gather|embedding|index_select|index)$")
# Where a CPU computes attention by operations of its own; in chunks, with dropout, of the keys that are met alone.
ATTENTION_ROLES = ("attention", "attention in chunks")
FORWARD = "forward passes without gradients"  # of networks that are asked before a step
_SAME_PRICE = attrgetter(
    "kind", "name", "flops", "moved", "axis", "ranks", "peer", "shape", "dtype", "factors", "parts", "role"
)
ACTION = re.compile(r"([FBWR]\d+)(?:\.\d+)?$")


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step. bubble: idle share of the schedule. parts: seconds of the busiest pipeline rank by what they are spent on.

    tokens: per second, of all ranks. flops: model FLOPs per second of one rank, causal. mfu, mfu_square: shares of the peak rate, counting attention
    causally or in full.
    """

    seconds: float
    bubble: float
    tokens: float
    flops: float
    mfu: float
    mfu_square: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step by a dry run. time: of a step. timeline: of its whole schedule, in seconds. traffic: bytes of
    each axis' collectives in a step, of the rank with the most; messages are under `pp`.
    """

    time: StepTime
    timeline: Timeline
    traffic: Mapping[str, float]


@dataclass(slots=True)
class ActionKindCost:
    """Time and traffic of all events of one kind of action, or of one phase, on a rank. begun: action -> seconds spent
    before it. parts: seconds by category. launches: gradient reductions started in the last one, as (seconds after its
    start, duration). beside: seconds of FSDP2's collectives, which overlap with the layers.
    """

    begun: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    traffic: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    launches: list[tuple[float, float]] = field(default_factory=list)
    beside: float = 0.0

    def add_span(self, other: ActionKindCost, before: float) -> None:
        """Add the time of a span that follows within an action. before: seconds spent here when the action began."""
        self.launches += [(self.seconds - before + after, seconds) for after, seconds in other.launches]
        self.seconds += other.seconds
        self.beside += other.beside
        for mine, theirs in ((self.parts, other.parts), (self.traffic, other.traffic)):
            for name, amount in theirs.items():
                mine[name] += amount

    @property
    def seconds_per_action(self) -> float:
        """Average seconds of one action."""
        return self.seconds / len(self.begun)


@dataclass(frozen=True, slots=True)
class RankStepTime:
    """The time of one rank. spent: by kind of action (F0, B0, W0, R0) and by phase. message: seconds of its slowest message to a neighbour.
    gathers: seconds of each all-gather of new weights, which the next forward pass can hide.
    """

    place: int
    spent: Mapping[str, ActionKindCost]
    message: float
    gathers: tuple[float, ...]


def step_cost(run: DryRunResult, hardware: Hardware, *, passes: int = 0) -> StepCost:
    """Compute time, traffic and utilization of a step. passes: forward passes of all its microbatches before it."""
    ranks = [rank_time(trace, run.config, hardware) for trace in run.traces]
    if run.config.parallel.hybrid_context_parallel:
        _fill_idle_microbatches(ranks, run.num_microbatches)
    times = _action_seconds_by_stage(ranks, num_plan_stages(run.whole_plan))
    message = max(rank.message for rank in ranks)
    if not run.config.parallel.overlap_p2p_communication:
        # Both ends wait while a message passes; so it takes their time, and the taker's waiting begins before the sender's ends.
        last = len(times["F"]) - 1
        for op in "FB":
            times[op] = [seconds + message * ((stage > 0) + (stage < last)) for stage, seconds in enumerate(times[op])]
        message = -message
    whole = [ahead + later for ahead, later in zip(times["B"], times["W"], strict=True)]
    timeline = simulate_pipeline_plan(
        run.whole_plan,
        forward=times["F"],
        backward=whole,
        weight=times["W"],
        message=message,
        dual_batch_overlap=run.config.parallel.overlap_moe_expert_parallel_comm,
    )
    ends = [_seconds_until_gradients_reduced(rank, run, timeline) for rank in ranks]
    tails = [
        sum(spent.seconds for key, spent in rank.spent.items() if not ACTION.match(key)) + _exposed_gather_seconds(rank)
        for rank in ranks
    ]
    extra = passes * _forward_only_seconds(run, times["F"], message)
    seconds = max(ends) + max(tails)
    busiest = max(ranks, key=lambda rank: sum(spent.seconds_per_action for spent in rank.spent.values()))
    parts = _step_seconds_by_category(busiest, run.whole_microbatches, seconds) | ({FORWARD: extra} if passes else {})
    traffic: dict[str, float] = {}
    for rank in ranks:
        for axis, moved in _traffic_by_axis(rank, run.whole_microbatches, passes).items():
            traffic[axis] = max(traffic.get(axis, 0.0), moved)
    return StepCost(
        step_time_from_seconds(
            run.config, run.world_size, hardware, seconds=seconds + extra, bubble=timeline.bubble, parts=parts
        ),
        timeline,
        traffic,
    )


def _fill_idle_microbatches(ranks: Sequence[RankStepTime], num_microbatches: int) -> None:
    """Record missing microbatches of ranks with fewer than the schedule, so that all share the same total time."""
    for rank in ranks:
        for key, spent in rank.spent.items():
            if key[0] in "FB" and ACTION.match(key):
                spent.begun |= {
                    f"{key}.{number}": spent.seconds for number in range(len(spent.begun), num_microbatches)
                }


def _forward_only_seconds(run: DryRunResult, forward: Sequence[float], message: float) -> float:
    """Return seconds of one forward pass of all microbatches without gradients. forward: seconds of a microbatch on each stage."""
    pp, stages = len(run.whole_plan), len(forward)
    plan = forward_only_plan(pp, stages // pp, run.whole_microbatches, stage_placement_of_plan(run.whole_plan))
    return max(row[-1] for row in simulate_pipeline_plan(plan, forward=forward, message=message).end)


def _action_seconds_by_stage(ranks: Sequence[RankStepTime], stages: int) -> dict[str, list[float]]:
    """Return operation -> seconds of one of them on each stage, by the stage's slowest rank."""

    def slowest(key: str) -> float:
        return max((rank.spent[key].seconds_per_action for rank in ranks if key in rank.spent), default=0.0)

    return {op: [slowest(f"{op}{stage}") for stage in range(stages)] for op in "FBW"}


def step_time_from_seconds(
    config: RunConfig, world_size: int, hardware: Hardware, *, seconds: float, bubble: float, parts: Mapping[str, float]
) -> StepTime:
    """Compute the rates of a step from its seconds."""
    train = config.train
    assert train.global_batch_size and train.seq_length, "rules let no run pass without a batch and a length"
    causal, square = (
        train.global_batch_size
        * flops_per_sample(config.model, train.seq_length, count, decoder_length=train.decoder_seq_length)
        / seconds
        / world_size
        for count in ("causal", "square")
    )
    peak = hardware.peak_flops(config.precision.param_dtype_name)
    return StepTime(
        seconds,
        bubble,
        train.global_batch_size * train.seq_length / seconds,
        causal,
        causal / peak,
        square / peak,
        parts,
    )


def rank_time(trace: Trace, config: RunConfig, hardware: Hardware) -> RankStepTime:
    """Compute the time of everything that a rank does, by kind of action and by phase."""
    spent: dict[str, ActionKindCost] = {}
    meter = _EventTimeEstimator(config, hardware, trace.rank)
    for part in split_into_event_spans(trace.events):
        if part.again:
            place = spent.setdefault(_action_kind(part.action), ActionKindCost())
            place.add_span(meter.estimate_repeated_span(part), place.begun.setdefault(part.action, place.seconds))
            continue
        for event in part.events:
            if event.action != "setup" and event.kind != "action":
                place = spent.setdefault(_action_kind(event.action), ActionKindCost())
                # A message is under way before the action that it is for.
                meter.add_estimated_event_time(
                    event,
                    place,
                    0.0 if event.kind == "receive" else place.begun.setdefault(event.action, place.seconds),
                )
    for place in spent.values():
        shows = max(0.0, place.beside - place.seconds)
        place.seconds += shows
        place.parts["gathers and sums of FSDP2"] += shows
    return RankStepTime(trace.place.get("pp", 0), spent, meter.message, tuple(meter.gathers))


@dataclass(slots=True)
class _EventTimeEstimator:
    """Computes the time of a rank's events, of equal ones only once. message, gathers: as in `RankStepTime`."""

    config: RunConfig
    hardware: Hardware
    rank: int
    message: float = 0.0
    gathers: list[float] = field(default_factory=list)
    _prices: dict[tuple[Any, ...], tuple[float, str]] = field(default_factory=dict)
    _stretches: dict[tuple[int, str], ActionKindCost] = field(default_factory=dict)

    def add_estimated_event_time(self, event: StepEvent, place: ActionKindCost, before: float) -> None:
        """Add an event to its action's time and traffic. before: seconds spent there when the action began."""
        acts = _is_schedule_action(event.action)
        alike = (event.action[:1], *_SAME_PRICE(event))
        if alike not in self._prices:
            self._prices[alike] = (
                estimated_event_seconds(event, self.config, self.hardware, self.rank),
                time_category(event),
            )
        seconds, part = self._prices[alike]
        if event.kind in ("send", "receive"):
            place.traffic["pp"] += tensor_bytes_of_event(event)
            self.message = max(self.message, seconds)
            return
        if event.kind == "collective":
            place.traffic[event.axis] += tensor_bytes_of_event(event)
            if event.axis in DATA_AXES and self.config.parallel.use_torch_fsdp2 and acts:
                place.beside += seconds
                return
            if event.axis in DATA_AXES and acts:
                place.launches.append((place.seconds - before, seconds))
                return
            if event.axis in DATA_AXES and event.name == "all_gather" and self.config.parallel.overlap_param_gather:
                self.gathers.append(seconds)
                return
        place.seconds += seconds
        place.parts[part] += seconds

    def estimate_repeated_span(self, part: ConsecutiveEvents) -> ActionKindCost:
        """Return the time of a span recorded before; computed once for each list of events and kind of action."""
        key = id(part.events), part.action[:1]
        if key not in self._stretches:
            self._stretches[key] = spent = ActionKindCost()
            for event in part:
                self.add_estimated_event_time(event, spent, 0.0)
        return self._stretches[key]


def estimated_event_seconds(event: StepEvent, config: RunConfig, hardware: Hardware, rank: int) -> float:
    """Return the seconds of one event on this rank, by the hardware's rates."""
    if event.parts:
        return sum(
            times * sum(estimated_event_seconds(part, config, hardware, rank) for part in operations.events)
            for times, operations in event.parts
        )
    if event.kind in ("send", "receive"):
        return hardware.slowest_link((rank, event.peer)).transfer_seconds(tensor_bytes_of_event(event))
    if event.kind == "collective":
        return collective_seconds(event.name, tensor_bytes_of_event(event), event.ranks, hardware)
    if event.kind == "action" or not (event.moved or event.flops) or FREE.match(event.name):
        return 0.0
    return _operation_seconds(event, config, hardware)


def _operation_seconds(event: StepEvent, config: RunConfig, hardware: Hardware) -> float:
    """Return the seconds of an operation that computes, from its products, its bytes and the hardware's rates."""
    dtype = (event.factors or event.dtype).partition("_")[0]  # float8 of float8_e4m3fn
    dtype = dtype if dtype in hardware.peak else config.precision.param_dtype_name
    if hardware.fused and event.role in ATTENTION_ROLES and not ATTENTION.search(event.name):
        # A fused kernel that the machine has and the dry run's CPU has not: its products, and none of the passes between them.
        met = 1.0 if event.role == "attention in chunks" else config.model.architecture.attended_share
        return hardware.attention_seconds(
            event.flops * met, config.precision.param_dtype_name, backward=event.action.startswith("B")
        )
    low_precision = _native_low_precision_format(config, hardware)
    if low_precision and event.role == "emulated product":
        return _low_precision_seconds(event, config, hardware, low_precision)
    if ATTENTION.search(event.name):
        busy = hardware.attention_seconds(_attention_flops(event, config), dtype, backward="backward" in event.name)
    else:
        busy = hardware.matmul_seconds(event.flops, dtype)
    moved = 2 * tensor_bytes_of_event(event) if PICKS.match(event.name) else event.moved
    # A tensor that is cut only so that its blocks stay in a CPU's cache is one operation on other devices.
    return max(busy, moved / hardware.memory_rate) + (0.0 if event.role == "blocks" else hardware.launch)


def _low_precision_seconds(event: StepEvent, config: RunConfig, hardware: Hardware, name: str) -> float:
    """Return the seconds of a low-precision product, from the event that emulates it; other events of the emulation, which
    take the values back, are no work of a machine that multiplies such numbers itself.
    """
    if not event.flops:
        return 0.0
    size, width = tensor_bytes_of_event(event), dtype_bytes(event.dtype)
    moved = (event.moved - size) / width + size * dtype_bytes(config.precision.param_dtype_name) / width
    return max(hardware.matmul_seconds(event.flops, name), moved / hardware.memory_rate) + hardware.launch


def _native_low_precision_format(config: RunConfig, hardware: Hardware) -> str:
    """Return the format of the run's linear layers that the machine multiplies natively at a known rate; "" if none."""
    low = config.precision.low
    if low.fp8_emulation or low.fp8_format is None and low.fp4_format is None:
        return ""
    prefixes = ("float4", "float8") if low.fp4_format is not None else ("float8",)
    return next((name for name in prefixes if name in hardware.peak), "")


def _attention_flops(event: StepEvent, config: RunConfig) -> float:
    """Return the FLOPs of the keys that are attended to.

    torch counts all keys, and does not count its CPU kernel, which is counted here from its output's shape [b, n, s, d], with as many keys as queries.
    """
    if event.flops:
        return event.flops * config.model.architecture.attended_share
    batch, heads, length, width = (event.shape + (1,) * 4)[:4]
    return (
        config.model.architecture.attended_share
        * 4
        * batch
        * heads
        * length**2
        * width
        * (2.5 if "backward" in event.name else 1.0)
    )


def tensor_bytes_of_event(event: StepEvent) -> float:
    """Return the bytes of a collective's or message's tensor."""
    return math.prod(event.shape) * dtype_bytes(event.dtype)


def dtype_bytes(dtype: str) -> float:
    """Return the bytes of one element."""
    digits = re.search(r"(?:float|int|uint|complex)(\d+)", dtype)
    return int(digits[1]) / 8 if digits else 1.0


def time_category(event: StepEvent) -> str:
    """Return the category under which an event's time is reported."""
    if event.kind == "collective":
        return f"{event.axis} collectives"
    if ATTENTION.search(event.name) or event.role in ATTENTION_ROLES:
        return "attention"
    if event.parts:
        return "scans over states"
    return "matrix products" if event.flops else "other operations"


@cache
def _action_kind(action: str) -> str:
    """Return the kind of an action: F0 of F0.3; a phase is its own kind."""
    match = ACTION.match(action)
    return match[1] if match else action or "begin"


@cache
def _is_schedule_action(action: str) -> bool:
    """Whether this is an action of the schedule and not a phase around it."""
    return ACTION.match(action) is not None


def _seconds_until_gradients_reduced(rank: RankStepTime, run: DryRunResult, timeline: Timeline) -> float:
    """Return the time at which a rank has finished its part of the schedule and its gradients are reduced, in seconds."""
    row, starts = run.whole_plan[rank.place], timeline.start[rank.place]
    launches = []
    for key, spent in rank.spent.items():
        begun = [start for action, start in zip(row, starts, strict=True) if _action_kind(str(action)) == key]
        if not begun and key[0] == "R":  # the plan of a run without reductions in it
            begun = [timeline.end[rank.place][-1]]
        launches += [(begun[-1] + after, seconds) for after, seconds in spent.launches if begun]
    free = 0.0
    for ready, seconds in sorted(launches):
        free = max(free, ready) + seconds
    return max(free, timeline.end[rank.place][-1])


def _exposed_gather_seconds(rank: RankStepTime) -> float:
    """Return how long the first forward pass waits for new weights: the first all-gather, and what exceeds the pass."""
    if not rank.gathers:
        return 0.0
    hides = sum(spent.seconds_per_action for key, spent in rank.spent.items() if key[0] == "F" and ACTION.match(key))
    return rank.gathers[0] + max(0.0, sum(rank.gathers[1:]) - hides)


def _repetitions_per_recorded(key: str, spent: ActionKindCost, microbatches: int) -> float:
    """Return how often in the whole step a recorded action happens, per recorded occurrence."""
    return microbatches / len(spent.begun) if key[0] in "FBW" and ACTION.match(key) else 1.0


def _step_seconds_by_category(rank: RankStepTime, microbatches: int, seconds: float) -> dict[str, float]:
    """Split a rank's step by category; the remainder is waiting for other stages, messages and gradient reductions."""
    parts: defaultdict[str, float] = defaultdict(float)
    for key, spent in rank.spent.items():
        for part, share in spent.parts.items():
            parts["update" if not ACTION.match(key) else part] += share * _repetitions_per_recorded(
                key, spent, microbatches
            )
    parts["waiting"] = max(0.0, seconds - sum(parts.values()))
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _traffic_by_axis(rank: RankStepTime, microbatches: int, passes: int) -> defaultdict[str, float]:
    """Return the bytes that a rank moves over each axis in a step."""
    volume: defaultdict[str, float] = defaultdict(float)
    for key, spent in rank.spent.items():
        # Sums of gradients are begun once in a step, however many microbatches there are.
        once = key[0] == "B" and bool(spent.launches)
        for axis, moved in spent.traffic.items():
            times = 1.0 if once and axis in DATA_AXES else _repetitions_per_recorded(key, spent, microbatches)
            volume[axis] += moved * times * (1 + passes if key[0] == "F" and ACTION.match(key) else 1)
    return volume
