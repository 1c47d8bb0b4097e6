"""Simulate a plan without tensors: check that it is valid, and compute when each action runs.

Every action takes a given time and starts when its rank is free and the result it depends on has arrived. The
simulation proves that the plan ends, and gives start and end times, idle times, and peak numbers of stored activations:

    one_f_one_b(2, 3)     r0  0  1  .  0' 0' 2  1' 1' .  2' 2'       a number: forward of that microbatch,
                          r1  .  0  0' 0' 1  1' 1' 2  2' 2' .        primed: backward, which takes twice as long

A plan that has an action twice, not at all or on the wrong rank, or whose ranks wait for each other in a cycle, is
refused here with the actions at fault, before any process hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.core.config.plan.layers import stage_rank_and_chunk
from megatron.core.pipeline_parallel.schedules import (
    Action,
    Plan,
    ScheduleError,
    action_dependency,
    action_or_pair_at,
    num_plan_stages,
    stage_placement_of_plan,
)

MOST_PROBLEMS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated times of a plan.

    start, end: times of every action, in the rows of the plan. bubble: share of the ranks' time spent idle. peak: for
    each rank, the largest number of stage activations that it stores at once for backward passes.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    bubble: float
    peak: tuple[int, ...]


def simulate_pipeline_plan(
    plan: Plan,
    *,
    forward: float | Sequence[float] = 1,
    backward: float | Sequence[float] = 2,
    weight: float | Sequence[float] = 1,
    reduce: float | Sequence[float] = 0,
    message: float = 0,
    dual_batch_overlap: bool = False,
) -> Timeline:
    """Simulate the plan; raises ScheduleError if it is invalid or deadlocks.

    forward, backward, reduce: time of an action, a number or one number for each stage. message: time of a message
    between ranks. weight: the part of a backward pass that a "W" computes, in plans that have them. dual_batch_overlap: pairs
    that can overlap start and end together.
    """
    check_pipeline_plan(plan)
    splits = any(action.op == "W" for row in plan for action in row)
    playback = _PlanSimulation(
        plan,
        num_plan_stages(plan),
        {"F": forward, "B": backward, "R": reduce, "W": weight},
        message,
        splits,
        dual_batch_overlap,
    )
    waiting = list(range(len(plan)))
    while waiting:
        before = len(playback.done)
        for rank in waiting:
            playback.advance(rank)
        waiting = [rank for rank in waiting if len(playback.end[rank]) < len(plan[rank])]
        if waiting and len(playback.done) == before:
            raise ScheduleError(
                _deadlock_message({rank: plan[rank][len(playback.end[rank])] for rank in waiting}, plan)
            )
    start, end = playback.start, playback.end
    return Timeline(
        tuple(map(tuple, start)),
        tuple(map(tuple, end)),
        _bubble_share(start, end),
        tuple(_peak_num_activations(row) for row in plan),
    )


@dataclass(slots=True)
class _PlanSimulation:
    """The state of a simulation.

    time: of each kind of action. splits: the plan has a "W" for each "B". start, end: times so far, by rank. done: rank
    and end time of each action so far.
    """

    plan: Plan
    stages: int
    time: Mapping[str, float | Sequence[float]]
    message: float
    splits: bool
    dual_batch_overlap: bool
    start: list[list[float]] = field(init=False)
    end: list[list[float]] = field(init=False)
    done: dict[Action, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start, self.end = [[] for _ in self.plan], [[] for _ in self.plan]

    def advance(self, rank: int) -> None:
        """Simulate a rank's actions up to the first that depends on a result which is not there yet."""
        row, stages = self.plan[rank], self.stages
        while (place := len(self.end[rank])) < len(row):
            actions = action_or_pair_at(row, place, stages, dual_batch_overlap=self.dual_batch_overlap)
            sources = [source for action in actions if (source := action_dependency(action, stages)) is not None]
            if any(source not in self.done for source in sources):
                return
            arrivals = [self.done[source][1] + self.message * (self.done[source][0] != rank) for source in sources]
            begin = max([self.end[rank][-1] if self.end[rank] else 0.0, *arrivals])
            finish = self._finish_time(begin, actions)
            for action in actions:
                self.start[rank].append(begin)
                self.end[rank].append(finish)
                self.done[action] = rank, finish

    def _finish_time(self, time: float, actions: Sequence[Action]) -> float:
        """Return when actions that start at `time` end; a pair takes the sum of its times."""
        for action in actions:
            time += _time_of_stage(self.time[action.op], action.stage)
            if self.splits and action.op == "B":
                time -= _time_of_stage(self.time["W"], action.stage)
        return time


def check_pipeline_plan(plan: Plan) -> None:
    """Raise ScheduleError unless stages run each microbatch once each way, on their rank, F before B, W and R."""
    problems = [
        *_action_count_problems(plan),
        *_misplaced_action_problems(plan),
        *(problem for row in plan for problem in _order_problems(row)),
    ]
    if problems:
        more = len(problems) - MOST_PROBLEMS_SHOWN
        tail = [f"and {more} more"] if more > 0 else []
        raise ScheduleError("\n  ".join(["this plan is wrong", *problems[:MOST_PROBLEMS_SHOWN], *tail]))


