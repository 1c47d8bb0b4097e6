"""Would these ranks hang? Compare the collectives and messages of all ranks' traces, without running anything.

    match_collectives(dry_run) -> CollectiveMatchReport       mismatches; the first of them with both source lines

Three things are checked, by the rules of NCCL and gloo:

    collectives    all ranks of a group call the same ones in the same order: operation, dtype, shape, source
    messages       both ends of a pair of ranks see the same ones in the same order: direction (for the pipeline, where they are not
                   started together), dtype, shape
    waiting        when all ranks are played together, no cycle of ranks waits for each other

In the simulation a collective blocks a rank until its whole group has arrived; a receive blocks where the action that consumes the message
begins; a send blocks at the end of the next action, or without overlap at once. That is at least as strict as any transport, so
that a step which passes cannot deadlock by its order.

Groups with equal rank lists count as one, except those of pipeline gradients and of hybrid context parallelism. In a large world a trace stands
for many ranks, which are assumed to do the same within their own groups. Groups are then compared kind by kind; played are the ranks
of one pipeline with its tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from megatron.core.parallel.grid import RankLists, axis_rank_groups, hybrid_cp_rank_groups
from megatron.plan.simulate.trace import TOGETHER, DryRunResult, StepEvent, communication_events_of

MOST_PLAYED = 64  # ranks that are played together
_ALONE = ("pp", "pp_backward")  # axes whose messages begin one by one; elsewhere a send and a receive begin together
Group = tuple[str, tuple[int, ...]]  # (which of the groups of these ranks, the ranks)


@dataclass(frozen=True, slots=True)
class CommunicationCall:
    """A collective, or one end of a message, of one rank. peer: rank of the other end, or the source of a broadcast."""

    rank: int
    name: str
    axis: str
    group: Group
    peer: int
    shape: tuple[int, ...]
    dtype: str
    where: str
    action: str

    def __str__(self) -> str:
        other = {
            "send": f" to rank {self.peer}",
            "receive": f" from rank {self.peer}",
            "broadcast": f" from rank {self.peer}",
        }.get(self.name, "")
        return (
            f"rank {self.rank}, {self.action or 'nowhere'}: {self.name}{other} of {'x'.join(map(str, self.shape)) or '1'} {self.dtype} "
            f"at {self.where or 'an unknown line'}"
        )


@dataclass(frozen=True, slots=True)
class CollectiveMismatch:
    """A mismatch of collectives or messages. kind: count, operation, shape, dtype, source, direction, or waiting.
    both: the two ends; of a cycle of waiting ranks, all of it.
    """

    kind: str
    says: str
    both: tuple[CommunicationCall, ...]

    def __str__(self) -> str:
        return "\n".join([self.says, *(f"    {one}" for one in self.both)])


@dataclass(frozen=True, slots=True)
class CollectiveMatchReport:
    """Result of the comparison. collectives, messages: pairs compared. played: number of ranks simulated together."""

    problems: tuple[CollectiveMismatch, ...]
    collectives: int
    messages: int
    played: int

    @property
    def text(self) -> str:
        """Return the report as text."""
        looked = f"{self.collectives:,} collectives and {self.messages:,} messages compared, {self.played} ranks played together"
        if not self.problems:
            return f"no rank waits forever: {looked}"
        more = f"\n... and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
        return f"ranks would hang, or exchange what the other does not mean ({looked}):\n{self.problems[0]}{more}"


@dataclass(frozen=True, slots=True)
class RankCommunicationSequence:
    """One rank's collectives and messages in order, with the starts of its actions, as strings, between them."""

    rank: int
    steps: tuple[CommunicationCall | str, ...]


