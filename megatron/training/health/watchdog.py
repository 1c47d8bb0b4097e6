"""Ranks that wait for each other for ever, or for one that is gone: who they are, and where everybody stands.

Every rank has a thread that looks at its notes (core/parallel/flight_recorder.py). Now and then it leaves a pulse in the launcher's
store. When nothing has moved for --hang-timeout-minutes, or a connection breaks, the first rank that sees it calls the
roll:

    caller    "nothing moves": every thread answers with its place, its last collective and how many it has begun of each
              group; it writes the stacks of its rank to standard error and to the rank's file
    caller    waits a few seconds, lists the answers, and of who is silent the last pulse; names those that the others
              wait for; makes that the first failure, of which all ranks die (entry.py)

A rank that is stopped or gone cannot speak, but is missed. A rank that has begun fewer collectives of a group than its other
ranks, and waits for nobody itself, is the one that they wait for.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from torch import distributed as dist

from megatron.training.health.failures import (
    append_failure_file,
    failure_folder,
    own_last_collectives_text,
    python_stacks,
    rank_and_node_text,
    ranks_text,
)
from megatron.training.launch.launch_info import LaunchInfo, read_launch_info
from megatron.training.launch.rendezvous import FIRST_FAILURE, RendezvousStore
from megatron.training.state.run import RunContext

_LOOK_EVERY = 1.0  # seconds
# How long answers are waited for: where a connection broke, all ranks are to end soon.
_PATIENCE = {"hang": 5.0, "lost": 2.5}
_PULSES = 200  # a second, of all ranks together
_SHARE = 0.9  # of --distributed-timeout-minutes: before the transports give up, and with less to say
_SHOWN = 64  # ranks in the message; the caller's file has all
_ROLL = "roll-call"
# What the transports say when another rank is gone.
LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)


class RankLostError(Exception):
    """Another rank is gone without reporting an error."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank is. counts: group (its axis and ranks) -> collectives begun; group: of the last collective. at:
    seconds since the epoch. where: position in the step. last: last collective, in words.
    """

    node: str
    at: float
    where: str
    last: str
    group: str
    counts: Mapping[str, int]

    def position_text(self) -> str:
        """Say where the rank is and what its last collective was."""
        return f"in {self.where}" + (f"; last collective {self.last}" if self.last else "")


class HangDetector:
    """Context manager whose thread detects a hang of a run. Does nothing without a launcher's store, or with one rank."""

    def __init__(self, run: RunContext, place: LaunchInfo | None = None) -> None:
        self.run, self.flight_recorder = run, run.mesh.flight_recorder
        self.place = place or read_launch_info()
        faults, longest = run.config.faults, run.config.parallel.distributed_timeout_minutes
        minutes = longest * _SHARE if faults.hang_timeout_minutes is None else faults.hang_timeout_minutes
        self.limit = 60.0 * minutes
        # Reading a checkpoint or building an index takes its time: at the start, only what the transports allow counts.
        self.limit_at_start = max(self.limit, 60.0 * longest * _SHARE)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered = False

    def __enter__(self) -> HangDetector:
        board = RendezvousStore.connect(self.place)
        if board is not None:
            self._thread = threading.Thread(target=self._watch_loop, args=(board,), name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Say who is gone, if that is why the run ends here."""
        problem = ""
        if isinstance(error, (RuntimeError, dist.DistError)) and LOST.search(str(error)):
            problem = self._lost_ranks_text()
            # The sender of a signal knows already: there is nothing to wait for (entry.py).
            if not problem and self.run.ending.signal:
                problem = f"{self.run.ending.signal} came, and a connection to another rank broke"
        self._over.set()
        if self._thread is not None:  # a thread that came back from the store while Python ends would abort the process
            self._thread.join(_PATIENCE["lost"])
        if problem:
            raise RankLostError(problem) from error

    def _lost_ranks_text(self) -> str:
        """Ask all ranks for their status; say which do not answer, "" if all do or another rank reports it."""
        board = RendezvousStore.connect(self.place) if self._thread is not None else None
        if board is None or board.read(FIRST_FAILURE) is not None:
            return ""
        if not board.write_if_absent(_ROLL, f"{self.place.rank}: a connection broke"):
            deadline = time.monotonic() + _PATIENCE["lost"] + _LOOK_EVERY
            while time.monotonic() < deadline and board.read(FIRST_FAILURE) is None:  # another rank asks, and will tell
                time.sleep(0.1)
            return ""
        answers = self._collect_answers(board, "lost")
        silent = [rank for rank in range(self.place.size) if rank not in answers]
        if not silent:
            return ""
        verb = "is" if len(silent) == 1 else "are"
        lines = [f"{ranks_text(silent, _SHOWN)} {verb} gone, and the others cannot go on"]
        lines += [f"rank {rank} {self._last_seen_text(board, rank)}" for rank in silent[:_SHOWN]]
        lines.append(f"{rank_and_node_text(self.place.rank)} noticed it {self._own_status().position_text()}")
        return "\n  ".join(lines)

    def _watch_loop(self, board: RendezvousStore) -> None:
        """Thread: write this rank's heartbeat, answer status requests, and report a hang."""
        moves, since, pulse = -1, time.monotonic(), time.monotonic()
        # At once: a rank may be gone before the first look.
        board.write(f"pulse/{self.place.rank}", self._status_json())
        while not self._over.wait(_LOOK_EVERY):
            now = time.monotonic()
            if self.flight_recorder.num_events != moves:
                moves, since = self.flight_recorder.num_events, now
            if now - pulse >= self.place.size / _PULSES:
                pulse = now
                board.write(f"pulse/{self.place.rank}", self._status_json())
            if (failed := board.read(FIRST_FAILURE)) is not None:  # of which this rank dies soon, wherever it is
                reason = f"first failure: {failed.splitlines()[0]}"
                self.run.run_log.add("end", reason=reason, iteration=self.run.progress.iteration, failed=True)
            if not self._answered and board.read(_ROLL) is not None:
                self._report_status(board)
            limit = self.limit if self.flight_recorder.iteration else self.limit_at_start
            if self.limit and now - since > limit and board.write_if_absent(_ROLL, f"{self.place.rank}: nothing moves"):
                self._report_status(board)
                self._report_hang(board, now - since)

    def _status_json(self) -> str:
        """Return this rank's `RankStatus` fields as a JSON list."""
        return json.dumps(astuple(self._own_status()))

    def _own_status(self) -> RankStatus:
        flight_recorder = self.flight_recorder
        counts = {f"{axis} {ranks}": count for (axis, ranks), count in list(flight_recorder.counts.items())}
        last, group = flight_recorder.last_collectives(), flight_recorder.last_collective_group()
        where, words = flight_recorder.current_position_text(), last[0] if last else ""
        return RankStatus(socket.gethostname(), time.time(), where, words, f"{group[0]} {group[1]}", counts)

    def _report_status(self, board: RendezvousStore) -> None:
        """Write this rank's status to the store, and its stacks to stderr and the failure file."""
        self._answered = True
        board.write(f"answer/{self.place.rank}", self._status_json())
        text = f"{rank_and_node_text(self.place.rank)} is in {self.flight_recorder.current_position_text()}\n{own_last_collectives_text(self.flight_recorder)}\n{python_stacks()}"
        append_failure_file(failure_folder(self.run.config), self.place.rank, text)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def _collect_answers(self, board: RendezvousStore, why: str) -> dict[int, RankStatus]:
        """Return the status of each rank that answers in time. why: hang or lost, which says how long to wait."""
        answers: dict[int, RankStatus] = {}
        deadline = time.monotonic() + _PATIENCE[why]
        while len(answers) < self.place.size and time.monotonic() < deadline:
            for rank in range(self.place.size):
                text = None if rank in answers else board.read(f"answer/{rank}")
                if text is not None and (answer := _parse_rank_status(text)) is not None:
                    answers[rank] = answer
            time.sleep(0.1)
        return answers

    def _last_seen_text(self, board: RendezvousStore, rank: int) -> str:
        """Say when, and where in the step, a rank wrote its last heartbeat."""
        text = board.read(f"pulse/{rank}")
        pulse = None if text is None else _parse_rank_status(text)
        if pulse is None:
            return "was never seen"
        return (
            f"was last seen on node {pulse.node} {max(0.0, time.time() - pulse.at):.0f} s ago, {pulse.position_text()}"
        )

    def _report_hang(self, board: RendezvousStore, seconds: float) -> None:
        """Write where all ranks are to stderr and the failure file, and make it the first failure: all ranks die."""
        answers = self._collect_answers(board, "hang")
        lines = [
            f"rank {rank} on node {answers[rank].node} {answers[rank].position_text()}"
            if rank in answers
            else f"rank {rank} DOES NOT ANSWER: it {self._last_seen_text(board, rank)}"
            for rank in range(self.place.size)
        ]
        awaited = blocking_ranks(answers, self.place.size)
        head = (
            f"{rank_and_node_text(self.place.rank)} has not moved for {seconds:.0f} s (--hang-timeout-minutes {self.limit / 60:g}); "
            + (
                f"the others wait for {ranks_text(awaited, _SHOWN)}"
                if awaited
                else "all ranks stand still, and none waits for another"
            )
        )
        append_failure_file(failure_folder(self.run.config), self.place.rank, "\n  ".join([head, *lines]))
        awaited_first = sorted(range(len(lines)), key=lambda rank: rank not in awaited)[:_SHOWN]
        text = "\n  ".join([head, *(lines[rank] for rank in sorted(awaited_first))])
        sys.stderr.write(f"HANG: {text}\n")
        sys.stderr.flush()
        board.write_if_absent(FIRST_FAILURE, f"HANG: {text}")


def _parse_rank_status(text: str) -> RankStatus | None:
    """Return the status in a text from the store; None if it is none of ours."""
    try:
        node, at, where, last, group, counts = json.loads(text)
        begun = {str(name): int(count) for name, count in counts.items()}
        return RankStatus(str(node), float(at), str(where), str(last), str(group), begun)
    except (ValueError, TypeError, AttributeError):
        return None


def blocking_ranks(answers: Mapping[int, RankStatus], size: int) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody: silent ones, and those late in their group."""
    late: dict[int, set[int]] = {}
    for rank, answer in answers.items():
        members = [int(word) for word in re.findall(r"\d+", answer.group.partition(" ")[2])]
        begun = answer.counts.get(answer.group, 0)
        late[rank] = {
            other for other in members if other not in answers or answers[other].counts.get(answer.group, 0) < begun
        }
    silent = [rank for rank in range(size) if rank not in answers]
    return sorted({*silent, *(other for others in late.values() for other in others if not late.get(other))})
