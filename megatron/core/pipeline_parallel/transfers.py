"""What crosses ranks, in one order that all ranks derive from the plan.

Every rank knows the whole plan, so every rank can play it and list all messages by the time their payload is ready.
Each then performs its own part of that one list, in that order. The earliest message not yet performed has nothing
before it, at its sender or at its receiver, so both get to it: ranks cannot wait for each other in a circle, even if
every send blocks until it is received.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedules import TOWARDS, Action, Plan, awaited, num_stages
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


@dataclass(frozen=True, slots=True)
class Script:
    """What one rank does, messages included, in order.

    A transfer among the steps is where this rank begins its end of it. If the script does not overlap, the rank also
    waits there until the message is through; otherwise a receive stands one action early, to travel during that action.
    """

    rank: int
    size: int
    stages: int
    steps: tuple[Action | Transfer, ...]
    overlap: bool


def transfers(plan: Plan) -> tuple[Transfer, ...]:
    """Every message between ranks, in the order all ranks keep; chunks of one rank hand over without a message."""
    timeline, stages = play(plan), num_stages(plan)
    ready = {action: end for row, ends in zip(plan, timeline.end, strict=True)
             for action, end in zip(row, ends, strict=True)}
    found = []
    for dst, row in enumerate(plan):
        for action in row:
            source = awaited(action, stages)
            if source is not None and source.stage % len(plan) != dst:
                found.append(Transfer(source.stage % len(plan), dst, source.op, source.stage, source.microbatch))
    # Of messages ready together those from upstream come first, so that a rank receives before it sends.
    return tuple(sorted(found, key=lambda t: (ready[t.made_by], t.kind, TOWARDS[t.kind] * t.stage, t.microbatch)))


def script(plan: Plan, rank: int, *, overlap: bool = True) -> Script:
    """One rank's row with its messages put in: receives before the action that takes them, sends after their maker.

    Messages keep the order of `transfers`; each stands as late as its action and that order allow, but for the one
    action that receives are early if they overlap.
    """
    own = [transfer for transfer in transfers(plan) if rank in (transfer.src, transfer.dst)]
    before = {transfer.taken_by: place + 1 for place, transfer in enumerate(own) if transfer.dst == rank}
    after = {transfer.made_by: place + 1 for place, transfer in enumerate(own) if transfer.src == rank}
    steps: list[Action | Transfer] = []
    begun = 0
    for action in plan[rank]:
        arriving = own[begun:before.get(action, 0)]
        begun += len(arriving)
        steps += arriving
        steps.append(action)
        leaving = own[begun:after.get(action, 0)]
        begun += len(leaving)
        steps += leaving
    if overlap:
        for place in range(1, len(steps)):
            if isinstance(steps[place - 1], Action) and _receives(steps[place], rank):
                steps[place - 1], steps[place] = steps[place], steps[place - 1]
    return Script(rank, len(plan), num_stages(plan), tuple(steps), overlap)


def _receives(step: Action | Transfer, rank: int) -> bool:
    return isinstance(step, Transfer) and step.dst == rank
