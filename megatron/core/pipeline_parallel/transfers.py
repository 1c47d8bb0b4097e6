"""The messages of a plan between ranks, in one order that all ranks derive from it.

Every rank knows the whole plan, so it can simulate the plan and list all messages by the time their payload is ready.
Each rank then performs its part of that list, in that order. The earliest message not yet performed has nothing before
it, at its sender or at its receiver, so both reach it: ranks cannot deadlock, even if sends block until received.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.plan.layers import stage_rank_and_chunk
from megatron.core.pipeline_parallel.schedules import (
    STAGE_STEP,
    Action,
    Plan,
    action_dependency,
    action_or_pair_at,
    num_plan_stages,
    stage_placement_of_plan,
)
from megatron.core.pipeline_parallel.timeline import simulate_pipeline_plan


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message with the result of an action, the producer, from pipeline rank src to rank dst.

    An "F" sends activations to the next stage, a "B" gradients to the previous one.
    """

    src: int
    dst: int
    producer: Action

    @property
    def consumer(self) -> Action:
        """The action that waits for the message."""
        op, stage = self.producer.op, self.producer.stage
        return Action(op, stage + STAGE_STEP[op], self.producer.microbatch)

    def __str__(self) -> str:
        return f"message for {self.consumer}"


@dataclass(frozen=True, slots=True)
class RankScript:
    """The actions and messages of one rank, in order.

    A transfer among the steps marks where this rank starts its end of it. Without `overlap`, the rank also waits there
    until it is complete; with it, a receive is started one action early, and is in flight during that action.
    dual_batch_overlap: the two actions of an overlapping pair are adjacent, with the messages they consume before both and
    those they produce behind both.
    """

    rank: int
    size: int
    stages: int
    steps: tuple[Action | Transfer, ...]
    overlap: bool
    dual_batch_overlap: bool = False

    def instructions(self) -> Iterator[Transfer | tuple[Action, ...]]:
        """Yield each transfer, and each action as a tuple, in which the two of an overlapping pair are together."""
        place = 0
        while place < len(self.steps):
            step = self.steps[place]
            if isinstance(step, Transfer):
                yield step
                place += 1
            else:
                pair = [step for step in self.steps[place : place + 2] if isinstance(step, Action)]
                actions = action_or_pair_at(pair, 0, self.stages, dual_batch_overlap=self.dual_batch_overlap)
                yield actions
                place += len(actions)


def plan_pipeline_transfers(plan: Plan, *, dual_batch_overlap: bool = False) -> tuple[Transfer, ...]:
    """Return every message between ranks in their common order; chunks on the same rank need no message."""
    timeline, stages, placement = (
        simulate_pipeline_plan(plan, dual_batch_overlap=dual_batch_overlap),
        num_plan_stages(plan),
        stage_placement_of_plan(plan),
    )
    ready = {
        action: end for row, ends in zip(plan, timeline.end, strict=True) for action, end in zip(row, ends, strict=True)
    }
    messages = [
        Transfer(src, dst, source)
        for dst, row in enumerate(plan)
        for action in row
        if (source := action_dependency(action, stages)) is not None
        and (src := stage_rank_and_chunk(source.stage, len(plan), placement)[0]) != dst
    ]

    # Of messages that are ready at the same time, upstream ones come first, so that a rank receives before it sends.
    def order(message: Transfer) -> tuple[float, str, int, int]:
        source = message.producer
        return ready[source], source.op, STAGE_STEP[source.op] * source.stage, source.microbatch

    return tuple(sorted(messages, key=order))


def build_rank_script(plan: Plan, rank: int, *, overlap: bool = True, dual_batch_overlap: bool = False) -> RankScript:
    """Return one rank's script: its row of the plan with its messages inserted.

    Receives come before the consuming action, sends after the producing one, in the order of `plan_pipeline_transfers`, each as
    late as possible; with `overlap`, receives come one action earlier.
    """
    own_transfers = [
        transfer
        for transfer in plan_pipeline_transfers(plan, dual_batch_overlap=dual_batch_overlap)
        if rank in (transfer.src, transfer.dst)
    ]
    before = {transfer.consumer: place + 1 for place, transfer in enumerate(own_transfers) if transfer.dst == rank}
    after = {transfer.producer: place + 1 for place, transfer in enumerate(own_transfers) if transfer.src == rank}
    parts: list[Transfer | tuple[Action, ...]] = []
    num_started, place, stages = 0, 0, num_plan_stages(plan)
    while place < len(plan[rank]):
        actions = action_or_pair_at(plan[rank], place, stages, dual_batch_overlap=dual_batch_overlap)
        arriving = own_transfers[num_started : max(before.get(action, 0) for action in actions)]
        num_started += len(arriving)
        leaving = own_transfers[num_started : max(after.get(action, 0) for action in actions)]
        num_started += len(leaving)
        parts += [*arriving, actions, *leaving]
        place += len(actions)
    if overlap:
        _move_receives_forward(parts, rank)
    steps = [step for part in parts for step in ((part,) if isinstance(part, Transfer) else part)]
    return RankScript(rank, len(plan), stages, tuple(steps), overlap, dual_batch_overlap)


def _move_receives_forward(parts: list[Transfer | tuple[Action, ...]], rank: int) -> None:
    """Move every receive of the rank in front of the actions that precede it, in place."""
    for place in range(1, len(parts)):
        part = parts[place]
        if isinstance(part, Transfer) and part.dst == rank and not isinstance(parts[place - 1], Transfer):
            parts[place - 1], parts[place] = part, parts[place - 1]
