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
from megatron.core.models.flops import BYTES, estimate_memory_by_pipeline_rank
from megatron.core.pipeline_parallel.schedules import pipeline_plan_of_run
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
    LayerProfile,
    LayerProfiler,
    MicrobatchProfile,
    layer_kind,
    recompute_of_first_and_other_layers,
    total_cost,
)


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on a stage. layers: of all its layers; first: of those before the others that --recompute-method
    block recomputes, of which a backward pass holds `widest` bytes.
    """

    stage: StageSpec
    layers: Cost
    first: Cost
    widest: float
    profile: LayerProfile

    @property
    def network(self) -> MicrobatchProfile:
        """The network that was run whose depth is the stage's: FSDP2 gathers a layer while it still holds the one before."""
        return self.profile.short if len(self.stage.layers) <= self.profile.depth else self.profile.long

    @property
    def whole(self) -> Cost:
        """The cost of the stage with its embedding and output layer."""
        has, profile = self.stage, self.profile
        cost = total_cost([self.layers, *[profile.embedding] * has.has_embedding, *[profile.output] * has.has_output])
        for op in OPERATIONS:
            cost[op, EXPOSED] = max(0.0, cost[op, "beside"] - cost[op, "seconds"])
            cost[op, "seconds"] += cost[op, EXPOSED]
        return cost

    def forward_peak(self) -> float:
        """Return the most bytes of a forward pass beyond those before it."""
        profile, peaks = self.profile, self.network.forward
        before = profile.embedding["F", "kept"] if self.stage.has_embedding else 0.0
        inside = before + self.layers["F", "kept"]
        most = [inside + peaks.layers]
        if self.stage.has_embedding:
            most.append(before + peaks.embedding)
        if self.stage.has_output:
            most.append(inside + profile.output["F", "kept"] + peaks.output)
        return max(most)

    def backward_peak(self) -> float:
        """Return the most bytes of a backward pass beyond those before its forward pass."""
        network, kept = self.network, self.whole["F", "kept"]
        before = self.profile.embedding["F", "kept"] if self.stage.has_embedding else 0.0
        most = [before + self.first["F", "kept"] + self.widest]
        if self.layers["F", "kept"] > self.first["F", "kept"]:
            most.append(kept + network.backward.layers + (network.freed if self.stage.has_output else 0.0))
        if self.stage.has_embedding:
            most.append(before + network.backward.embedding)
        if self.stage.has_output:
            most.append(kept + network.backward.output)
        return max(most)


def can_profile(config: RunConfig) -> bool:
    """Whether microbatches are alike and layers independent of their place; else only a dry run of all layers knows."""
    return not (
        config.parallel.hybrid_context_parallel
        or config.offload.offloads_activations
        or config.model.architecture == "vit"
    )


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
    plans = [plan for stage in stages for plan in stage.layers]
    first, others = (
        profiler.profile(replace(config, recompute=recompute), world_size, plans)
        for recompute in recompute_of_first_and_other_layers(config.recompute)
    )
    block = config.recompute.recompute_num_layers or 1 if config.recompute.recompute_method == "block" else 0
    costs = []
    for stage in stages:
        kinds = [layer_kind(plan) for plan in stage.layers]
        recomputed = total_cost(first.layers[kind] for kind in kinds[:block])
        layers = total_cost([recomputed, *(others.layers[kind] for kind in kinds[block:])])
        costs.append(StageCost(stage, layers, recomputed, first.long.backward.layers * bool(block), others))
    return costs


def peak_activation_bytes(config: RunConfig, costs: Sequence[StageCost], count: int) -> list[float]:
    """Return the most bytes that microbatches hold on the rank at each pipeline position. count: microbatches of a step."""
    kept = [cost.whole for cost in costs]
    forward, backward = [cost.forward_peak() for cost in costs], [cost.backward_peak() for cost in costs]
    left = max(0.0, costs[0].network.left)
    peaks = []
    short = min(count, _microbatches_until_repetition(config, count))
    for row in pipeline_plan_of_run(config, short):
        live = peak = 0.0
        for action in row:
            after = {op: kept[action.stage][op, "kept"] for op in OPERATIONS}
            if action.op == "F":
                peak = max(peak, live + forward[action.stage])
                live += after["F"]
            elif action.op == "B":
                peak = max(peak, live - after["F"] + backward[action.stage])
                live += after["B"] - after["F"]
            else:
                live += after["W"] - after["B"]
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
        bubble=1 - count * sum(busy) / (pp * seconds),
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
    parallel, train = config.parallel, config.train
    line = rank0_groups(config, world_size)["pp"]
    if len(line) == 1:
        return 0.0
    rows = (
        train.micro_batch_size * max(train.seq_length, train.decoder_seq_length or 0) / parallel.context_parallel_size
    )
    width = config.model.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    moved = BYTES[config.precision.param_dtype_name] * rows * width
    return max(hardware.slowest_link(pair).transfer_seconds(moved) for pair in zip(line, line[1:]))