def match_collectives(run: DryRunResult) -> CollectiveMatchReport:
    """Compare the traces of a dry run."""
    lists = axis_rank_groups(run.config.parallel, run.world_size) | hybrid_cp_rank_groups(
        run.config.parallel, run.world_size
    )
    lists["pp_backward"] = lists["pp"]
    kind_of = {rank: place for place, ranks in enumerate(run.stands_for) for rank in ranks}
    traced = {trace.rank: trace.events for trace in run.traces}
    stands = [trace.rank for trace in run.traces]

    compares = _make_optimizer_share_predicate(run, lists)

    def communication_sequence_of(rank: int) -> RankCommunicationSequence:
        return rank_communication_of(rank, stands[kind_of[rank]], traced[stands[kind_of[rank]]], lists, compares)

    chosen = played = [rank for rank in range(run.world_size) if rank in kind_of]
    if len(played) > MOST_PLAYED:
        chosen = [rank for rank in _ranks_covering_kind_pairs(lists, kind_of) if rank in kind_of]
        first_replica = next(group for group in lists["model"] if played[0] in group)
        played = [rank for rank in first_replica if rank in kind_of]
    return match_rank_communication(
        {rank: communication_sequence_of(rank) for rank in dict.fromkeys((*chosen, *played))},
        played,
        overlap=run.config.parallel.overlap_p2p_communication,
    )


def _make_optimizer_share_predicate(
    run: DryRunResult, lists: Mapping[str, RankLists]
) -> Callable[[Sequence[int]], bool]:
    """Return whether sums of owners' shares can be compared in a group of ranks: the traces of all have the same share of the optimizer's state."""
    place = {rank: at for group in lists["dp_cp"] for at, rank in enumerate(group)}
    share = {rank: place[trace.rank] for trace, ranks in zip(run.traces, run.stands_for, strict=True) for rank in ranks}
    every = not run.config.parallel.use_distributed_optimizer
    return lambda ranks: every or len({share[rank] for rank in ranks if rank in share}) <= 1


def match_rank_communication(
    lines: Mapping[int, RankCommunicationSequence], played: Sequence[int] | None = None, *, overlap: bool = True
) -> CollectiveMatchReport:
    """Compare ranks' collectives and messages, and simulate waiting of `played`, or all. overlap: with actions."""
    problems, collectives = _compare_collectives(lines)
    others, messages = _compare_sent_and_received(lines)
    problems += others
    chosen = list(lines) if played is None else list(played)
    if not problems:  # what does not meet would only be found waiting for what never comes
        problems += _simulate_waiting({rank: lines[rank] for rank in chosen}, overlap=overlap)
    return CollectiveMatchReport(tuple(problems), collectives, messages, len(chosen))


def rank_communication_of(
    rank: int,
    traced: int,
    events: Sequence[StepEvent],
    lists: Mapping[str, RankLists],
    compares: Callable[[Sequence[int]], bool] = lambda ranks: True,
) -> RankCommunicationSequence:
    """Return the timeline of a rank from the trace of another that stands for it: the same events, in its own groups.

    compares: whether sums of owners' shares are compared in a group of ranks; elsewhere they are left out.
    """
    groups = {
        axis: (next((g for g in axis_groups if traced in g), None), next((g for g in axis_groups if rank in g), None))
        for axis, axis_groups in lists.items()
    }
    steps: list[CommunicationCall | str] = []
    for event in communication_events_of(events):
        if event.kind == "action":
            steps.append(event.name)
        elif event.is_communication:
            theirs, event_ranks = groups.get(event.axis, (event.ranks, event.ranks))
            ranks = event_ranks if rank != traced and theirs == event.ranks and event_ranks is not None else event.ranks
            # As large as the share of the optimizer's state makes it, which the ranks of a group have alike.
            if event.role == "sum of shares" and not compares(ranks):
                continue
            peer = _peer_rank(event, traced, rank, ranks)
            steps.append(
                CommunicationCall(
                    rank,
                    event.name,
                    event.axis,
                    process_group_key(event.axis, ranks),
                    peer,
                    event.shape,
                    event.dtype,
                    event.where,
                    event.action,
                )
            )
    return RankCommunicationSequence(rank, tuple(steps))


