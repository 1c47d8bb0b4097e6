"""Play a plan without tensors: a test and a tool at once.

Every action takes a given time and starts when its rank is free and what it awaits has arrived. Playing proves that
the plan ends, and tells when everything happens, how long ranks idle and how many activations they hold:

    one_f_one_b(2, 3)     r0  0  1  .  0' 0' 2  1' 1' .  2' 2'       a number: forward of that microbatch,
                          r1  .  0  0' 0' 1  1' 1' 2  2' 2' .        primed: backward, which takes twice as long

A plan that does something twice, nowhere or on the wrong rank, or whose ranks wait for each other in a circle, is
refused here with the actions at fault, before any process hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.core.config.plan import home
from megatron.core.pipeline_parallel.schedules import (
    Action,
    Plan,
    ScheduleError,
    awaited,
    next_actions,
    num_stages,
    placement_of,
)

MOST_PROBLEMS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Timeline:
    """A plan, played.

    start, end: the time of every action, row by row as in the plan. bubble: the share of the ranks' time spent idle.
    peak: for each rank, the most stage activations it keeps for a backward pass at once.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    bubble: float
    peak: tuple[int, ...]


def play(
    plan: Plan,
    *,
    forward: float | Sequence[float] = 1,
    backward: float | Sequence[float] = 2,
    weight: float | Sequence[float] = 1,
    reduce: float | Sequence[float] = 0,
    message: float = 0,
    together: bool = False,
) -> Timeline:
    """Play the plan; `ScheduleError` if it is wrong or cannot end.

    forward, backward, reduce: time of an action, one for all stages or one a stage; message: time between ranks. weight: the
    part of a backward pass that a "W" does, where the plan has them. together: passes that are (`are_together`) begin and end as one.
    """
    check(plan)
    splits = any(action.op == "W" for row in plan for action in row)
    playback = _Playback(
        plan, num_stages(plan), {"F": forward, "B": backward, "R": reduce, "W": weight}, message, splits, together
    )
    waiting = list(range(len(plan)))
    while waiting:
        before = len(playback.done)
        for rank in waiting:
            playback.advance(rank)
        waiting = [rank for rank in waiting if len(playback.end[rank]) < len(plan[rank])]
        if waiting and len(playback.done) == before:
            raise ScheduleError(_circle({rank: plan[rank][len(playback.end[rank])] for rank in waiting}, plan))
    start, end = playback.start, playback.end
    return Timeline(_rows(start), _rows(end), _bubble(start, end), tuple(_peak(row) for row in plan))


