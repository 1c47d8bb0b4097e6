"""Pipeline schedules as data: for every rank, the ordered list of its actions.

`stage_rank_and_chunk` in config/plan/layers.py maps stages to ranks. An `Action` is one stage's forward pass "F" or backward pass "B" of one
microbatch, or the reduction "R" of a stage's gradients over data parallelism. Every schedule here has the same shape: a
rank runs some forwards as warm-up, then alternates one forward and one backward, then runs the remaining backwards. Schedules
differ in the order of the forwards and in the number of warm-up forwards. If a plan has a "W" for each "B", the backward pass
computes only the input gradient, for which the previous stage waits, and the "W" computes the weight gradients:

    one_f_one_b(2, 3)     rank 0   F0.0 F0.1 B0.0 F0.2 B0.1 B0.2          (F0.2 is stage 0, microbatch 2)
                          rank 1   F1.0 B1.0 F1.1 B1.1 F1.2 B1.2

A schedule contains neither times nor messages: timeline.py and transfers.py derive both from `action_dependency`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.plan.layers import microbatch_group_problem
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.parallel import Placement
from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One operation of a rank: op F, B, W or R of a stage and a microbatch. An R has none and carries 0."""

    op: str
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"R{self.stage}" if self.op == "R" else f"{self.op}{self.stage}.{self.microbatch}"


Plan = tuple[tuple[Action, ...], ...]

# Stage that receives a result, relative to its producer: activations go to the next stage, gradients to the previous one.
STAGE_STEP = {"F": 1, "B": -1}


class ScheduleError(Exception):
    """A plan that cannot be carried out; the message names the actions at fault."""


def pipeline_plan_of_run(config: RunConfig, num_microbatches: int) -> Plan:
    """Return the plan of one training step of a run."""
    parallel = config.parallel
    return pipeline_training_plan(
        parallel.pp,
        len(stage_specs_of_run(config)) // parallel.pp,
        num_microbatches,
        name=parallel.pipeline_schedule,
        dual_batch_overlap=parallel.overlap_moe_expert_parallel_comm,
        group=parallel.microbatch_group_size_per_virtual_pipeline_stage,
    )


def pipeline_training_plan(
    pp: int, vpp: int, m: int, *, group: int | None = None, name: str = "1f1b", dual_batch_overlap: bool = False
) -> Plan:
    """Return the plan of one training step.

    pp: pipeline size. vpp: chunks a rank. m: number of microbatches. group: microbatches that a chunk runs in a row, by
    default pp. name: --pipeline-schedule. dual_batch_overlap: order forward and backward passes so that pairs can
    overlap. Raises `ConfigError` for an unknown name, or a group that does not fit.
    """
    if dual_batch_overlap:
        assert (name, vpp) == ("1f1b", 1), "the rules refuse dual-batch overlap with other schedules"
        return one_f_one_b_dual_batch(pp, m)
    if name == "gpipe":
        return gpipe(pp, m, vpp=vpp)
    if name == "zb-h1" or (name == "zb-v" and pp == 1):
        return zero_bubble_h1(pp, m)
    if name == "zb-v":
        return zero_bubble_v(pp, m)
    if name != "1f1b":
        raise ConfigError(f"--pipeline-schedule {name} is not known; choose 1f1b, gpipe, zb-h1 or zb-v")
    if vpp == 1:
        return one_f_one_b(pp, m)
    group = pp if group is None else group
    raise_config_error_if([microbatch_group_problem(pp, m, group)])
    return interleaved_1f1b(pp, vpp, m, min(group, m))


def gpipe(pp: int, m: int, *, vpp: int = 1) -> Plan:
    """Return the GPipe plan: all forwards, then all backwards; the most activation memory (Huang et al., 2019)."""
    return _plan_with_warmup(pp, vpp, m, group=pp, warmup=lambda rank: vpp * m)