def _peer_rank(event: StepEvent, traced: int, rank: int, ranks: tuple[int, ...]) -> int:
    """Return the peer of a rank whose trace is another's: at the same distance in its own group; the source of a broadcast is the same member."""
    if event.peer not in event.ranks:
        return event.peer
    place = event.ranks.index(event.peer)
    shift = ranks.index(rank) - event.ranks.index(traced) if event.kind in ("send", "receive") else 0
    return ranks[(place + shift) % len(ranks)]


def process_group_key(axis: str, ranks: tuple[int, ...]) -> Group:
    """Return a key of an axis' process group. Axes with equal ranks share one, except those created separately."""
    return axis if axis == "pp_backward" or axis.startswith("block") else "", ranks


def _ranks_covering_kind_pairs(lists: Mapping[str, RankLists], kind_of: Mapping[int, int]) -> list[int]:
    """Return ranks whose groups cover every pair of kinds that meet anywhere; of equal groups, the first."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    lines: dict[int, None] = {}
    for axis, groups in lists.items():
        for group in groups:
            kinds = axis, tuple(kind_of.get(rank, -1) for rank in group)
            if len(group) > 1 and kinds not in seen:
                seen.add(kinds)
                first = {kind: rank for kind, rank in reversed(list(zip(kinds[1], group, strict=True)))}
                lines |= dict.fromkeys(first.values())
    return list(lines)


# In order, and alike.


def _compare_collectives(lines: Mapping[int, RankCommunicationSequence]) -> tuple[list[CollectiveMismatch], int]:
    """Compare the members of each group with its first member. Return (mismatches, number of pairs compared)."""
    by_group: dict[Group, dict[int, list[CommunicationCall]]] = {}
    for rank, line in lines.items():
        for step in line.steps:
            if isinstance(step, CommunicationCall) and step.name not in ("send", "receive"):
                by_group.setdefault(step.group, {}).setdefault(rank, []).append(step)
    problems, count = [], 0
    for group, events in by_group.items():
        present = [rank for rank in group[1] if rank in lines]
        first = events.get(present[0], [])
        for rank in present[1:]:
            other = events.get(rank, [])
            count += min(len(first), len(other))
            problems += _first_mismatch_of_two_ranks(
                first,
                other,
                _collective_mismatch_reason,
                (present[0], rank),
                f"the group of ranks {_short_rank_list(group[1])}",
            )
    return problems, count


def _compare_sent_and_received(lines: Mapping[int, RankCommunicationSequence]) -> tuple[list[CollectiveMismatch], int]:
    """Compare both ends of all pairs of ranks that exchange messages. Return (mismatches, number of pairs compared)."""
    by_pair: dict[tuple[Group, int, int], dict[int, list[CommunicationCall]]] = {}
    for rank, line in lines.items():
        for step in line.steps:
            if isinstance(step, CommunicationCall) and step.name in ("send", "receive"):
                pair = min(rank, step.peer), max(rank, step.peer)
                by_pair.setdefault((step.group, *pair), {}).setdefault(rank, []).append(step)
    problems, count = [], 0
    for (_, low, high), messages in by_pair.items():
        if low in lines and high in lines:
            ends, where = (messages.get(low, []), messages.get(high, [])), f"between ranks {low} and {high}"
            count += min(map(len, ends))
            ways = (
                [("send", "receive"), ("receive", "send")]
                if not any(one.axis in _ALONE for one in (*ends[0], *ends[1]))
                else [(None, None)]
            )
            for way in ways:
                mine, other = (
                    [one for one in end if name in (None, one.name)] for end, name in zip(ends, way, strict=True)
                )
                problems += _first_mismatch_of_two_ranks(mine, other, _message_mismatch, (low, high), where)
    return problems, count


def _first_mismatch_of_two_ranks(
    first: Sequence[CommunicationCall],
    second: Sequence[CommunicationCall],
    unlike: Callable[[CommunicationCall, CommunicationCall], tuple[str, str] | None],
    ranks: tuple[int, int],
    where: str,
) -> list[CollectiveMismatch]:
    """Return the first mismatch of two ranks' sequences, or none. unlike: returns (kind, in words) of a mismatch, or
    None. where: of what, in words.
    """
    for number, (a, b) in enumerate(zip(first, second, strict=False), start=1):
        difference = unlike(a, b)
        if difference is not None:
            return [CollectiveMismatch(difference[0], f"number {number} of {where}: {difference[1]}", (a, b))]
    if len(first) == len(second):
        return []
    more, fewer = (0, 1) if len(first) > len(second) else (1, 0)
    longer, shorter = (first, second) if len(first) > len(second) else (second, first)
    return [
        CollectiveMismatch(
            "count",
            f"number {len(shorter) + 1} of {where}: rank {ranks[more]} comes to it and rank {ranks[fewer]} never does",
            (longer[len(shorter)], *shorter[-1:]),
        )
    ]


def _collective_mismatch_reason(a: CommunicationCall, b: CommunicationCall) -> tuple[str, str] | None:
    """Return (kind, in words) of why two ranks' collectives do not match; None if they do."""
    if a.name != b.name:
        return "operation", "different operations"
    if a.dtype != b.dtype:
        return "dtype", "different formats"
    # What an all-to-all brings from each rank differs by design; the rows that are sent have one width.
    if (a.shape[1:] != b.shape[1:]) if a.name == "all_to_all" else math.prod(a.shape) != math.prod(b.shape):
        return "shape", "different sizes"
    if a.name == "broadcast" and a.peer != b.peer:
        return "source", "different sources"
    return None