def _action_count_problems(plan: Plan) -> Iterator[str]:
    """Yield a message for each action that is missing, superfluous or repeated."""
    counts = Counter(action for row in plan for action in row)
    microbatches = {action.microbatch for action in counts if action.op != "R"}
    expected = {
        Action(op, stage, i)
        for op in {"F", *{action.op for action in counts} & set("BWR")}
        for stage in range(num_plan_stages(plan))
        for i in (microbatches if op != "R" else {0})
    }
    yield from (f"{action} is missing" for action in sorted(expected - set(counts)))
    yield from (f"{action} does not belong in this plan" for action in sorted(set(counts) - expected))
    yield from (f"{action} occurs {count} times" for action, count in counts.items() if count > 1)


def _misplaced_action_problems(plan: Plan) -> Iterator[str]:
    """Yield a message for each action on another rank than its stage's, and if pp does not divide the stages."""
    stages, placement = num_plan_stages(plan), stage_placement_of_plan(plan)
    for rank, row in enumerate(plan):
        for action in row:
            owner = stage_rank_and_chunk(action.stage, len(plan), placement)[0]
            if owner != rank:
                yield f"rank {rank} has {action}, which belongs to rank {owner}"
    if stages % len(plan):
        yield f"{stages} stages cannot be divided over {len(plan)} ranks"


def draw_text_timeline(plan: Plan, timeline: Timeline) -> str:
    """Return the timeline as text: a line for each rank, a column a unit of time; letters are a rank's chunks.

    Durations are rounded to whole units; actions shorter than half a unit are not shown.
    """
    chunks = num_plan_stages(plan) // len(plan)
    width = 2 + max(len(_timeline_cell_text(action, len(plan), chunks)) for row in plan for action in row)
    columns = round(max(end for row in timeline.end for end in row))
    lines = []
    for rank, (row, start, end) in enumerate(zip(plan, timeline.start, timeline.end, strict=True)):
        cells = ["."] * columns
        for action, begin, finish in zip(row, start, end, strict=True):
            cells[round(begin) : round(finish)] = [_timeline_cell_text(action, len(plan), chunks)] * (
                round(finish) - round(begin)
            )
        lines.append(f"r{rank}".ljust(4) + "".join(cell.ljust(width - 1) for cell in cells).rstrip())
    return "\n".join(lines)


def _time_of_stage(time: float | Sequence[float], stage: int) -> float:
    """Return a stage's time from a number for all stages or one for each."""
    return time[stage] if isinstance(time, Sequence) else time


def _timeline_cell_text(action: Action, pp: int, chunks: int) -> str:
    """Return what stands for an action in a text timeline: chunk letter, microbatch, and ' for B or " for W."""
    if action.op == "R":
        return "R"
    letter = chr(ord("a") + action.stage // pp) if chunks > 1 else ""
    return f"{letter}{action.microbatch}" + {"B": "'", "W": '"'}.get(action.op, "")


def _order_problems(row: Sequence[Action]) -> Iterator[str]:
    """Yield a message for each action that comes too early in one rank's row."""
    last = {(action.op, action.stage): place for place, action in enumerate(row)}
    done = set()
    for place, action in enumerate(row):
        earlier = {"B": "F", "W": "B"}.get(action.op)
        if earlier and Action(earlier, action.stage, action.microbatch) not in done:
            yield f"{action} comes before its {'forward' if earlier == 'F' else 'backward'} pass"
        elif action.op == "R" and place < max(last.get((op, action.stage), 0) for op in "BW"):
            yield f"{action} comes before the stage's last backward pass"
        done.add(action)


def _deadlock_message(stuck: dict[int, Action], plan: Plan) -> str:
    """Describe the deadlock: follow the waits from the first stuck rank until a rank repeats."""
    links: dict[int, str] = {}
    stages, placement = num_plan_stages(plan), stage_placement_of_plan(plan)
    rank = min(stuck)
    while rank not in links:
        source = action_dependency(stuck[rank], stages)
        assert source is not None, f"{stuck[rank]} awaits nothing, so it cannot be stuck"
        links[rank] = f"rank {rank} waits at {stuck[rank]} for {source}"
        rank = stage_rank_and_chunk(source.stage, len(plan), placement)[0]
    cycle = list(links)[list(links).index(rank) :]
    return "this plan never ends: " + ", ".join(links[member] for member in cycle)


def _bubble_share(start: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> float:
    """Return the share of the ranks' time spent idle. start, end: times of the actions, by rank."""
    span = max((row[-1] for row in end if row), default=0.0)
    busy = sum(
        finish - begin
        for starts, ends in zip(start, end, strict=True)
        for begin, finish in dict.fromkeys(zip(starts, ends, strict=True))
    )
    return 1 - busy / (span * len(end)) if span else 0.0


def _peak_num_activations(row: Sequence[Action]) -> int:
    """Return the most activations stored at once in a rank's row; one without a backward pass is not stored."""
    ends = "W" if any(action.op == "W" for action in row) else "B"
    saved = {(action.stage, action.microbatch) for action in row if action.op == ends}
    current = peak = 0
    for action in row:
        if action.op in ("F", ends) and (action.stage, action.microbatch) in saved:
            current += 1 if action.op == "F" else -1
            peak = max(peak, current)
    return peak
