"""PPO with a critic: advantages and losses by their definitions, the same under every layout, saved and resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.parallel.spec import param_spec_of
from megatron.rl.advantages import gae_advantages_and_returns, whiten
from megatron.rl.losses import value_loss
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.step import train_step
from tests.helpers.policy import RL, train_policy_here, trainer_of
from tests.helpers.world import Worlds
from tests.unit.rl.test_planted_defects import plain_logprobs
from tests.unit.rl.test_policy import LAYOUTS, LLAMA, compare

PPO: dict[str, Any] = {"rl_algorithm": "ppo", "grpo_iterations": 2, "rl_gae_lambda": 0.9, "rl_discount": 0.97}


def test_generalized_advantages_are_the_weighted_mean_of_n_step_advantages() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    gamma, smoothing = 0.9, 0.8
    result, returns = gae_advantages_and_returns(rewards, values, torch.ones(3, 7), discount=gamma, smoothing=smoothing)
    for row in range(3):
        for t in range(
            7
        ):  # (1 - lambda) sum of lambda^(n-1) times the n-step advantage, the last of which takes the rest
            steps = []
            for n in range(1, 8 - t):
                total = sum(gamma**i * rewards[row, t + i] for i in range(n)) - values[row, t]
                steps.append(total + (gamma**n * values[row, t + n] if t + n < 7 else 0.0))
            weights = [(1 - smoothing) * smoothing**n for n in range(len(steps))]
            weights[-1] = smoothing ** (len(steps) - 1)
            expected = sum(weight * step for weight, step in zip(weights, steps))
            assert float(result[row, t]) == pytest.approx(float(expected), abs=1e-12)
    torch.testing.assert_close(returns, result + values)


def test_texts_of_the_environment_are_stepped_over_by_advantages() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 9.0, 1.0]]), torch.tensor([[0.5, 0.2, 7.0, 0.3]])
    gains, returns = gae_advantages_and_returns(
        rewards, values, torch.tensor([[1, 1, 0, 1]]), discount=1.0, smoothing=1.0
    )
    assert gains[0].tolist() == pytest.approx([0.5, 0.8, 0.0, 0.7]) and returns[0].tolist() == pytest.approx(
        [1, 1, 0, 1]
    )


def test_advantages_of_a_round_are_whitened_over_its_tokens() -> None:
    values = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    result = whiten(values, mask)
    chosen = result[mask.bool()]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-12) and float(chosen.var()) == pytest.approx(1, abs=1e-6)
    assert not result[~mask.bool()].any()


def test_the_value_loss_is_the_larger_of_the_clipped_and_the_plain_error() -> None:
    values = torch.tensor([1.0, 0.1], requires_grad=True)
    result = value_loss(values, torch.tensor([0.0, 0.0]), torch.tensor([2.0, 2.0]), clip=0.2)
    assert result.tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 1.9**2])
    assert torch.autograd.grad(result.sum(), values)[0].tolist() == pytest.approx([0.0, -1.9])
    assert value_loss(values, torch.zeros(2), torch.full((2,), 2.0), clip=0).tolist() == pytest.approx(
        [0.5, 0.5 * 1.9**2]
    )


def plain_values(trainer: Any, ids: tuple[int, ...]) -> list[float]:
    """The critic's values before all ids but the first."""
    with torch.no_grad(), evaluation_mode(trainer):
        return [0.0, *trainer.stages[0].critic(ids=torch.tensor([ids[:-1]]))[0].tolist()]


