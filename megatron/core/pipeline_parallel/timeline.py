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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.plan import home
from megatron.core.pipeline_parallel.schedules import (
    Action,
    Plan,
    ScheduleError,
    are_together,
    awaited,
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
    stages, time = num_stages(plan), {"F": forward, "B": backward, "R": reduce, "W": weight}
    splits = any(action.op == "W" for row in plan for action in row)
    start: list[list[float]] = [[] for _ in plan]
    end: list[list[float]] = [[] for _ in plan]
    done: dict[Action, tuple[int, float]] = {}
    waiting = list(range(len(plan)))
    while waiting:
        before = len(done)
        for rank in waiting:
            while len(end[rank]) < len(plan[rank]):
                place = len(end[rank])
                actions = plan[rank][place : place + 1 + (together and are_together(plan[rank], place, stages))]
                sources = [source for action in actions if (source := awaited(action, stages)) is not None]
                if any(source not in done for source in sources):
                    break
                arrivals = [done[source][1] + message * (done[source][0] != rank) for source in sources]
                begin = finish = max([end[rank][-1] if end[rank] else 0.0, *arrivals])
                for action in actions:
                    finish += _of_stage(time[action.op], action.stage)
                    if splits and action.op == "B":
                        finish -= _of_stage(weight, action.stage)
                for action in actions:
                    start[rank].append(begin)
                    end[rank].append(finish)
                    done[action] = rank, finish
        waiting = [rank for rank in waiting if len(end[rank]) < len(plan[rank])]
        if waiting and len(done) == before:
            raise ScheduleError(_circle({rank: plan[rank][len(end[rank])] for rank in waiting}, plan))
    return Timeline(_rows(start), _rows(end), _bubble(start, end), tuple(_peak(row) for row in plan))


def check(plan: Plan) -> None:
    """Refuse a plan unless each stage sees each microbatch once in each direction, on its rank, F before B before W before R."""
    stages, placement = num_stages(plan), placement_of(plan)
    microbatches = {action.microbatch for row in plan for action in row if action.op != "R"}
    seen = Counter(action for row in plan for action in row)
    ops = {op for op in "FBWR" if any(action.op == op for action in seen)} | {"F"}
    wanted = {
        Action(op, stage, i) for op in ops for stage in range(stages) for i in (microbatches if op != "R" else {0})
    }
    problems = [f"{action} is missing" for action in sorted(wanted - set(seen))]
    problems += [f"{action} has no place in this plan" for action in sorted(set(seen) - wanted)]
    problems += [f"{action} stands there {count} times" for action, count in seen.items() if count > 1]
    problems += [
        f"rank {rank} has {action}, which belongs to rank {owner}"
        for rank, row in enumerate(plan)
        for action in row
        if (owner := home(action.stage, len(plan), placement)[0]) != rank
    ]
    if stages % len(plan):
        problems.append(f"{stages} stages cannot be divided over {len(plan)} ranks")
    problems += [problem for row in plan for problem in _misplaced(row)]
    if problems:
        more = len(problems) - MOST_PROBLEMS_SHOWN
        tail = [f"and {more} more"] if more > 0 else []
        raise ScheduleError("\n  ".join(["this plan is wrong", *problems[:MOST_PROBLEMS_SHOWN], *tail]))


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
