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
    awaited,
    next_actions,
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

    def parts(self) -> Iterator[Transfer | tuple[Action, ...]]:
        """The transfers and actions one by one, and actions that are together two by two."""
        place = 0
        while place < len(self.steps):
            step = self.steps[place]
            if isinstance(step, Transfer):
                yield step
                place += 1
            else:
                pair = [step for step in self.steps[place : place + 2] if isinstance(step, Action)]
                actions = next_actions(pair, 0, self.stages, together=self.together)
                yield actions
                place += len(actions)


def transfers(plan: Plan, *, together: bool = False) -> tuple[Transfer, ...]:
    """Every message between ranks, in the order all ranks keep; chunks of one rank hand over without a message."""
    timeline, stages, placement = play(plan, together=together), num_stages(plan), placement_of(plan)
    ready = {
        action: end for row, ends in zip(plan, timeline.end, strict=True) for action, end in zip(row, ends, strict=True)
    }
    messages = [
        Transfer(src, dst, source.op, source.stage, source.microbatch)
        for dst, row in enumerate(plan)
        for action in row
        if (source := awaited(action, stages)) is not None
        and (src := home(source.stage, len(plan), placement)[0]) != dst
    ]
    # Of messages ready together those from upstream come first, so that a rank receives before it sends.
    return tuple(sorted(messages, key=lambda t: (ready[t.made_by], t.kind, TOWARDS[t.kind] * t.stage, t.microbatch)))


def script(plan: Plan, rank: int, *, overlap: bool = True, together: bool = False) -> Script:
    """One rank's row with its messages put in: receives before the action that takes them, sends after their maker.

    Messages keep the order of `transfers`; each stands as late as its action and that order allow, but for the one
    action that receives are early if they overlap.
    """
    mine = [transfer for transfer in transfers(plan, together=together) if rank in (transfer.src, transfer.dst)]
    before = {transfer.taken_by: place + 1 for place, transfer in enumerate(mine) if transfer.dst == rank}
    after = {transfer.made_by: place + 1 for place, transfer in enumerate(mine) if transfer.src == rank}
    parts: list[Transfer | tuple[Action, ...]] = []
    begun, place, stages = 0, 0, num_stages(plan)
    while place < len(plan[rank]):
        actions = next_actions(plan[rank], place, stages, together=together)
        arriving = mine[begun : max(before.get(action, 0) for action in actions)]
        begun += len(arriving)
        leaving = mine[begun : max(after.get(action, 0) for action in actions)]
        begun += len(leaving)
        parts += [*arriving, actions, *leaving]
        place += len(actions)
    if overlap:
        _receive_early(parts, rank)
    steps = [step for part in parts for step in ((part,) if isinstance(part, Transfer) else part)]
    return Script(rank, len(plan), stages, tuple(steps), overlap, together)


def _receive_early(parts: list[Transfer | tuple[Action, ...]], rank: int) -> None:
    """Move every receive in front of the actions that stand right before it, in place."""
    for place in range(1, len(parts)):
        part = parts[place]
        if isinstance(part, Transfer) and part.dst == rank and not isinstance(parts[place - 1], Transfer):
            parts[place - 1], parts[place] = part, parts[place - 1]