def _message_mismatch(a: CommunicationCall, b: CommunicationCall) -> tuple[str, str] | None:
    """Return (kind, in words) of why two ends do not belong to one message; None if they do."""
    if a.name == b.name:
        return "direction", f"both ends {'send' if a.name == 'send' else 'receive'}"
    if a.dtype != b.dtype:
        return "dtype", "different formats"
    return ("shape", "different shapes") if a.shape != b.shape else None


def _short_rank_list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


# Who waits for whom.


@dataclass(slots=True)
class _DeadlockSimulationRank:
    """A rank whose waiting is simulated. todo: its remaining steps: starts of messages, and waits."""

    rank: int
    todo: deque[tuple[str, CommunicationCall, int]]
    began: dict[tuple[Group, int, str], int] = field(default_factory=dict)  # ends of messages that it began
    came: dict[Group, int] = field(default_factory=dict)  # collectives that it came to
    stands: bool = False  # at a collective that it came to
    followers: list[_DeadlockSimulationRank] = field(default_factory=list)  # who waits for it


def _simulate_waiting(lines: Mapping[int, RankCommunicationSequence], *, overlap: bool) -> list[CollectiveMismatch]:
    """Advance all ranks as long as any can; return the cycle of ranks that wait for each other, if any remain."""
    players = {
        rank: _DeadlockSimulationRank(rank, deque(_blocking_steps(line, overlap=overlap)))
        for rank, line in lines.items()
    }
    ready = deque(players.values())
    while ready:
        player, further = ready.popleft(), False
        while player.todo:
            further |= _arrive_at_next_communication(player)
            awaited = _ranks_waited_for(player, players)
            if awaited:
                players[awaited[0]].followers.append(player)
                break
            player.stands, further = False, True
            player.todo.popleft()
        if further:  # who waited for this rank looks again
            ready.extend(player.followers)
            player.followers.clear()
    stuck = [rank for rank, player in players.items() if player.todo]
    return [_find_waiting_cycle(stuck[0], players)] if stuck else []


