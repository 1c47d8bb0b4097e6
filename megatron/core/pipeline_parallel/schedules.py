"""Pipeline schedules as data: for every rank, the list of what it does, in order.

Where a stage lives, `home` of config/plan.py says. An `Action` is one stage's forward pass "F" or backward pass "B" of one
microbatch, or the reduction "R" of a stage's gradients over data parallelism. Every schedule here has the same shape: a
rank runs some forwards to warm up, then one forward and one backward in turn, then the backwards that are left. Schedules
differ in the order of the forwards and in how many of them warm up. Where a plan has a "W" for each "B", the backward pass
computes what the stage before waits for, and the gradients of weights are left to the "W":

    one_f_one_b(2, 3)     rank 0   F0.0 F0.1 B0.0 F0.2 B0.1 B0.2          (F0.2 is stage 0, microbatch 2)
                          rank 1   F1.0 B1.0 F1.1 B1.1 F1.2 B1.2

No schedule says when anything happens or what is sent: timeline.py and transfers.py derive both from `awaited`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.flags import ConfigError, refuse
from megatron.core.config.plan import Placement, group_problem


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing a rank does. An "R" has no microbatch and carries 0."""

    op: str
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"R{self.stage}" if self.op == "R" else f"{self.op}{self.stage}.{self.microbatch}"


Plan = tuple[tuple[Action, ...], ...]

# Where a result goes: activations to the next stage, gradients to the one before.
TOWARDS = {"F": 1, "B": -1}


class ScheduleError(Exception):
    """A plan that cannot be carried out. The message names the actions at fault."""


def choose(pp: int, vpp: int, m: int, *, group: int | None = None, name: str = "1f1b", together: bool = False) -> Plan:
    """The plan of one training step by the flags; m: microbatches; group: left out, the pipeline size; together: see `are_together`."""
    if together:
        assert (name, vpp) == ("1f1b", 1), "rules let no other schedule do two passes together"
        return two_by_two(pp, m)
    if name == "gpipe":
        return gpipe(pp, m, vpp=vpp)
    if name == "zb-h1" or (name == "zb-v" and pp == 1):
        return zero_bubble(pp, m)
    if name == "zb-v":
        return zero_bubble_v(pp, m)
    if name != "1f1b":
        raise ConfigError(f"--pipeline-schedule {name} is not known; choose 1f1b, gpipe, zb-h1 or zb-v")
    if vpp == 1:
        return one_f_one_b(pp, m)
    group = pp if group is None else group
    refuse(filter(None, [group_problem(pp, m, group)]))
    return interleaved(pp, vpp, m, min(group, m))


def gpipe(pp: int, m: int, *, vpp: int = 1) -> Plan:
    """All forwards, then all backwards: the most memory, the simplest picture."""
    return _plan(pp, vpp, m, group=pp, warmup=lambda rank: vpp * m)


def one_f_one_b(pp: int, m: int) -> Plan:
    """A rank warms up just until its first gradient can arrive, and holds at most pp - rank activations."""
    return _plan(pp, 1, m, group=pp, warmup=lambda rank: pp - rank - 1)


def two_by_two(pp: int, m: int) -> Plan:
    """1F1B for passes that are done together. What a pair makes leaves when all of it is done; so to the last rank and back a
    microbatch is twice as many pairs on its way as in 1F1B, and a rank holds at most 2 (pp - rank) activations.
    """
    return _plan(pp, 1, m, group=pp, warmup=lambda rank: 2 * (pp - rank) - 1)


