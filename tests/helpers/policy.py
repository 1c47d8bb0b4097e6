"""Reinforcement learning of a tiny network under any layout, with an environment that needs no text."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron.core.parallel import collectives
from megatron.core.tokenizers.build import NullTokenizer
from megatron.rl.environments.base import Conversation, Environment, Problem
from megatron.rl.policy_data import PolicyData
from megatron.rl.policy_step import PolicyForwardStep, policy_model_provider
from megatron.rl.rollouts import Rollout
from megatron.rl.settings import RLConfig
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer, build_trainer
from tests.helpers import tiny
from tests.helpers.training import Held, held_weights

RL = RLConfig(
    langrl_env_config="tests/helpers/policy.yaml",
    grpo_prompts_per_step=4,
    grpo_group_size=4,
    grpo_iterations=1,
    grpo_clamp_eps_lower=0.2,
    grpo_clamp_eps_upper=0.28,
    grpo_kl_beta=0.0,
    rl_max_new_tokens=6,
    rl_prompts_per_eval=0,
)
BASE: dict[str, Any] = {"fp64": True, "global_batch_size": 16, "micro_batch_size": 1, "eval_iters": 0, "lr": 1e-3}
PACKED: dict[str, Any] = {"reset_attention_mask": True, "reset_position_ids": True}


class EvenIds(Environment):
    """The reward is the share of even ids among those sampled. Prompts have one to three ids."""

    def problem(self, number: int) -> Problem:
        """As the base class says."""
        return Problem(" ".join(str((7 * number + place) % 49) for place in range(1 + number % 3)))

    def reward(self, problem: Problem, answer: str) -> float:
        """As the base class says."""
        ids = [int(word) for word in answer.split()]
        return sum(number % 2 == 0 for number in ids) / max(1, len(ids))

    async def play(self, problem: Problem, conversation: Conversation) -> float:
        """One answer, which may be cut off."""
        conversation.add(problem.prompt)
        return self.reward(problem, await conversation.generate())


class Constant(EvenIds):
    """Every answer has the reward 1."""

    def reward(self, problem: Problem, answer: str) -> float:
        """1."""
        return 1.0


class Failing(EvenIds):
    """Every third problem raises."""

    def reward(self, problem: Problem, answer: str) -> float:
        """As the base class says, or nothing."""
        if len(problem.prompt.split()) == 3:
            raise RuntimeError("the judge is out")
        return super().reward(problem, answer)


class TwoTurns(EvenIds):
    """Two answers with a text of the environment between them."""

    async def play(self, problem: Problem, conversation: Conversation) -> float:
        """The second prompt follows from the first answer."""
        conversation.add(problem.prompt)
        first = await conversation.generate(num_tokens=3)
        conversation.add(" ".join(str(int(word) % 49) for word in first.split()[:2]) or "1")
        return self.reward(problem, await conversation.generate(num_tokens=3))


def trainer_of(rl: RLConfig, **changes: Any) -> tuple[Trainer, PolicyData]:
    """A tiny GPT in policy training on this process's ranks, and its data."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = tiny.config(world_size, **{**BASE, **(PACKED if rl.rl_use_sequence_packing else {}), **changes})
    run = dataclasses.replace(tiny.run_of(config), tokenizer=NullTokenizer(tiny.VOCABULARY - 1))
    trainer = build_trainer(run, policy_model_provider(rl), PolicyForwardStep(rl))
    return trainer, PolicyData(trainer, rl)


def train_policy_here(
    rl_changes: dict[str, Any], changes: dict[str, Any], steps: int
) -> tuple[list[dict[str, float]], list[float], Held, list[Rollout]]:
    """On every rank: train a policy; figures of each step, gradient norms, this rank's weights, and the last round's rollouts."""
    trainer, data = trainer_of(dataclasses.replace(RL, **rl_changes), **changes)
    figures, norms = [], []
    for _ in range(steps):
        step = train_step(trainer, data)
        figures.append({name: _mean(pair, trainer) for name, pair in step.losses.items()})
        norms.append(float(step.grad_norm or 0.0))
    for parallel in trainer.parallels:
        parallel.finish_gather()
    assert data.rollouts is not None
    return figures, norms, held_weights(trainer), [one.rollout for one in data.rollouts]


def _mean(pair: torch.Tensor, trainer: Trainer) -> float:
    total, count = collectives.all_reduce(pair.double(), trainer.run.mesh.world).tolist()
    return total / count if count else 0.0
