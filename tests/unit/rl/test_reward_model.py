"""Answers that a reward model scores, on the first rank alone; transformers gives the same scores."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.rl.environments.config import read_environments
from megatron.rl.environments.reward_model import RewardModelEnvironment
from megatron.rl.planned_memory import memory_beside_policy
from megatron.rl.rollouts import Rollout
from megatron.training.checkpoint.export import export_hf_with_tokenizer
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.state.step import train_step
from tests.helpers.policy import RL, train_policy_here, trainer_of
from tests.helpers.world import Worlds
from tests.unit.evaluation.test_reward import LLAMA as REWARD_LLAMA
from tests.unit.evaluation.test_reward import saved
from tests.unit.rl.test_policy import LLAMA, compare

CUT_OFF = 0.125


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An environment file with a reward model of our own, which is also there as a folder of Hugging Face's."""
    saved(tmp_path / "reward", reward_head=True, **REWARD_LLAMA)
    export_hf_with_tokenizer(open_checkpoint(str(tmp_path / "reward")), tmp_path / "hf")
    prompts = [" ".join(str((5 * n + m) % 48) for m in range(1 + n % 3)) for n in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    return environment_file(tmp_path, tmp_path / "reward")


def environment_file(folder: Path, model: Path, **more: Any) -> Path:
    """The file of one environment."""
    arguments = {"model": str(model), "path": str(folder / "prompts.jsonl"), "cut_off": CUT_OFF, "held_out": 1, **more}
    path = folder / "environments.yaml"
    path.write_text(json.dumps([{"agent_type": "reward_model", "agent_args": arguments}]))  # JSON is YAML
    return path


def by_transformers(folder: Path, one: Rollout) -> float:
    """The sigmoid of the score of a rollout, as transformers gives it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor([[*(one.prompt + one.answer).encode(), 256]])
    return float(network(input_ids=ids).logits.detach().sigmoid()) if one.finished else CUT_OFF


@pytest.mark.parametrize("source", ["reward", "hf"])
def test_rewards_are_the_scores_that_transformers_gives(file: Path, source: str) -> None:
    settings = {"tokenizer": {"tokenizer_type": "ByteTokenizer"}} if source == "hf" else {}
    environment_file(file.parent, file.parent / source, **settings)
    rl = dataclasses.replace(RL, langrl_env_config=str(file), rl_max_new_tokens=12)
    trainer, data = trainer_of(rl, **LLAMA)
    train_step(trainer, data)
    assert data.rollouts is not None
    finished = [one.rollout for one in data.rollouts if one.rollout.finished]
    assert 1 < len(finished) < len(data.rollouts)
    for one in data.rollouts:
        expected = by_transformers(file.parent / "hf", one.rollout) if one.rollout.finished else CUT_OFF
        assert one.rollout.reward == pytest.approx(expected, abs=1e-6) and not one.rollout.problem


@pytest.mark.nightly
def test_the_first_of_two_ranks_alone_loads_the_reward_model(world: Worlds, file: Path) -> None:
    rl = {"langrl_env_config": str(file), "rl_max_new_tokens": 12}
    results = world(2).run(train_policy_here, rl, {**LLAMA, "tensor_model_parallel_size": 2}, 2)
    compare(train_policy_here(rl, LLAMA, 2), (*results[0][:2], [held for r in results for held in r[2]], results[0][3]))
    assert len({one.reward for one in results[0][3]}) > 1


def test_a_conversation_is_scored_by_its_format_and_held_out_prompts_are_others(file: Path) -> None:
    environment_file(
        file.parent, file.parent / "reward", chat_format="chatml", sigmoid=False, template="Q: {prompt} A:"
    )
    (one,) = read_environments(str(file))
    environment = one.environment
    assert isinstance(environment, RewardModelEnvironment)
    environment.start()
    problem = environment.problem(0)
    assert problem.prompt == "Q: 0 A:" and environment.problem(2**40).prompt == "Q: 20 21 A:"
    assert environment._model is not None
    talk = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "7"}]
    assert environment.reward(problem, "7") == environment._model.score([talk])[0]


def test_what_is_no_reward_model_is_refused_before_anything_is_loaded(file: Path) -> None:
    language = saved(file.parent / "language", **REWARD_LLAMA)
    prompts = str(file.parent / "prompts.jsonl")
    with pytest.raises(CheckpointError, match="a language model, which gives no scores"):
        RewardModelEnvironment(model=language, path=prompts)
    with pytest.raises(ConfigError, match="leaves none of the 5 prompts"):
        RewardModelEnvironment(model=str(file.parent / "reward"), path=prompts, held_out=5)
    with pytest.raises(ConfigError, match="is no JSONL file with `prompt`"):
        RewardModelEnvironment(model=str(file.parent / "reward"), path=str(file.parent / "nowhere"))


def test_the_planner_counts_the_reward_model(file: Path) -> None:
    rl = dataclasses.replace(RL, langrl_env_config=str(file))
    trainer, _ = trainer_of(RL)
    formats = open_checkpoint(str(file.parent / "reward")).formats
    expected = sum(torch.Size(one.shape).numel() * 4 for name, one in formats.items() if name.startswith("model."))
    parts = memory_beside_policy(rl, trainer.run.config, 1)
    assert parts["reward models of the first rank"] == expected > 10_000
    assert "reward models of the first rank" not in memory_beside_policy(RL, trainer.run.config, 1)
