"""Rollouts that are sampled rounds ahead of their training, whole or in parts, and go on where a run that ended abruptly was."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.datasets.indexed import DataError
from megatron.rl.bank import read_json_lines_gz, remove_expired_bank_files
from megatron.rl.environments.base import Conversation, Problem
from megatron.rl.policy_data import PolicyData, offload_to_host
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers.policy import RL, EvenIds, TwoTurns, train_policy_here, trainer_of
from tests.helpers.training import assemble, held_weights
from tests.helpers.world import Worlds
from tests.unit.rl.test_planted_defects import plain_logprobs
from tests.unit.rl.test_policy import LLAMA

ROOT = Path(__file__).resolve().parents[3]
AHEAD: dict[str, Any] = {"rl_generation_lag": 2}
PARTIAL: dict[str, Any] = {**AHEAD, "rl_partial_rollouts": True, "rl_max_inflight_requests": 20}


def versions_of_rounds(trainer: Trainer, data: PolicyData, rounds: int) -> list[set[int]]:
    """The versions of all tokens of each round."""
    result = []
    for _ in range(rounds):
        train_step(trainer, data)
        assert data.rollouts is not None
        result.append({version for one in data.rollouts for version in one.rollout.versions if version >= 0})
    return result


def test_a_lag_of_two_rounds_trains_on_rollouts_of_the_weights_two_rounds_before() -> None:
    trainer, data = trainer_of(dataclasses.replace(RL, **AHEAD), **LLAMA)
    assert versions_of_rounds(trainer, data, 5) == [{0}, {0}, {0}, {1}, {2}]
    assert data.batch_metrics()["policy lag"][0] / data.batch_metrics()["policy lag"][1] == 2.0


def test_parts_of_a_rollout_have_the_log_probabilities_of_the_weights_that_sampled_them() -> None:
    rl = dataclasses.replace(RL, **PARTIAL, grpo_group_size=4)
    trainer, data = trainer_of(rl, **LLAMA, lr=3e-2)
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=TwoTurns()),)
    states: list[list[torch.Tensor]] = []
    mixed = 0
    for iteration in range(4):
        states.append([param.detach().clone() for param in trainer.stages[0].parameters()])
        train_step(trainer, data)
        assert data.rollouts is not None
        latest = [param.detach().clone() for param in trainer.stages[0].parameters()]
        for one in data.rollouts:
            versions = {version for version in one.rollout.versions if version >= 0}
            assert all(iteration - 2 <= version <= iteration for version in versions)
            mixed += len(versions) > 1
            for version in versions:
                for param, value in zip(trainer.stages[0].parameters(), states[version], strict=True):
                    param.data.copy_(value)
                plain = plain_logprobs(trainer, one.rollout.ids)
                for place, sampled_by in enumerate(one.rollout.versions):
                    if sampled_by == version:
                        assert abs(plain[place] - one.rollout.logprobs[place]) < 1e-10
        for param, value in zip(trainer.stages[0].parameters(), latest, strict=True):
            param.data.copy_(value)
    assert mixed, "some rollouts were paused"


@pytest.mark.parametrize("extra", [AHEAD, PARTIAL], ids=["ahead", "partial"])
def test_a_run_that_is_resumed_goes_on_with_what_was_ahead(tmp_path: Path, extra: dict[str, Any]) -> None:
    rl = dataclasses.replace(RL, **extra, grpo_iterations=2, rl_rollout_bank_dir=str(tmp_path / "bank"))
    changes = {**LLAMA, "save": str(tmp_path / "save")}
    first, data = trainer_of(rl, **changes)
    checkpoint = Checkpointer(first)
    for iteration in range(1, 8):
        train_step(first, data)
        if iteration in (4, 5):  # between two rounds, and within one
            checkpoint.save()
    expected = [value.clone() for *_, value in held_weights(first)]
    for iteration in (4, 5):
        again, resumed = trainer_of(rl, **changes, load=str(tmp_path / "save"), ckpt_step=iteration)
        Checkpointer(again).resume()
        for _ in range(iteration, 7):
            train_step(again, resumed)
        assert all(torch.equal(a, b) for a, (*_, b) in zip(expected, held_weights(again), strict=True))


def test_without_what_was_ahead_it_is_sampled_anew_and_damaged_files_are_refused(tmp_path: Path) -> None:
    rl = dataclasses.replace(RL, **AHEAD, rl_rollout_bank_dir=str(tmp_path))
    trainer, data = trainer_of(rl)
    train_step(trainer, data)
    data.close()
    assert len(read_json_lines_gz(tmp_path / "ahead_0000000.jsonl.gz")) == 2 * RL.rollouts_per_round
    (tmp_path / "ahead_0000000.jsonl.gz").unlink()
    assert versions_of_rounds(trainer, data, 1) == [{1}]
    data.close()
    (tmp_path / "ahead_0000001.jsonl.gz").write_bytes(b"not compressed")
    with pytest.raises(DataError, match="cannot be read"):
        train_step(trainer, data)


def test_what_was_ahead_goes_with_the_checkpoints_that_need_it(tmp_path: Path) -> None:
    rl = dataclasses.replace(RL, **AHEAD, grpo_iterations=2, rl_rollout_bank_dir=str(tmp_path / "bank"))
    trainer, data = trainer_of(rl, save=str(tmp_path / "save"), save_keep_last=1)
    checkpoint = Checkpointer(trainer)

    def ahead() -> list[int]:
        return sorted(int(file.name[6:13]) for file in (tmp_path / "bank").glob("ahead_*"))

    def train(steps: int) -> None:
        for _ in range(steps):
            train_step(trainer, data)

    train(4)
    assert ahead() == [0, 2], "nothing is saved yet"
    checkpoint.save()  # of iteration 4: it goes on with what was ahead of round 2, and makes that of 4
    train(6)
    assert ahead() == [2, 4, 6, 8]
    checkpoint.save()  # of iteration 10
    train(1)
    assert ahead() == [8, 10]
    assert len(list((tmp_path / "bank").glob("round_*"))) == 6, "rounds are the log"
    again, resumed = trainer_of(rl, load=str(tmp_path / "save"), save=str(tmp_path / "save"))
    Checkpointer(again).resume()
    train_step(again, resumed)
    assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(held_weights(trainer), held_weights(again), strict=True))


def test_a_bank_that_is_too_large_loses_its_oldest_rounds_but_none_that_a_checkpoint_needs(tmp_path: Path) -> None:
    def fill() -> None:
        for begin in range(0, 12, 3):
            (tmp_path / f"round_{begin:07d}.jsonl.gz").write_bytes(b"x" * 100)

    def left(saved: list[int] | None, limit: int) -> tuple[list[int], str]:
        fill()
        trouble = remove_expired_bank_files(tmp_path, first=9, steps=3, saved=saved, max_bytes=limit)
        return sorted(int(file.name[6:13]) for file in tmp_path.glob("round_*")), trouble

    assert left([9], 0) == ([0, 3, 6, 9], "")
    assert left([9], 250) == ([6, 9], "")
    assert left([1, 9], 250) == ([0, 9], ""), "iteration 1 is in the middle of the round of 0"
    assert left(None, 1)[0] == [9] and "--rl-rollout-bank-max-bytes 1" in left(None, 1)[1]
    assert left([4], 1)[0] == [3, 6, 9], "a checkpoint may be on its way"


@pytest.mark.nightly
def test_a_lag_gives_the_same_training_under_two_layouts(world: Worlds) -> None:
    rl = {**AHEAD, "rl_inference_logprobs_is_correction": True}
    serial = train_policy_here(rl, LLAMA, 4)
    results = world(2).run(train_policy_here, rl, {**LLAMA, "tensor_model_parallel_size": 2}, 4)
    assert [one.ids for one in results[0][3]] == [one.ids for one in serial[3]]
    weights, reference = assemble([[held for one in results for held in one[2]]]), assemble([serial[2]])
    for name, weight in reference.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-8, atol=1e-10, msg=name)


class Hanging(EvenIds):
    """Problems with two ids never answer, one kind asleep in the loop, the other busy in a function."""

    def reward(self, problem: Problem, answer: str) -> float:
        """As the base class says, or after a long time."""
        if len(problem.prompt.split()) == 2:
            import time

            time.sleep(3600)
        return super().reward(problem, answer)

    async def play(self, problem: Problem, conversation: Conversation) -> float:
        """As the base class says, or never."""
        conversation.add(problem.prompt)
        answer = await conversation.generate()
        if len(problem.prompt.split()) == 3:
            await asyncio.sleep(3600)
        return float(await conversation.call(self.reward, problem, answer))


def test_an_environment_that_hangs_costs_its_rollouts_and_is_counted() -> None:
    trainer, data = trainer_of(dataclasses.replace(RL, rl_rollout_seconds=1.0))
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=Hanging()),)
    train_step(trainer, data)
    assert data.rollouts is not None
    failed = [one.rollout for one in data.rollouts if one.rollout.problem]
    assert {len(one.prompt.split()) for one in failed} == {2, 3} and len(failed) < len(data.rollouts)
    assert all("took longer than 1 s" in one.problem and one.num_sampled == 0 for one in failed)


KILLED = """
    import dataclasses, os, signal, sys
    from megatron.training.checkpoint.checkpointing import Checkpointer
    from megatron.training.state.step import train_step
    from tests.helpers.policy import RL, EvenIds, trainer_of

    class Fatal(EvenIds):
        def reward(self, problem, answer):
            if trainer.run.progress.iteration == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().reward(problem, answer)

    rl = dataclasses.replace(RL, rl_generation_lag=1, rl_partial_rollouts=True, rl_rollout_bank_dir=sys.argv[1] + "/bank")
    trainer, data = trainer_of(rl, save=sys.argv[1] + "/save")
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=Fatal()),)
    checkpoint = Checkpointer(trainer)
    while True:
        train_step(trainer, data)
        checkpoint.save()
"""


def test_a_run_killed_while_it_generates_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "MEGATRON_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    rl = dataclasses.replace(RL, rl_generation_lag=1, rl_partial_rollouts=True)
    whole, data = trainer_of(rl)
    for _ in range(4):
        train_step(whole, data)
    again, resumed = trainer_of(
        dataclasses.replace(rl, rl_rollout_bank_dir=str(tmp_path / "bank")), load=str(tmp_path / "save")
    )
    Checkpointer(again).resume()
    assert again.run.progress.iteration == 2
    for _ in range(2):
        train_step(again, resumed)
    assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(held_weights(whole), held_weights(again), strict=True))


def test_storages_that_are_offloaded_come_back_as_they_were() -> None:
    whole = torch.randn(8)
    parts, expected = [whole[:3], whole[3:], torch.zeros(0)], whole.clone()
    with offload_to_host(parts) as size:
        assert size == 32 and whole.untyped_storage().nbytes() == 0
    assert torch.equal(whole, expected)
