"""Policy training as a whole: the same under every layout, in rows or packed, with the log-probabilities of generation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.datasets.indexed import DataError
from megatron.rl.bank import read_rollout_bank
from megatron.rl.environments.base import Problem
from megatron.training.health.bad_steps import BadStepError
from megatron.training.state.hooks import StepHooks
from megatron.training.state.step import train_step
from tests.helpers.lazy_collectives import run_lazily
from tests.helpers.policy import PACKED, RL, EvenIds, train_policy_here, trainer_of
from tests.helpers.training import assemble, held_weights
from tests.helpers.world import Worlds
from tests.unit.inference.serving import HYBRID

STEPS = 3
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
MOE: dict[str, Any] = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24}
TWICE: dict[str, Any] = {"grpo_iterations": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2 zero": (2, {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}),
    "tp2 pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++"])
def test_generation_and_training_know_the_same_log_probabilities(algorithm: str) -> None:
    figures, _, _, rollouts = train_policy_here({"rl_algorithm": algorithm, **TWICE}, LLAMA, 1)
    assert figures[0]["generation logprob difference"] < 1e-12
    assert len({one.ids for one in rollouts}) > 8 and {one.num_sampled for one in rollouts} - {0}


@pytest.mark.parametrize(
    "sampling",
    [
        {"rl_default_temperature": 0.7},
        {"rl_default_temperature": 1.5, "rl_default_top_k": 5},
        {"rl_default_top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "network", [LLAMA, {}, {**LLAMA, "final_logit_softcap": 3.0}], ids=["llama", "gpt", "soft cap"]
)
def test_temperature_divides_the_logits_of_training_too(sampling: dict[str, Any], network: dict[str, Any]) -> None:
    figures, *_ = train_policy_here(sampling, network, 1)
    assert figures[0]["generation logprob difference"] < 1e-12, (
        "top-p and top-k choose, and do not change what is recorded"
    )


def test_packed_rollouts_give_the_same_step_as_one_a_row() -> None:
    for extra in ({}, {"rl_algorithm": "gspo", **TWICE}):
        rows = train_policy_here(extra, {**LLAMA, **PACKED}, STEPS)
        packed = train_policy_here({"rl_use_sequence_packing": True, **extra}, LLAMA, STEPS)
        assert rows[1] == pytest.approx(packed[1], rel=1e-10)
        compare(rows, packed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "rl",
    [{}, pytest.param({"rl_algorithm": "gspo", **TWICE}, marks=pytest.mark.nightly), {"rl_use_sequence_packing": True}],
    ids=["grpo", "gspo twice", "packed"],
)
def test_every_layout_samples_and_trains_alike(world: Worlds, layout: str, rl: dict[str, Any]) -> None:
    ranks, changes = LAYOUTS[layout]
    results = world(ranks).run(run_lazily, "on_wait", train_policy_here, rl, {**LLAMA, **changes}, STEPS)
    for result in results:
        assert result[3] == results[0][3], "all ranks have the same rollouts"
    compare(
        train_policy_here(rl, LLAMA, STEPS), (*results[0][:2], [held for r in results for held in r[2]], results[0][3])
    )


def test_experts_over_ranks_sample_and_train_alike(world: Worlds) -> None:
    changes = {**MOE, "expert_model_parallel_size": 2}
    results = world(2).run(train_policy_here, {}, changes, 2)
    compare(train_policy_here({}, MOE, 2), (*results[0][:2], [held for r in results for held in r[2]], results[0][3]))


@pytest.mark.parametrize("network", ["states", pytest.param("attention", marks=pytest.mark.nightly)])
def test_weights_divided_by_fsdp2_sample_and_train_alike(world: Worlds, network: str) -> None:
    """Of Mamba and gated delta nets the states are made outside of a pass, where weights are divided."""
    changes = {**HYBRID, "hybrid_layer_pattern": "MG*-", "position_embedding_type": "none"}
    changes = changes if network == "states" else LLAMA
    results = world(2).run(train_policy_here, {}, {**changes, "use_torch_fsdp2": True, "ckpt_format": "torch_dist"}, 2)
    compare(
        train_policy_here({}, changes, 2), (*results[0][:2], [held for r in results for held in r[2]], results[0][3])
    )


def test_expert_bias_follows_the_tokens_of_packed_rollouts_and_not_the_rows_that_fill_up_ranks(world: Worlds) -> None:
    bias: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    }
    rl = {"rl_use_sequence_packing": True}
    results = world(2).run(train_policy_here, rl, {**MOE, **bias}, STEPS)
    expected = train_policy_here(rl, {**MOE, **bias}, STEPS)
    compare(expected, (*results[0][:2], [held for r in results for held in r[2]], results[0][3]))


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2 zero", marks=pytest.mark.nightly)])
def test_the_whole_entropy_is_torchs_and_a_bonus_that_layouts_agree_on(world: Worlds, layout: str) -> None:
    rl = {"rl_full_entropy": True, "grpo_entropy_term_weight": 0.3, "rl_default_temperature": 0.7}
    trainer, data = trainer_of(dataclasses.replace(RL, **rl), **LLAMA, clip_grad=0.0)
    data.prepare_step(16)
    assert data.rollouts is not None
    (stage,), entropies, objective = trainer.stages, list[torch.Tensor](), torch.zeros((), dtype=torch.float64)
    for one in (trained.rollout for trained in data.rollouts):
        places = torch.tensor(one.sampled[1:]).nonzero()[:, 0]
        logits = stage(ids=torch.tensor([one.ids[:-1]]))[:, 0, : trainer.run.config.model.true_vocab_size]
        found = torch.distributions.Categorical(logits=logits[places] / 0.7).entropy()
        entropies.append(found.detach())
        objective = objective + found.mean() / len(data.rollouts)
    weight = stage.output_layer.weight
    (bonus,) = torch.autograd.grad(objective, weight)
    total, count = train_step(trainer, data).losses["entropy"].tolist()
    assert total / count == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-10)
    gradients = []

    class Keep(StepHooks):
        """The gradient of the output matrix."""

        def before_update(self) -> None:
            gradients.append(again.stages[0].output_layer.weight.main_grad.total.clone())  # type: ignore[union-attr]

    for factor in (0.3, 0.0):
        again, data = trainer_of(dataclasses.replace(RL, **{**rl, "grpo_entropy_term_weight": factor}), **LLAMA)
        again.add_hook(Keep())
        train_step(again, data)
    # In the first step all ratios are 1: the rest of the loss is the same with and without the bonus.
    # Until the update, gradients are those of the mean over all positions of the rows.
    difference = (gradients[1] - gradients[0]) * 16 * trainer.run.config.train.seq_length / count
    torch.testing.assert_close(difference, 0.3 * bonus, rtol=1e-9, atol=1e-12)
    serial = train_policy_here(rl, LLAMA, 2)
    results = world(2).run(train_policy_here, rl, {**LLAMA, **LAYOUTS[layout][1]}, 2)
    compare(serial, (*results[0][:2], [held for r in results for held in r[2]], results[0][3]))


def compare(expected: Any, result: Any) -> None:
    """Figures, gradient norms, rollouts and weights of two runs agree."""
    assert [one.ids for one in result[3]] == [one.ids for one in expected[3]]
    for mine, theirs in zip(result[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-11)
    assert result[1] == pytest.approx(expected[1], rel=1e-9)
    weights, reference = assemble([result[2]]), assemble([expected[2]])
    for name, weight in reference.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-8, atol=1e-10, msg=name)


def test_a_reward_that_is_always_the_same_leaves_the_weights_as_they_are() -> None:
    trainer, data = trainer_of(environment("Constant"), weight_decay=0.5)
    before = [value.clone() for *_, value in held_weights(trainer)]
    for _ in range(2):
        assert train_step(trainer, data).skipped
    assert all(torch.equal(a, b) for a, (*_, b) in zip(before, held_weights(trainer), strict=True))


def environment(name: str, **changes: Any) -> Any:
    """The settings with another environment of tests/helpers/policy.py."""
    path = Path("tests/helpers") / f"policy_{name}.yaml"
    return dataclasses.replace(RL, langrl_env_config=str(path), **changes)


def test_an_environment_that_raises_costs_its_rollouts_and_is_counted() -> None:
    trainer, data = trainer_of(environment("Failing"))
    train_step(trainer, data)
    assert data.rollouts is not None
    failed = [one for one in data.rollouts if one.rollout.problem]
    assert failed and len(failed) < len(data.rollouts)
    assert all("the judge is out" in one.rollout.problem and one.rollout.num_sampled == 0 for one in failed)
    assert any(one.advantage for one in data.rollouts)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_costs_its_rollout(reward: float) -> None:
    class Odd(EvenIds):
        """Every third problem has an odd reward."""

        def reward(self, problem: Problem, answer: str) -> float:
            """As the base class says, or no number."""
            return reward if len(problem.prompt.split()) == 3 else super().reward(problem, answer)

    trainer, data = trainer_of(RL)
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=Odd()),)
    step = train_step(trainer, data)
    assert data.rollouts is not None and torch.isfinite(step.losses["rl loss"]).all()
    failed = [one.rollout for one in data.rollouts if one.rollout.problem]
    assert failed and all(f"gave a reward of {reward}" in one.problem and not one.num_sampled for one in failed)


def test_answers_that_were_cut_off_are_left_out_by_overlong_filtering() -> None:
    for filters in (False, True):
        trainer, data = trainer_of(dataclasses.replace(RL, rl_overlong_filtering=filters))
        count = int(train_step(trainer, data).losses["rl loss"][1])
        assert data.rollouts is not None
        whole = [one for one in data.rollouts if one.rollout.finished]
        cut = [one for one in data.rollouts if not one.rollout.finished]
        assert whole and cut and all((one.rollout.num_sampled == 0) == filters for one in cut)
        assert count == sum(one.rollout.num_sampled for one in data.rollouts)
        assert any(one.advantage for one in whole), "the cut ones still count in the means"
        total, number = data.batch_metrics()["answers cut off"]
        assert (total, number) == (len(cut), len(data.rollouts))


def test_texts_of_the_environment_are_not_trained_on() -> None:
    trainer, data = trainer_of(environment("TwoTurns"))
    step = train_step(trainer, data)
    assert data.rollouts is not None
    for one in data.rollouts:
        sampled = one.rollout.sampled
        assert not sampled[0] and sum(a != b for a, b in zip(sampled, sampled[1:])) == 3, "prompt, answer, text, answer"
        assert all(bool(value) == known for value, known in zip(one.rollout.logprobs, sampled))
    total, count = step.losses["generation logprob difference"].tolist()
    assert count == sum(one.rollout.num_sampled for one in data.rollouts) and total / count < 1e-12


def test_a_difference_between_generation_and_training_stops_the_run() -> None:
    trainer, data = trainer_of(dataclasses.replace(RL, rl_max_logprob_difference=1e-9))
    train_step(trainer, data)
    trainer, data = trainer_of(dataclasses.replace(RL, rl_max_logprob_difference=1e-9))
    data.prepare_step(16)
    data.step.rl = dataclasses.replace(RL, rl_default_temperature=0.9)  # training forgets the temperature of generation
    before = [value.clone() for *_, value in held_weights(trainer)]
    with pytest.raises(BadStepError, match="differ by .* nats on average, more than --rl-max-logprob-difference"):
        train_step(trainer, data)
    assert all(torch.equal(a, b) for a, (*_, b) in zip(before, held_weights(trainer), strict=True))


def test_a_run_that_is_resumed_within_a_round_goes_on_with_its_rollouts(tmp_path: Path) -> None:
    rl = dataclasses.replace(RL, **TWICE, rl_rollout_bank_dir=str(tmp_path))
    trainer, data = trainer_of(rl, global_batch_size=8)
    train_step(trainer, data)
    assert data.rollouts is not None and read_rollout_bank(tmp_path / "round_0000000.jsonl.gz") == data.rollouts
    norms = [float(train_step(trainer, data).grad_norm or 0) for _ in range(2)]
    again, resumed = trainer_of(rl, global_batch_size=8)
    (step := train_step(again, resumed))
    assert not step.skipped
    resumed.close()  # as after a resume: the round has to come from the bank
    assert [float(train_step(again, resumed).grad_norm or 0) for _ in range(2)] == norms
    (tmp_path / "round_0000000.jsonl.gz").unlink()
    resumed.close()
    with pytest.raises(DataError, match="in the middle of the round of iteration 0"):
        resumed.prepare_step(8)


def test_a_damaged_bank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(b"not compressed")
    with pytest.raises(DataError, match="cannot be read"):
        read_rollout_bank(tmp_path / "x.gz")
