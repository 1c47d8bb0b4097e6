"""Mistakes that policy training is known for, made on purpose: each must be seen by a check of this folder.

A check is a short run whose figures must be those of an independent computation: log-probabilities by a plain forward pass over the ids that
were sampled, advantages and losses by the formulas written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.core.parallel import collectives
from megatron.inference.engine import Engine
from megatron.rl import advantages as advantages_module
from megatron.rl import losses as losses_module
from megatron.rl import policy_data, rollout_batches, rollouts
from megatron.rl.environments.base import Environment
from megatron.rl.policy_step import PolicyLossFunction
from megatron.rl.rollout_queue import RolloutQueue
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.step import train_step
from tests.helpers.policy import RL, EvenIds, trainer_of
from tests.unit.rl.test_policy import LLAMA

KL = {"grpo_kl_beta": 0.1}


def plain_logprobs(trainer: Any, ids: tuple[int, ...]) -> list[float]:
    """Log-probabilities of all ids but the first, by one plain forward pass and a softmax over the whole vocabulary."""
    (stage,) = trainer.stages
    with torch.no_grad(), evaluation_mode(trainer):
        logits = stage(ids=torch.tensor([ids[:-1]]))[:, 0, : trainer.run.config.model.true_vocab_size]
        return [0.0, *logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()]


def problems(twice: bool = False) -> list[str]:
    """What is wrong with two optimizer steps, one round each or both in one round, by computations that share nothing with the product."""
    rl = dataclasses.replace(RL, grpo_iterations=2 if twice else 1)
    trainer, data = trainer_of(rl, **LLAMA, clip_grad=0.0)
    found: list[str] = []
    for step in range(2):
        before = {}
        data.prepare_step(16)  # so that the rollouts are there before the step
        assert data.rollouts is not None
        trained = data.rollouts
        for one in trained:
            before[one.rollout.ids] = plain_logprobs(trainer, one.rollout.ids)
        if step == 0 or not twice:
            first = before
            found += rollout_problems(trained, before)
        expected = expected_loss(trained, before, first)
        result = train_step(trainer, data)
        total, count = result.losses["rl loss"].tolist()
        if abs(total / count - expected) > 1e-9:
            found.append(f"loss of step {step}: {total / count}, expected {expected}")
        if count != sum(one.rollout.num_sampled for one in trained):
            found.append(f"{count} tokens are trained on")
    return found


def rollout_problems(trained: Any, before: dict[tuple[int, ...], list[float]]) -> Iterator[str]:
    """What is wrong with the rollouts of a round."""
    for one in trained:
        rollout = one.rollout
        for known, value, logprob in zip(rollout.sampled, before[rollout.ids], rollout.logprobs, strict=True):
            if known and abs(value - logprob) > 1e-10:
                yield f"a token was sampled with {logprob}, and a plain pass says {value}"
                break
        end = 48  # of the tokenizer of `trainer_of`
        if rollout.finished and not (rollout.ids[-1] == end and rollout.sampled[-1]):
            yield "the token that ends an answer is not trained on"
        if rollout.reward != reward_of(rollout):
            yield f"a reward is {rollout.reward}"
    size = RL.grpo_group_size
    for start in range(0, len(trained), size):
        rewards = np.array([one.rollout.reward for one in trained[start : start + size]])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        if not np.allclose([one.advantage for one in trained[start : start + size]], expected, rtol=0, atol=1e-12):
            yield "advantages are not those of the group"
        if len({one.rollout.group for one in trained[start : start + size]}) > 1:
            yield "a group is split"


def reward_of(rollout: Any) -> float:
    """The reward of `EvenIds`, from the ids."""
    ids = [number for number, known in zip(rollout.ids, rollout.sampled, strict=True) if known and number != 48]
    return sum(number % 2 == 0 for number in ids) / max(1, len(ids))


def expected_loss(
    trained: Any, now: dict[tuple[int, ...], list[float]], old: dict[tuple[int, ...], list[float]]
) -> float:
    """GRPO's loss times the mean number of tokens, which are as many as the answers' weights sum to: a mean over tokens of an answer, then over answers."""
    answers = []
    for one in trained:
        terms = []
        for place, known in enumerate(one.rollout.sampled):
            if known:
                ratio = np.exp(now[one.rollout.ids][place] - old[one.rollout.ids][place])
                terms.append(-min(ratio * one.advantage, np.clip(ratio, 0.8, 1.28) * one.advantage))
        answers.append(np.mean(terms or [0.0]))
    return float(np.mean(answers))


def test_the_checks_find_nothing_wrong() -> None:
    assert problems() == [] and problems(twice=True) == []


Patch = tuple[Any, str, Any]
_advantages, _rows, _play_one = (
    advantages_module.answer_advantages,
    rollout_batches.build_training_rows,
    rollouts._play_one_rollout,
)
_task = RolloutQueue._make_task


def _over_the_batch(rewards: torch.Tensor, baseline: Any, **more: Any) -> torch.Tensor:
    return _advantages(rewards.reshape(1, -1), baseline, **more).view_as(rewards)


def _of_other_groups(rewards: torch.Tensor, baseline: Any, **more: Any) -> torch.Tensor:
    return _advantages(rewards.t().contiguous().view_as(rewards), baseline, **more)


def _of_half_groups(rewards: torch.Tensor, baseline: Any, **more: Any) -> torch.Tensor:
    return _advantages(rewards.reshape(-1, rewards.shape[1] // 2), baseline, **more).view_as(rewards)  # of two ranks


def _split_groups(queue: RolloutQueue, number: int, place: int, draft: Any) -> Any:
    size = RL.grpo_group_size  # a rank that takes every other answer, with groups of those next to each other
    return _task(queue, number, place // size + place % size * RL.grpo_prompts_per_step, draft)


def _shifted_masks(*args: Any, **more: Any) -> Any:
    rows = _rows(*args, **more)
    return rows | {
        "loss_mask": np.roll(rows["loss_mask"], 1, axis=1),
        "rl_weight": np.roll(rows["rl_weight"], 1, axis=1),
    }


def _without_the_end(limits: Any) -> Callable[..., Any]:
    async def play(*args: Any, **more: Any) -> Any:
        one = await _play_one(*args, **more)
        if not one.finished:
            return one
        return dataclasses.replace(one, sampled=(*one.sampled[:-1], False), logprobs=(*one.logprobs[:-1], 0.0))

    return play


async def _reward_of_a_cut(*args: Any, **more: Any) -> Any:
    one = await _play_one(*args, **more)
    return dataclasses.replace(one, reward=1.0) if not one.finished else one


def _ratio_of_now(self: Any, logprobs: Any, old: Any, mask: Any, answers: Any) -> Any:
    return losses_module.policy_ratio(logprobs, logprobs.detach())


DEFECTS: dict[str, tuple[Patch, bool]] = {
    "advantages over the batch instead of the group": (
        (advantages_module, "answer_advantages", _over_the_batch),
        False,
    ),
    "a group split over two ranks": ((advantages_module, "answer_advantages", _of_half_groups), False),
    "answers counted to other prompts": ((advantages_module, "answer_advantages", _of_other_groups), False),
    "masks shifted by one": ((rollout_batches, "build_training_rows", _shifted_masks), False),
    "the end token untrained": ((rollouts, "_play_one_rollout", _without_the_end(None)), False),
    "truncated answers rewarded": ((rollouts, "_play_one_rollout", _reward_of_a_cut), False),
    "old log-probabilities taken after the first update": (
        (PolicyLossFunction, "_importance_ratio", _ratio_of_now),
        True,
    ),
    "a deviation of zero divides to infinity": ((advantages_module, "STD_EPSILON", 0.0), False),
    "a group split over prompts": ((RolloutQueue, "_make_task", _split_groups), False),
    "every token weighs the same": (
        (rollout_batches, "_token_weights", lambda lengths, average, limit: [1.0] * len(lengths)),
        False,
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(name: str) -> None:
    (place, attribute, wrong), twice = DEFECTS[name]
    with patch.object(place, attribute, wrong):
        assert problems(twice=twice)


def test_a_prefix_cache_of_old_weights_would_be_seen() -> None:
    """The engine lives for one round, so that no keys of earlier weights are left. One that is kept gives other log-probabilities."""
    trainer, data = trainer_of(RL, **LLAMA, lr=3e-2, max_position_embeddings=64, seq_length=64)
    engines: dict[int, Engine] = {}

    class Kept(Engine):
        """The first engine, for ever."""

        def __new__(cls, stages: Any, *args: Any, **more: Any) -> Any:
            return engines[0] if engines else super().__new__(cls)

        def __init__(self, stages: Any, *args: Any, **more: Any) -> None:
            if not engines:
                super().__init__(stages, *args, **more)
                engines[0] = self

    class LongPrompts(EvenIds):
        """Prompts that fill blocks of the cache, the same in every round."""

        def problem(self, number: int) -> Any:
            return dataclasses.replace(super().problem(0), prompt=" ".join(str(place % 48) for place in range(40)))

    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=LongPrompts()),)
    for kept in (False, True):
        with patch.object(rollouts, "Engine", Kept if kept else Engine):
            differences = []
            for _ in range(3):
                total, count = train_step(trainer, data).losses["generation logprob difference"].tolist()
                differences.append(total / count)
        assert (max(differences) > 1e-6) == kept, differences


def test_the_sign_of_the_divergence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no advantage, only the divergence moves the policy: towards the reference, or with a wrong sign away from it."""

    class Even(Environment):
        """Nothing is better than anything."""

        def problem(self, number: int) -> Any:
            return EvenIds().problem(number)

        def reward(self, problem: Any, answer: str) -> float:
            return 0.0

    kl_to_reference = losses_module.kl_to_reference

    def distance(sign: float) -> tuple[float, float]:
        monkeypatch.setattr(losses_module, "kl_to_reference", lambda a, b, kind: sign * kl_to_reference(a, b, kind))
        rl = dataclasses.replace(RL, grpo_kl_beta=1.0, rl_reference="unused")
        other, _ = trainer_of(RL, **LLAMA, seed=99)
        with patch.object(policy_data, "load_reference_policy", lambda trainer, folder: None):
            trainer, data = trainer_of(rl, **LLAMA, lr=3e-3)
        data._reference = dataclasses.replace(trainer, stages=other.stages, parallels=[], hooks=[], scripts={})
        data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=Even()),)
        found = []
        for _ in range(12):
            pair = train_step(trainer, data).losses["kl to reference"]
            total, count = collectives.all_reduce(pair, trainer.run.mesh.world).tolist()
            found.append(sign * total / count)
        return found[0], found[-1]

    towards, away = distance(1.0), distance(-1.0)
    assert towards[1] < 0.8 * towards[0] and away[1] > away[0]
