"""Whatever an environment does costs its own rollout, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.indexed import DataError
from megatron.rl.bank import read_rollout_bank
from megatron.rl.environments.base import Problem
from megatron.rl.environments.threads import run_in_thread
from megatron.training.state.step import train_step
from tests.helpers.policy import RL, EvenIds, trainer_of


class Odd(EvenIds):
    """One of four problems does what it is given: in its reward, or in `where`."""

    def __init__(self, deed: Callable[[], Any], where: str = "reward") -> None:
        self.deed, self.where = deed, where

    def problem(self, number: int) -> Problem:
        """As the base class says."""
        found = super().problem(number)
        if number % 4 == 1 and self.where == "whole prompt":
            return Problem(self.deed(), {"odd": False})
        if number % 4 == 1 and self.where in ("problem", "prompt"):
            return Problem(found.prompt + str(self.deed() or ""), {"odd": False})
        return Problem(found.prompt, {"odd": number % 4 == 1})

    def reward(self, problem: Problem, answer: str) -> float:
        """As the base class says."""
        if problem.facts["odd"] and self.where == "reward":
            return self.deed() or super().reward(problem, answer)
        return super().reward(problem, answer)

    async def play(self, problem: Problem, conversation: Any) -> float:
        """As the base class says."""
        conversation.add(problem.prompt)
        answer = await conversation.generate()
        if problem.facts["odd"] and self.where == "play":
            await self.deed()
        return await conversation.call(self.reward, problem, answer)


def raising(error: BaseException) -> Callable[[], Any]:
    """What raises it."""

    def deed() -> None:
        raise error

    return deed


async def sleep_for_ever() -> None:
    """Wait."""
    await asyncio.sleep(1e6)


def loop_for_ever() -> None:
    """Take the processor."""
    while True:
        pass


async def time_out_of_its_own() -> None:
    """Raise what a time limit of ours would."""
    async with asyncio.timeout(0.01) if sys.version_info >= (3, 11) else _Late():
        await asyncio.sleep(1.0)


class _Late:
    async def __aenter__(self) -> None:
        raise TimeoutError

    async def __aexit__(self, *_: Any) -> None:
        return None


class Wordless(Exception):
    """Its text raises an error of its own."""

    def __str__(self) -> str:
        raise RuntimeError


CASES: dict[str, tuple[Callable[[], Any], str, float, str]] = {
    "cancels": (raising(asyncio.CancelledError("mine")), "reward", 0.0, "CancelledError: mine"),
    "cancels in a thread": (raising(asyncio.CancelledError("mine")), "reward", 20.0, "CancelledError"),
    "exits": (lambda: sys.exit("enough"), "reward", 0.0, "SystemExit: enough"),
    "exits in a thread": (lambda: sys.exit("enough"), "reward", 20.0, "SystemExit: enough"),
    "stops": (raising(StopIteration("no more")), "reward", 20.0, "StopIteration: no more"),
    "times out by itself": (time_out_of_its_own, "play", 0.0, "TimeoutError"),
    "problem that raises": (raising(KeyError("x")), "problem", 0.0, "KeyError: 'x'"),
    "problem that hangs": (lambda: time.sleep(1e4), "problem", 3.0, "took longer than 3 s"),
    "play that hangs": (sleep_for_ever, "play", 3.0, "took longer than 3 s"),
    "half a surrogate pair": (lambda: " 1\ud83d", "prompt", 0.0, "ValueError"),
    "an error without a text": (raising(Wordless()), "reward", 0.0, "Wordless"),
    "a prompt that is no text": (lambda: 5, "whole prompt", 0.0, "TypeError"),
    "closes": (raising(GeneratorExit("mine")), "reward", 0.0, "GeneratorExit: mine"),
    "a huge reward": (lambda: 1e200, "reward", 0.0, "gave a reward of 1e+200"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_rollout_is_lost_and_the_round_is_trained_on(case: str, tmp_path: Path) -> None:
    deed, where, seconds, reason = CASES[case]
    rl = dataclasses.replace(RL, rl_rollout_seconds=seconds, rl_rollout_bank_dir=str(tmp_path), grpo_group_size=2)
    trainer, data = trainer_of(rl, global_batch_size=8)
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=Odd(deed, where)),)
    assert train_step(trainer, data).losses["reward"][1] == 6
    written = [one.rollout for one in read_rollout_bank(next(tmp_path.glob("round_*")))]
    assert [bool(one.problem) for one in written] == [one.number == 1 for one in written]
    assert all(reason in one.problem for one in written if one.problem), [one.problem for one in written]


def test_a_call_that_never_returns_is_ended_with_its_time() -> None:
    async def play() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(run_in_thread(loop_for_ever), 0.2)

    before = set(threading.enumerate())
    asyncio.run(play())
    deadline = time.monotonic() + 20
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, "it would take time from all later rounds"


def test_a_round_without_any_reward_ends_the_run(tmp_path: Path) -> None:
    trainer, data = trainer_of(RL)
    lost = Odd(raising(ConnectionError("no server at http://judge")), "reward")
    lost.problem = lambda number: Problem("1 2", {"odd": True})  # type: ignore[method-assign]
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=lost),)
    with pytest.raises(DataError, match="all 16 rollouts of round 0 failed.*no server at http://judge"):
        train_step(trainer, data)


def stay_for_ever(ended: threading.Event) -> Callable[[], Any]:
    """A coroutine function that no cancellation ends, until the test does."""

    async def deed() -> None:
        while not ended.is_set():
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.05)

    return deed


@pytest.mark.parametrize("kind", ["a thread", "a coroutine"])
def test_what_goes_on_after_its_time_holds_up_no_round(kind: str, tmp_path: Path) -> None:
    ended = threading.Event()
    deed = stay_for_ever(ended) if kind == "a coroutine" else lambda: asyncio.to_thread(ended.wait, 300)
    rl = dataclasses.replace(RL, rl_rollout_seconds=3.0, rl_rollout_bank_dir=str(tmp_path), grpo_group_size=2)
    trainer, data = trainer_of(rl, global_batch_size=8)
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=Odd(deed, "play")),)
    begun = time.monotonic()
    try:
        assert train_step(trainer, data).losses["reward"][1] == 6
        assert time.monotonic() - begun < 100
    finally:
        ended.set()