@dataclass(slots=True)
class _Playback:
    """A plan while it is played. time: of each kind of action; splits: the plan has a "W" for each "B".

    start, end: times so far, by rank. done: rank and end of each action so far.
    """

    plan: Plan
    stages: int
    time: Mapping[str, float | Sequence[float]]
    message: float
    splits: bool
    together: bool
    start: list[list[float]] = field(init=False)
    end: list[list[float]] = field(init=False)
    done: dict[Action, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start, self.end = [[] for _ in self.plan], [[] for _ in self.plan]

    def advance(self, rank: int) -> None:
        """Play a rank's actions up to the first that awaits a result which is not there yet."""
        row, stages = self.plan[rank], self.stages
        while (place := len(self.end[rank])) < len(row):
            actions = next_actions(row, place, stages, together=self.together)
            sources = [source for action in actions if (source := awaited(action, stages)) is not None]
            if any(source not in self.done for source in sources):
                return
            arrivals = [self.done[source][1] + self.message * (self.done[source][0] != rank) for source in sources]
            begin = max([self.end[rank][-1] if self.end[rank] else 0.0, *arrivals])
            finish = self._finish(begin, actions)
            for action in actions:
                self.start[rank].append(begin)
                self.end[rank].append(finish)
                self.done[action] = rank, finish

    def _finish(self, time: float, actions: Sequence[Action]) -> float:
        for action in actions:
            time += _of_stage(self.time[action.op], action.stage)
            if self.splits and action.op == "B":
                time -= _of_stage(self.time["W"], action.stage)
        return time


def check(plan: Plan) -> None:
    """Refuse a plan unless each stage sees each microbatch once in each direction, on its rank, F before B before W before R."""
    problems = [*_miscounted(plan), *_on_wrong_rank(plan), *(problem for row in plan for problem in _misplaced(row))]
    if problems:
        more = len(problems) - MOST_PROBLEMS_SHOWN
        tail = [f"and {more} more"] if more > 0 else []
        raise ScheduleError("\n  ".join(["this plan is wrong", *problems[:MOST_PROBLEMS_SHOWN], *tail]))


def _miscounted(plan: Plan) -> Iterator[str]:
    """Actions that are missing, superfluous or repeated."""
    counts = Counter(action for row in plan for action in row)
    microbatches = {action.microbatch for action in counts if action.op != "R"}
    expected = {
        Action(op, stage, i)
        for op in {"F", *{action.op for action in counts} & set("BWR")}
        for stage in range(num_stages(plan))
        for i in (microbatches if op != "R" else {0})
    }
    yield from (f"{action} is missing" for action in sorted(expected - set(counts)))
    yield from (f"{action} has no place in this plan" for action in sorted(set(counts) - expected))
    yield from (f"{action} stands there {count} times" for action, count in counts.items() if count > 1)


def _on_wrong_rank(plan: Plan) -> Iterator[str]:
    """Actions of stages that live on another rank, and a number of stages that the ranks do not divide."""
    stages, placement = num_stages(plan), placement_of(plan)
    for rank, row in enumerate(plan):
        for action in row:
            owner = home(action.stage, len(plan), placement)[0]
            if owner != rank:
                yield f"rank {rank} has {action}, which belongs to rank {owner}"
    if stages % len(plan):
        yield f"{stages} stages cannot be divided over {len(plan)} ranks"


def picture(plan: Plan, timeline: Timeline) -> str:
    """The timeline as text, one line a rank and one column a unit of time; chunks of a rank are told apart by letters.

    Durations are rounded to whole units; actions shorter than half a unit are not shown.
    """
    chunks = num_stages(plan) // len(plan)
    width = 2 + max(len(_cell(action, len(plan), chunks)) for row in plan for action in row)
    columns = round(max(end for row in timeline.end for end in row))
    lines = []
    for rank, (row, start, end) in enumerate(zip(plan, timeline.start, timeline.end, strict=True)):
        cells = ["."] * columns
        for action, begin, finish in zip(row, start, end, strict=True):
            cells[round(begin) : round(finish)] = [_cell(action, len(plan), chunks)] * (round(finish) - round(begin))
        lines.append(f"r{rank}".ljust(4) + "".join(cell.ljust(width - 1) for cell in cells).rstrip())
    return "\n".join(lines)


def _of_stage(time: float | Sequence[float], stage: int) -> float:
    return time[stage] if isinstance(time, Sequence) else time


def _cell(action: Action, pp: int, chunks: int) -> str:
    if action.op == "R":
        return "R"
    letter = chr(ord("a") + action.stage // pp) if chunks > 1 else ""
    return f"{letter}{action.microbatch}" + {"B": "'", "W": '"'}.get(action.op, "")


def _misplaced(row: Sequence[Action]) -> Iterator[str]:
    """What comes too early in one rank's row."""
    last = {(action.op, action.stage): place for place, action in enumerate(row)}
    done = set()
    for place, action in enumerate(row):
        earlier = {"B": "F", "W": "B"}.get(action.op)
        if earlier and Action(earlier, action.stage, action.microbatch) not in done:
            yield f"{action} comes before its {'forward' if earlier == 'F' else 'backward'} pass"
        elif action.op == "R" and place < max(last.get((op, action.stage), 0) for op in "BW"):
            yield f"{action} comes before the stage's last backward pass"
        done.add(action)


def _circle(stuck: dict[int, Action], plan: Plan) -> str:
    """Follow who waits for whom from the first stuck rank until a rank comes up again."""
    links: dict[int, str] = {}
    stages, placement = num_stages(plan), placement_of(plan)
    rank = min(stuck)
    while rank not in links:
        source = awaited(stuck[rank], stages)
        assert source is not None, f"{stuck[rank]} awaits nothing, so it cannot be stuck"
        links[rank] = f"rank {rank} waits at {stuck[rank]} for {source}"
        rank = home(source.stage, len(plan), placement)[0]
    ring = list(links)[list(links).index(rank) :]
    return "this plan never ends: " + ", ".join(links[member] for member in ring)


def _bubble(start: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> float:
    span = max((row[-1] for row in end if row), default=0.0)
    busy = sum(
        finish - begin
        for starts, ends in zip(start, end, strict=True)
        for begin, finish in dict.fromkeys(zip(starts, ends, strict=True))
    )
    return 1 - busy / (span * len(end)) if span else 0.0


def _peak(row: Sequence[Action]) -> int:
    """Most forwards whose backward is still to come, its weights included; what has no backward is not kept."""
    ends = "W" if any(action.op == "W" for action in row) else "B"
    kept = {(action.stage, action.microbatch) for action in row if action.op == ends}
    live = most = 0
    for action in row:
        if action.op in ("F", ends) and (action.stage, action.microbatch) in kept:
            live += 1 if action.op == "F" else -1
            most = max(most, live)
    return most


def _rows(times: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in times)