def one_f_one_b(pp: int, m: int) -> Plan:
    """Return the 1F1B plan: a rank warms up until its first gradient can come, and stores pp - rank activations."""
    return _plan_with_warmup(pp, 1, m, group=pp, warmup=lambda rank: pp - rank - 1)


def one_f_one_b_dual_batch(pp: int, m: int) -> Plan:
    """1F1B with dual-batch overlap, which runs a forward and a backward pass as one pair.

    The results of a pair are sent when both passes are complete, so a microbatch takes twice as many slots to the last
    rank and back as in 1F1B, and a rank stores at most 2 (pp - rank) activations.
    """
    return _plan_with_warmup(pp, 1, m, group=pp, warmup=lambda rank: 2 * (pp - rank) - 1)


def zero_bubble_h1(pp: int, m: int) -> Plan:
    """ZB-H1 (Qi et al., 2023): 1F1B with delayed weight gradients.

    Rank r runs its weight gradients r actions behind its backward passes, as many as 1F1B stores fewer activations
    there than on the first rank: no rank stores more than the first, and the first gradients of the last ranks are sent
    without a weight gradient in between. The bubble shrinks from (pp - 1)(F + B + W) to (pp - 1)(F + B - W), if W is no
    longer than F and B.
    """
    rows = []
    for rank, row in enumerate(one_f_one_b(pp, m)):
        steps: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            steps.append(action)
            if action.op == "B":
                waiting.append(Action("W", action.stage, action.microbatch))
                if len(waiting) > rank:
                    steps.append(waiting.pop(0))
        rows.append((*steps, *waiting))
    return tuple(rows)


def zero_bubble_v(pp: int, m: int) -> Plan:
    """ZB-V (Qi et al., 2024, "Pipeline Parallelism with Controllable Memory"): two chunks a rank in a V, delayed weight
    gradients.

    Stages run down the ranks and back up: rank r starts 2(pp - r) - 1 microbatches of its first chunk before the first
    one returns to its second chunk. The last stage is on the first rank, so gradients start where forward passes do,
    and reach rank r when it stores 2 pp chunk activations, which no rank exceeds. If F, B and W take equal times and m
    >= 2 pp - 1, a rank idles only before its first microbatch and after its last gradient: (pp - 1) F of a chunk, half
    of what ZB-H1 leaves.
    """
    rows = []
    for rank in range(pp):
        distance, first_chunk, second_chunk = pp - rank, ("F0", "B0", "W0"), ("F1", "B1", "W1")
        order = (
            ["F0"] * (2 * distance - 1)
            + ["F1", "F0"] * rank
            + [*second_chunk] * distance
            + [*first_chunk, *second_chunk] * (m - pp)
        )
        # The last weight gradients are delayed further, by as many gradients as earlier ranks still wait for.
        order += ["B0", "B1"] * rank + ["B0", "W0"] * distance + ["W0", "W1"] * m
        rows.append(_actions_from_pattern(order, (rank, 2 * pp - 1 - rank), m))
    return tuple(rows)


def interleaved_1f1b(pp: int, vpp: int, m: int, group: int) -> Plan:
    """Interleaved 1F1B over vpp chunks a rank, which divides the bubble by vpp; `group`: microbatches in a row.

    Consecutive ranks differ by two warm-up microbatches, so that a message has one slot of time for its transfer.
    """
    return _plan_with_warmup(pp, vpp, m, group=group, warmup=lambda rank: 2 * (pp - rank - 1) + (vpp - 1) * group)


def forward_only_plan(pp: int, vpp: int, m: int, placement: Placement = "wrap") -> Plan:
    """Return a plan of forward passes alone, for evaluation and decoding."""
    if placement == "v":
        assert vpp == 2, f"a V placement has two chunks a rank, not {vpp}"
        return tuple(
            _actions_from_pattern(["F0"] * (2 * (pp - rank) - 1) + ["F1", "F0"] * m, (rank, 2 * pp - 1 - rank), m)
            for rank in range(pp)
        )
    return tuple(
        tuple(Action("F", chunk * pp + rank, i) for chunk, i in _chunk_microbatch_order(vpp, m, group=pp))
        for rank in range(pp)
    )


