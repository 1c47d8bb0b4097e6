"""Time and memory of a layout from the costs of its layers: the stages are added up, and the schedule of the run is played with them.

Weights, gradients and optimizer state, their reduction and the update are those of the closed formulas (models/flops.py,
analytic_estimate.py); what microbatches cost is that of layer_profile.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import RunConfig
from megatron.core.models.flops import estimate_memory_by_pipeline_rank
from megatron.core.pipeline_parallel.schedules import STAGE_STEP, Action, pipeline_plan_of_run
from megatron.core.pipeline_parallel.timeline import simulate_pipeline_plan
from megatron.plan.analytic_estimate import (
    AnalyticEstimate,
    num_microbatches,
    rank0_groups,
    reduction_and_update_seconds,
)
from megatron.plan.cost import FORWARD, StepTime, step_time_from_seconds
from megatron.plan.hardware import Hardware
from megatron.plan.layer_profile import (
    EXPOSED,
    OPERATIONS,
    Cost,
    LayerProfiler,
    PartProfile,
    layer_groups,
    message_bytes,
    total_cost,
)


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on a stage. parts: its embedding, its layers and its output layer, as far as it has them; left: bytes
    that stay until the end of the step.
    """

    stage: StageSpec
    parts: Sequence[PartProfile]
    left: float

    @property
    def whole(self) -> Cost:
        """The cost of all parts."""
        cost = total_cost(part.cost for part in self.parts)
        for op in OPERATIONS:
            cost[op, EXPOSED] = max(0.0, cost[op, "beside"] - cost[op, "seconds"])
            cost[op, "seconds"] += cost[op, EXPOSED]
        return cost

    def forward_peak(self) -> float:
        """Return the most bytes of a forward pass beyond those before it."""
        kept, most = 0.0, 0.0
        for part in self.parts:
            kept += part.cost["F", "kept"]
            most = max(most, kept + part.forward)
        return most

    def backward_peak(self, gradient: float) -> float:
        """Return the most bytes of a backward pass beyond those before its forward pass. gradient: bytes of what a part leaves to the
        one before. The gradient that the last part begins with comes as a message, which is not among them.
        """
        most = kept = self.whole["F", "kept"]
        for place, part in enumerate(reversed(self.parts)):
            most = max(most, kept + gradient * (place > 0) + part.backward)
            kept += part.cost["B", "kept"] - part.cost["F", "kept"]
        return most


def can_profile(config: RunConfig) -> bool:
    """Whether microbatches are alike and layers independent of their place; else only a dry run of all layers knows.

    FSDP2 gathers what lies behind a layer beside it, which is of another kind where there are experts, and of another stage in a pipeline.
    """
    parallel = config.parallel
    return not (
        parallel.use_torch_fsdp2
        and (parallel.pp > 1 or config.model.moe.num_experts)
        or parallel.hybrid_context_parallel
        or config.offload.offloads_activations
        or config.model.architecture.classifies_images
    )


def estimate_tolerance(config: RunConfig) -> float:
    """Return how far, relative, `profiled_estimate` is at most from a dry run in memory and in time, by a test over drawn layouts.

    Weights that are rounded to 8 or 4 bits once a step count for each microbatch.
    """
    return 0.2 if config.precision.low.recipe_name else 0.08


def profiled_estimate(
    config: RunConfig, world_size: int, profiler: LayerProfiler, stages: Sequence[StageSpec], *, passes: int = 0
) -> AnalyticEstimate:
    """Estimate time and memory of a layout that `can_profile`, as `analytic_estimate` does."""
    count = num_microbatches(config, world_size)
    costs = stage_costs(config, world_size, profiler, stages)
    held = estimate_memory_by_pipeline_rank(
        config, stages, data_parallel_size=config.parallel.data_parallel_size(world_size), num_microbatches=count
    )
    needs = [
        rank.weights_and_optimizer + max(rank.update, activations)
        for rank, activations in zip(held, peak_activation_bytes(config, costs, count), strict=True)
    ]
    position = max(range(len(needs)), key=needs.__getitem__)
    trained = max(rank.trained for rank in held)
    time = _step_time(config, world_size, profiler.hardware, costs, count=count, trained=trained, passes=passes)
    return AnalyticEstimate(needs[position], position, time)


def stage_costs(
    config: RunConfig, world_size: int, profiler: LayerProfiler, stages: Sequence[StageSpec]
) -> list[StageCost]:
    """Return what one microbatch costs on each stage."""
    rows = [layer_groups(config.recompute, stage.layers) for stage in stages]
    profiles = {
        how: profiler.profile(
            replace(config, recompute=how), world_size, [group for row in rows for own, group in row if own == how]
        )
        for how in dict.fromkeys(how for row in rows for how, _ in row)
    }
    *_, ends = profiles.values()
    return [
        StageCost(
            stage,
            [
                *[ends.embedding] * stage.has_embedding,
                *(profiles[how].groups[group] for how, group in row),
                *[ends.output] * stage.has_output,
            ],
            ends.left,
        )
        for stage, row in zip(stages, rows, strict=True)
    ]