def zero_bubble(pp: int, m: int) -> Plan:
    """1F1B whose weight gradients wait: ZB-H1 (Qi et al., 2023).

    Rank r is r weight gradients behind its backward passes, as many as 1F1B has it hold fewer activations than the first
    rank: no rank holds more than that, and the last ranks' first gradients go upstream without a weight's in between. The
    bubble shrinks from (pp - 1)(F + B + W) to (pp - 1)(F + B - W), where W is no longer than F and B.
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
    """Two chunks a rank, there and back, whose weight gradients wait: ZB-V (Qi et al., 2024, "Controllable Memory").

    Rank r starts 2(pp - r) - 1 microbatches on their way there before the first comes back to it. The last stage is on the
    first rank, so gradients set out where forwards do, and reach rank r just when it has 2 pp chunks' activations, which no
    rank exceeds. Where forward, backward and weights take equal times and m >= 2 pp - 1, a rank idles only until its first
    microbatch comes and after its last gradient has gone: (pp - 1) F of a chunk, half of what is left in ZB-H1.
    """
    rows = []
    for rank in range(pp):
        after, there, back = pp - rank, ("F0", "B0", "W0"), ("F1", "B1", "W1")
        order = ["F0"] * (2 * after - 1) + ["F1", "F0"] * rank + [*back] * after + [*there, *back] * (m - pp)
        # The weights of the last gradients wait once more, on as many as the ranks before still have to hear of.
        order += ["B0", "B1"] * rank + ["B0", "W0"] * after + ["W0", "W1"] * m
        rows.append(_numbered(order, (rank, 2 * pp - 1 - rank), m))
    return tuple(rows)


def interleaved(pp: int, vpp: int, m: int, group: int) -> Plan:
    """1F1B over vpp chunks a rank, which cuts the bubble by vpp; a chunk runs `group` microbatches in a row.

    The ranks warm up by two microbatches a step of the pipeline, so that a message has a slot's time to travel.
    """
    return _plan(pp, vpp, m, group=group, warmup=lambda rank: 2 * (pp - rank - 1) + (vpp - 1) * group)


def forward_only(pp: int, vpp: int, m: int, placement: Placement = "wrap") -> Plan:
    """Forwards alone, for evaluation and decoding."""
    if placement == "v":
        assert vpp == 2, f"there and back are two chunks a rank, not {vpp}"
        return tuple(
            _numbered(["F0"] * (2 * (pp - rank) - 1) + ["F1", "F0"] * m, (rank, 2 * pp - 1 - rank), m)
            for rank in range(pp)
        )
    return tuple(
        tuple(Action("F", chunk * pp + rank, i) for chunk, i in _turns(vpp, m, group=pp)) for rank in range(pp)
    )


def with_reduction(plan: Plan) -> Plan:
    """The plan with an "R" right after each stage's last backward pass, or after the last weight gradient that waited."""
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


def are_together(row: Sequence[Action], place: int, stages: int) -> bool:
    """Whether a forward pass and the backward pass of another microbatch stand there that can be done as one: what either sends
    inside a layer travels while the other computes. stages: how many there are.

    The gradient must not come of what such a pair waits for: it is of a microbatch as far behind as there are stages from here to the
    end and back, as `two_by_two` has it.
    """
    pair = row[place : place + 2]
    return [action.op for action in pair] == ["F", "B"] and pair[0].microbatch - pair[1].microbatch >= 2 * (
        stages - pair[0].stage
    ) - 1


def next_actions(row: Sequence[Action], place: int, stages: int, *, together: bool) -> tuple[Action, ...]:
    """The action at a place of a row; with `together` also the next one, if the two can be done as one."""
    return tuple(row[place : place + 1 + (together and are_together(row, place, stages))])


def placement_of(plan: Plan) -> Placement:
    """How a plan lays stages on ranks, which shows in where it runs the first stage of the second chunks."""
    return "v" if any(action.stage == len(plan) for action in plan[-1]) and len(plan) > 1 else "wrap"


def num_stages(plan: Plan) -> int:
    """Stages that the plan runs: one more than the largest it names."""
    return 1 + max((action.stage for row in plan for action in row), default=-1)


def awaited(action: Action, stages: int) -> Action | None:
    """The action of another stage whose result this one takes in, if there is one; `stages` is how many there are."""
    stage = action.stage - TOWARDS.get(action.op, stages)
    return Action(action.op, stage, action.microbatch) if 0 <= stage < stages else None


def _plan(pp: int, vpp: int, m: int, *, group: int, warmup: Callable[[int], int]) -> Plan:
    """Every rank's row; gradients visit the chunks of a rank in the opposite order of activations."""
    turns = tuple(_turns(vpp, m, group))
    rows = []
    for rank in range(pp):
        forwards = [Action("F", chunk * pp + rank, i) for chunk, i in turns]
        backwards = [Action("B", (vpp - 1 - chunk) * pp + rank, i) for chunk, i in turns]
        ahead = min(warmup(rank), len(turns))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        rows.append(
            (*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[len(turns) - ahead :])
        )
    return tuple(rows)


def _numbered(order: Sequence[str], stages: tuple[int, int], m: int) -> tuple[Action, ...]:
    """A row from operations and chunks, such as "F0": each runs through the microbatches, and is left out when there are no more."""
    count: Counter[str] = Counter()
    steps = []
    for word in order:
        if count[word] < m:
            steps.append(Action(word[0], stages[int(word[1])], count[word]))
            count[word] += 1
    return tuple(steps)


def _turns(vpp: int, m: int, group: int) -> Iterator[tuple[int, int]]:
    """(chunk, microbatch) in the order a rank runs them: chunk by chunk within each group of microbatches."""
    for start in range(0, m, group):
        for chunk in range(vpp):
            for microbatch in range(start, min(start + group, m)):
                yield chunk, microbatch