def with_reduction_actions(plan: Plan) -> Plan:
    """Return the plan with an "R" after each stage's last backward pass, or last delayed weight gradient."""
    rows = []
    for row in plan:
        last = {action.stage: action for action in row if action.op in "BW"}
        steps: list[Action] = []
        for action in row:
            steps.append(action)
            if action == last.get(action.stage):
                steps.append(Action("R", action.stage))
        rows.append(tuple(steps))
    return tuple(rows)


def can_overlap_pair(row: Sequence[Action], place: int, stages: int) -> bool:
    """Return whether the actions at `place` of a rank's row are a forward and a backward pass that can run as a pair.

    What either sends inside a layer then travels while the other computes. stages: number of stages. The gradient must
    not depend on the pair itself: its microbatch is as far behind as there are stages from here to the last and back
    (`one_f_one_b_dual_batch`).
    """
    pair = row[place : place + 2]
    return [action.op for action in pair] == ["F", "B"] and pair[0].microbatch - pair[1].microbatch >= 2 * (
        stages - pair[0].stage
    ) - 1


def action_or_pair_at(
    row: Sequence[Action], place: int, stages: int, *, dual_batch_overlap: bool
) -> tuple[Action, ...]:
    """Return the action at `place` of a row; with `dual_batch_overlap` also the next one, if both can run as one pair."""
    return tuple(row[place : place + 1 + (dual_batch_overlap and can_overlap_pair(row, place, stages))])


def stage_placement_of_plan(plan: Plan) -> Placement:
    """Return a plan's placement: "v" if the last rank also has the first stage of the second chunks, else "wrap"."""
    return "v" if any(action.stage == len(plan) for action in plan[-1]) and len(plan) > 1 else "wrap"


def num_plan_stages(plan: Plan) -> int:
    """Return the number of stages of a plan: one more than the largest stage index."""
    return 1 + max((action.stage for row in plan for action in row), default=-1)


def action_dependency(action: Action, stages: int) -> Action | None:
    """Return the action of another stage whose result this action receives, or None; stages: the number of stages."""
    stage = action.stage - STAGE_STEP.get(action.op, stages)
    return Action(action.op, stage, action.microbatch) if 0 <= stage < stages else None


def _plan_with_warmup(pp: int, vpp: int, m: int, *, group: int, warmup: Callable[[int], int]) -> Plan:
    """Return every rank's row; gradients visit the chunks of a rank in the opposite order of activations."""
    order = tuple(_chunk_microbatch_order(vpp, m, group))
    rows = []
    for rank in range(pp):
        forwards = [Action("F", chunk * pp + rank, i) for chunk, i in order]
        backwards = [Action("B", (vpp - 1 - chunk) * pp + rank, i) for chunk, i in order]
        num_warmup = min(warmup(rank), len(order))
        pairs = zip(forwards[num_warmup:], backwards, strict=False)
        rows.append(
            (
                *forwards[:num_warmup],
                *(action for pair in pairs for action in pair),
                *backwards[len(order) - num_warmup :],
            )
        )
    return tuple(rows)


def _actions_from_pattern(order: Sequence[str], stages: tuple[int, int], m: int) -> tuple[Action, ...]:
    """Turn ["F0", "B1"] (operation, chunk) into actions: each kind counts the m microbatches; surplus is dropped."""
    count: Counter[str] = Counter()
    steps = []
    for operation in order:
        if count[operation] < m:
            steps.append(Action(operation[0], stages[int(operation[1])], count[operation]))
            count[operation] += 1
    return tuple(steps)


def _chunk_microbatch_order(vpp: int, m: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, microbatch) in the order a rank runs them: chunk by chunk within each group of microbatches."""
    for start in range(0, m, group):
        for chunk in range(vpp):
            for microbatch in range(start, min(start + group, m)):
                yield chunk, microbatch