def peak_activation_bytes(config: RunConfig, costs: Sequence[StageCost], count: int) -> list[float]:
    """Return the most bytes that microbatches hold on the rank at each pipeline position. count: microbatches of a step.

    A message takes memory at the one rank until it is used, from one action ahead where messages overlap with actions, and at the
    other until the action behind that which made it has ended.
    """
    kept = [cost.whole for cost in costs]
    message, overlap = message_bytes(config), config.parallel.overlap_p2p_communication
    forward, backward = [cost.forward_peak() for cost in costs], [cost.backward_peak(message) for cost in costs]
    left, peaks = max(0.0, costs[0].left), []
    short = min(count, _microbatches_until_repetition(config, count))

    def moves(action: Action, ahead: int) -> bool:
        """Whether the action has a message from (ahead -1) or to (1) another rank."""
        other = action.stage + ahead * STAGE_STEP.get(action.op, len(costs))
        return 0 <= other < len(costs) and costs[other].stage.rank != costs[action.stage].stage.rank

    for row in pipeline_plan_of_run(config, short):
        live = peak = sent = 0.0
        received = [message * moves(action, -1) for action in row]
        if overlap:
            received = [received[0] + sum(received[1:2]), *received[2:], 0.0]
        for action, arrived in zip(row, received, strict=True):
            live += arrived
            after = {op: kept[action.stage][op, "kept"] for op in OPERATIONS}
            if action.op == "F":
                peak = max(peak, live + forward[action.stage])
                live += after["F"]
            elif action.op == "B":
                peak = max(peak, live - after["F"] + backward[action.stage])
                live += after["B"] - after["F"]
            else:
                live += after["W"] - after["B"]
            live, sent = live - sent, message * moves(action, 1)
        peaks.append(peak + left * (count - short))
    return peaks


def _microbatches_until_repetition(config: RunConfig, count: int) -> int:
    """Return a number of microbatches after which a schedule repeats itself, and that its groups divide like `count`."""
    pp = config.parallel.pp
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or pp
    return count if config.parallel.pipeline_schedule == "gpipe" else 4 * max(pp, group) + count % group


def _step_time(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    costs: Sequence[StageCost],
    *,
    count: int,
    trained: int,
    passes: int,
) -> StepTime:
    """Return the time of a step. count: of its microbatches; trained: parameters of the rank with the most."""
    pp, whole = config.parallel.pp, [cost.whole for cost in costs]
    ranks = [total_cost(cost for cost, at in zip(whole, costs) if at.stage.rank == place) for place in range(pp)]
    busy = [sum(rank[op, "seconds"] for op in OPERATIONS) for rank in ranks]
    busiest = ranks[max(range(pp), key=busy.__getitem__)]
    seconds = _schedule_seconds(config, whole, _message_seconds(config, world_size, hardware), count)
    late, update = reduction_and_update_seconds(
        config,
        world_size,
        hardware,
        trained=trained,
        forward=busiest["F", "seconds"],
        backward=busiest["B", "seconds"] + busiest["W", "seconds"],
    )
    extra = passes * (count + (pp - 1) * pp / len(costs)) * max(rank["F", "seconds"] for rank in ranks)
    parts: defaultdict[str, float] = defaultdict(float)
    for (_, name), amount in busiest.items():
        if name not in ("seconds", "beside", "kept"):
            parts[name] += count * amount
    parts["update"] = update
    parts["waiting"] = max(0.0, seconds + late - sum(parts.values()) + update)
    return step_time_from_seconds(
        config,
        world_size,
        hardware,
        seconds=seconds + late + update + extra,
        bubble=max(0.0, 1 - count * sum(busy) / (pp * seconds)),  # of one stage the two sums differ by rounding alone
        parts=dict(parts) | ({FORWARD: extra} if passes else {}),
    )


def _schedule_seconds(config: RunConfig, costs: Sequence[Cost], message: float, count: int) -> float:
    """Return the seconds of the schedule of `count` microbatches: of a few, and of as many more as each adds once it repeats itself."""
    times = {op: [cost[op, "seconds"] for cost in costs] for op in OPERATIONS}
    if not config.parallel.overlap_p2p_communication:
        last = len(costs) - 1
        for op in "FB":
            times[op] = [seconds + message * ((stage > 0) + (stage < last)) for stage, seconds in enumerate(times[op])]
        message = -message

    def seconds_of(number: int) -> float:
        timeline = simulate_pipeline_plan(
            pipeline_plan_of_run(config, number),
            forward=times["F"],
            backward=[ahead + later for ahead, later in zip(times["B"], times["W"], strict=True)],
            weight=times["W"],
            message=message,
            dual_batch_overlap=config.parallel.overlap_moe_expert_parallel_comm,
        )
        return max(row[-1] for row in timeline.end)

    short = _microbatches_until_repetition(config, count)
    if count <= short:
        return seconds_of(count)
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or config.parallel.pp
    few, more = seconds_of(short), seconds_of(short + group)
    return few + (count - short) / group * (more - few)


def _message_seconds(config: RunConfig, world_size: int, hardware: Hardware) -> float:
    """Return the seconds of the slowest message between neighbours in the pipeline."""
    line, moved = rank0_groups(config, world_size)["pp"], message_bytes(config)
    return max((hardware.slowest_link(pair).transfer_seconds(moved) for pair in zip(line, line[1:])), default=0.0)