def _blocking_steps(line: RankCommunicationSequence, *, overlap: bool) -> Iterator[tuple[str, CommunicationCall, int]]:
    """Yield a rank's steps as (begin, through or meet; collective or message; its number among equal ones): a message
    begins, is waited for, or a collective is waited for, each wait where it blocks.
    """
    arriving: dict[str, list[tuple[CommunicationCall, int]]] = {}
    leaving: list[list[tuple[CommunicationCall, int]]] = [[], []]  # sends that began during this action, and before it
    together: list[tuple[CommunicationCall, int]] = []  # both ways at once: through before anything else
    numbers: dict[tuple[Group, int, str], int] = {}
    for step in line.steps:
        message = isinstance(step, CommunicationCall) and step.name in ("send", "receive")
        if isinstance(step, str) or not message or step.axis in _ALONE:
            yield from _wait_steps_of_messages(together)
            together = []
        if isinstance(step, str):
            yield from _wait_steps_of_messages(leaving[1])
            leaving = [[], leaving[0]]
            yield from _wait_steps_of_messages(one for name in step.split(TOGETHER) for one in arriving.pop(name, ()))
        elif not message:
            yield "meet", step, 0
        else:
            key = step.group, step.peer, step.name
            number = numbers[key] = numbers.get(key, 0) + 1
            if step.axis not in _ALONE:
                together.append((step, number))
                yield "begin", step, number
                continue
            yield from _wait_steps_of_messages(leaving[1])  # the action is over: what left before it has arrived
            leaving[1] = []
            yield "begin", step, number
            if not overlap:
                yield "through", step, number
            elif step.name == "send":
                leaving[0].append((step, number))
            else:
                arriving.setdefault(step.action, []).append((step, number))
    yield from _wait_steps_of_messages((*together, *leaving[1], *leaving[0], *chain.from_iterable(arriving.values())))


def _wait_steps_of_messages(
    messages: Iterable[tuple[CommunicationCall, int]],
) -> Iterator[tuple[str, CommunicationCall, int]]:
    """Yield the step that waits for each of these messages."""
    return (("through", message, number) for message, number in messages)


def _arrive_at_next_communication(player: _DeadlockSimulationRank) -> bool:
    """Arrive at the next step: start a message, or wait for others. Returns whether that changes anything for other ranks."""
    kind, meeting, number = player.todo[0]
    if kind == "begin":
        player.began[meeting.group, meeting.peer, meeting.name] = number
    if kind != "meet" or player.stands:
        return kind == "begin"
    player.came[meeting.group] = player.came.get(meeting.group, 0) + 1
    player.stands = True
    return True


def _ranks_waited_for(player: _DeadlockSimulationRank, players: Mapping[int, _DeadlockSimulationRank]) -> list[int]:
    """Return the ranks that a rank's next step waits for."""
    kind, meeting, number = player.todo[0]
    if kind == "begin":
        return []
    if kind == "meet":
        number = player.came.get(meeting.group, 0)
        return [
            rank
            for rank in meeting.group[1]
            if rank in players and rank != player.rank and players[rank].came.get(meeting.group, 0) < number
        ]
    answer = meeting.group, player.rank, "receive" if meeting.name == "send" else "send"
    peer = players.get(meeting.peer)
    return [] if peer is None or peer.began.get(answer, 0) >= number else [meeting.peer]


def _find_waiting_cycle(start: int, players: Mapping[int, _DeadlockSimulationRank]) -> CollectiveMismatch:
    """Return a cycle of ranks that wait for each other, found from a rank that cannot continue."""
    path = [start]
    while True:
        following = next(iter(_ranks_waited_for(players[path[-1]], players)))
        if following in path:
            circle = path[path.index(following) :]
            break
        path.append(following)
        if not players[following].todo:
            circle = path  # it waits for one that has ended
            break
    both = tuple(players[rank].todo[0][1] for rank in circle if players[rank].todo)
    return CollectiveMismatch(
        "waiting",
        f"{' waits for '.join(f'rank {rank}' for rank in (*circle, following))}, each at what it has begun:",
        both,
    )