def test_the_loss_of_a_step_is_that_of_ppo_by_its_formulas() -> None:
    trainer, data = trainer_of(dataclasses.replace(RL, **PPO), **LLAMA, clip_grad=0.0, lr=3e-3)
    first: dict[str, dict[tuple[int, ...], list[float]]] = {}
    for _ in range(2):
        data.prepare_step(16)
        assert data.rollouts is not None
        now = {
            name: {one.rollout.ids: of(trainer, one.rollout.ids) for one in data.rollouts}
            for name, of in {"logprobs": plain_logprobs, "values": plain_values}.items()
        }
        first = first or now
        gains, places = [], []
        for one in data.rollouts:
            value = first["values"][one.rollout.ids]
            sampled = [place for place, known in enumerate(one.rollout.sampled) if known]
            later = 0.0
            for place, following in reversed([*zip(sampled, [*sampled[1:], None])]):
                reward = one.rollout.reward if following is None else 0.0
                after = 0.0 if following is None else value[following]
                later = reward + 0.97 * after - value[place] + 0.97 * 0.9 * later
                gains.append(later)
                places.append((one.rollout.ids, place))
        white = (np.array(gains) - np.mean(gains)) / np.sqrt(np.var(gains, ddof=1) + 1e-8)
        policy, critic = [], []
        for (ids, place), gain, advantage in zip(places, gains, white, strict=True):
            ratio = np.exp(now["logprobs"][ids][place] - first["logprobs"][ids][place])
            policy.append(-min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage))
            old, new = first["values"][ids][place], now["values"][ids][place]
            goal = gain + old
            critic.append(0.5 * max((new - goal) ** 2, (old + np.clip(new - old, -0.2, 0.2) - goal) ** 2))
        losses = train_step(trainer, data).losses
        for name, expected in {"rl loss": np.mean(policy), "value loss": np.mean(critic)}.items():
            total, count = losses[name].tolist()
            assert total / count == pytest.approx(expected, abs=1e-9), name
    assert any(now["values"].values()) and now["values"] != first["values"], "the critic learns"


@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2 sp", "dp2 zero"))]
)
def test_the_critic_learns_alike_under_every_layout(world: Worlds, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    rl = {**PPO, "rl_critic_lr_ratio": 3.0}
    results = world(ranks).run(train_policy_here, rl, {**LLAMA, **changes}, 3)
    mine = (*results[0][:2], [held for r in results for held in r[2]], results[0][3])
    compare(train_policy_here(rl, LLAMA, 3), mine)


def test_a_critic_starts_as_the_policy_of_a_checkpoint_without_one_and_is_resumed(tmp_path: Path) -> None:
    base, data = trainer_of(RL, **LLAMA, seed=7, save=str(tmp_path / "base"))
    train_step(base, data)
    Checkpointer(base).save()
    rl, changes = dataclasses.replace(RL, **PPO), {**LLAMA, "save": str(tmp_path / "ppo")}
    first, data = trainer_of(rl, **changes, load=str(tmp_path / "ppo"), pretrained_checkpoint=str(tmp_path / "base"))
    Checkpointer(first).resume()
    weights = {param_spec_of(param).name: param for param in first.stages[0].parameters()}
    source = {param_spec_of(param).name: param for param in base.stages[0].parameters()}
    assert any(name.startswith("critic.decoder.") for name in weights)
    for name, value in weights.items():
        if name.startswith("critic.value_head."):
            assert not value.any()
        else:
            assert torch.equal(value, source[name.removeprefix("critic.")]), name
    train_step(first, data)
    train_step(first, data)
    Checkpointer(first).save()
    norms = [float(train_step(first, data).grad_norm or 0) for _ in range(2)]
    again, data = trainer_of(rl, **changes, load=str(tmp_path / "ppo"))
    Checkpointer(again).resume()
    assert [float(train_step(again, data).grad_norm or 0) for _ in range(2)] == norms
    plain, _ = trainer_of(RL, **LLAMA, load=str(tmp_path / "ppo"), finetune=True)
    Checkpointer(plain).resume()  # the policy alone, without its critic


def test_a_value_of_the_wrong_token_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.rl import rollout_batches

    rows_of = rollout_batches.build_training_rows

    def shifted(*args: Any, **more: Any) -> Any:
        rows = rows_of(*args, **more)
        return rows | {"rl_return": np.roll(rows["rl_return"], 1, axis=1)}

    monkeypatch.setattr(rollout_batches, "build_training_rows", shifted)
    with pytest.raises(AssertionError):
        test_the_loss_of_a_step_is_that_of_ppo_by_its_formulas()
