"""What crosses ranks, in one order that all ranks derive from the plan.

Every rank knows the whole plan, so every rank can play it and list all messages by the time their payload is ready.
Each then performs its own part of that one list, in that order. The earliest message not yet performed has nothing
before it, at its sender or at its receiver, so both get to it: ranks cannot wait for each other in a circle, even if
every send blocks until it is received.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.plan import home
from megatron.core.pipeline_parallel.schedules import (
    TOWARDS,
    Action,
    Plan,
    are_together,
    awaited,
    num_stages,
    placement_of,
)
from megatron.core.pipeline_parallel.timeline import play


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: what the action (kind, stage, microbatch) on pipeline rank src made, for rank dst.

    kind "F" carries activations to stage + 1, kind "B" gradients to stage - 1.
    """

    src: int
    dst: int
    kind: str
    stage: int
    microbatch: int

    @property
    def made_by(self) -> Action:
        """The action whose result travels."""
        return Action(self.kind, self.stage, self.microbatch)

    @property
    def taken_by(self) -> Action:
        """The action that waits for it."""
        return Action(self.kind, self.stage + TOWARDS[self.kind], self.microbatch)

    def __str__(self) -> str:
        return f"message for {self.taken_by}"


@dataclass(frozen=True, slots=True)
class Script:
    """What one rank does, messages included, in order.

    A transfer among the steps is where this rank begins its end of it. If the script does not overlap, the rank also
    waits there until the message is through; otherwise a receive stands one action early, to travel during that action.
    together: passes that are (`are_together`) stand side by side, what they take before and what they make behind both.
    """

    rank: int
    size: int
    stages: int
    steps: tuple[Action | Transfer, ...]
    overlap: bool
    together: bool = False

    def parts(self) -> Iterator[tuple[Action | Transfer, ...]]:
        """The steps one by one, and those that are together two by two."""
        place = 0
        while place < len(self.steps):
            pair = self.steps[place : place + 2]
            both = (
                self.together
                and not any(isinstance(step, Transfer) for step in pair)
                and are_together(pair, 0, self.stages)
            )
            yield pair[: 1 + both]
            place += 1 + both


def transfers(plan: Plan, *, together: bool = False) -> tuple[Transfer, ...]:
    """Every message between ranks, in the order all ranks keep; chunks of one rank hand over without a message."""
    timeline, stages, placement = play(plan, together=together), num_stages(plan), placement_of(plan)
    ready = {
        action: end for row, ends in zip(plan, timeline.end, strict=True) for action, end in zip(row, ends, strict=True)
    }
    found = []
    for dst, row in enumerate(plan):
        for action in row:
            source = awaited(action, stages)
            src = dst if source is None else home(source.stage, len(plan), placement)[0]
            if src != dst:
                found.append(Transfer(src, dst, source.op, source.stage, source.microbatch))
    # Of messages ready together those from upstream come first, so that a rank receives before it sends.
    return tuple(sorted(found, key=lambda t: (ready[t.made_by], t.kind, TOWARDS[t.kind] * t.stage, t.microbatch)))


def script(plan: Plan, rank: int, *, overlap: bool = True, together: bool = False) -> Script:
    """One rank's row with its messages put in: receives before the action that takes them, sends after their maker.

    Messages keep the order of `transfers`; each stands as late as its action and that order allow, but for the one
    action that receives are early if they overlap.
    """
    own = [transfer for transfer in transfers(plan, together=together) if rank in (transfer.src, transfer.dst)]
    before = {transfer.taken_by: place + 1 for place, transfer in enumerate(own) if transfer.dst == rank}
    after = {transfer.made_by: place + 1 for place, transfer in enumerate(own) if transfer.src == rank}
    parts: list[list[Action | Transfer]] = []  # messages one by one, and actions, those that are together as one
    begun, place, stages = 0, 0, num_stages(plan)
    while place < len(plan[rank]):
        actions = plan[rank][place : place + 1 + (together and are_together(plan[rank], place, stages))]
        arriving = own[begun : max(before.get(action, 0) for action in actions)]
        begun += len(arriving)
        leaving = own[begun : max(after.get(action, 0) for action in actions)]
        begun += len(leaving)
        parts += [*([message] for message in arriving), list(actions), *([message] for message in leaving)]
        place += len(actions)
    if overlap:
        for place in range(1, len(parts)):
            if isinstance(parts[place - 1][0], Action) and _receives(parts[place][0], rank):
                parts[place - 1], parts[place] = parts[place], parts[place - 1]
    steps = tuple(step for part in parts for step in part)
    return Script(rank, len(plan), stages, steps, overlap, together)


def _receives(step: Action | Transfer, rank: int) -> bool:
    return isinstance(step, Transfer) and step.dst == rank
