"""Losses of a step with their normalizers, value and gradient, against code and formulas that others wrote: TRL's trainers, and NeMo-RL's loss."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.parallel.mesh import Mesh
from megatron.rl.advantages import answer_advantages as advantages_of
from megatron.rl.algorithms import ALGORITHMS
from megatron.rl.policy_step import PolicyLossFunction
from megatron.rl.rollout_batches import TrainingRollout, build_training_rows
from megatron.rl.rollouts import Rollout
from megatron.training.state.batch import Batch
from tests.helpers.policy import RL

LENGTHS, PROMPT, LIMIT = (5, 2, 7, 3), 2, 8
LOW, HIGH, BETA = 0.2, 0.28, 0.05


def draws() -> dict[str, torch.Tensor]:
    """Log-probabilities of four answers by the policy, its older self, the reference and generation [4, 8], advantages [4], mask [4, 8]."""
    generator = torch.Generator().manual_seed(5)
    logprobs = -3 * torch.rand(len(LENGTHS), LIMIT, generator=generator, dtype=torch.float64)
    near = {
        name: logprobs + 0.4 * torch.randn(logprobs.shape, generator=generator, dtype=torch.float64)
        for name in ("old", "reference", "generation")
    }
    mask = (torch.arange(LIMIT) < torch.tensor(LENGTHS)[:, None]).double()
    return {
        "logprobs": logprobs,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -2.0], dtype=torch.float64),
        "mask": mask,
    } | near


def ours(given: dict[str, torch.Tensor], algorithm: str, **changes: Any) -> tuple[float, torch.Tensor]:
    """(loss of the step, its gradient with respect to the log-probabilities, [4, 8])."""
    rl = dataclasses.replace(RL, rl_algorithm=algorithm, grpo_clamp_eps_lower=LOW, grpo_clamp_eps_upper=HIGH, **changes)
    trained = []
    for row, length in enumerate(LENGTHS):
        known = {
            name: (0.0,) * PROMPT + tuple(given[name][row, :length].tolist())
            for name in ("old", "reference", "generation")
        }
        rollout = Rollout(
            "x",
            row,
            row,
            (1,) * (PROMPT + length),
            (False,) * PROMPT + (True,) * length,
            known["generation"],
            0.0,
            True,
        )
        trained.append(TrainingRollout(rollout, float(given["advantages"][row]), known["old"], known["reference"]))
    rows = build_training_rows(
        trained, 12, average=ALGORITHMS[algorithm].average, limit=LIMIT, padding=0, packed=False, multiple=1
    )
    logprobs = given["logprobs"].clone().requires_grad_()
    placed = torch.nn.functional.pad(logprobs, (PROMPT - 1, 12 - LIMIT - PROMPT + 1))
    loss = PolicyLossFunction(rl, Mesh.single_process().cp, has_old=True, has_reference=rl.grpo_kl_beta != 0)
    batch = Batch.from_arrays({name: np.asarray(rows[name]) for name in rows}, torch.device("cpu"), positions=False)
    total, count, _ = loss(-placed, batch)
    assert float(count) == sum(LENGTHS)
    (gradient,) = torch.autograd.grad(total / count, logprobs)
    return float((total / count).detach()), gradient


def compare(mine: tuple[float, torch.Tensor], loss: torch.Tensor, logprobs: torch.Tensor) -> None:
    """Value and gradient agree to 1e-9."""
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert mine[0] == pytest.approx(float(loss.detach()), abs=1e-9)
    torch.testing.assert_close(mine[1], gradient, rtol=0, atol=1e-9)
    assert mine[1].abs().max() > 1e-3


def trl_trainer(logprobs: torch.Tensor, **settings: Any) -> Any:
    """What TRL's loss reads of its trainer."""
    same = SimpleNamespace(num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value)
    values: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *args, **more: (logprobs, torch.zeros_like(logprobs), None),
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "aux_loss_enabled": False,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LIMIT,
        "accelerator": same,
        "_entropy_bonus_enabled": False,
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }
    return SimpleNamespace(**{**values, **settings})


def weights_of(given: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    """The weights of TRL's vllm_importance_sampling_mode, [4, 8] or [4, 1], by their formulas; the limit is 1.2."""
    differences = (given["old"] - given["generation"]) * given["mask"]
    weights = (differences.sum(1, keepdim=True) if mode.startswith("sequence") else differences).exp()
    assert (weights > 1.2).any() and (weights < 1.2).any()
    return torch.where(weights > 1.2, 0.0, weights) if mode.endswith("mask") else weights.clamp(max=1.2)


TRL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "grpo with kl": ("grpo", {"grpo_kl_beta": BETA, "rl_reference": "x"}, {"loss_type": "grpo", "beta": BETA}),
    "dapo": ("dapo", {}, {"loss_type": "dapo"}),
    "bnpo": ("dapo", {}, {"loss_type": "bnpo"}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
    "gspo": ("gspo", {}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 1 + HIGH}),
    **{
        f"importance sampling, {mode}": (
            "dapo",
            {
                "rl_inference_logprobs_is_correction": True,
                "rl_importance_sampling_truncation_coef": 1.2,
                "rl_importance_sampling_mode": mode,
            },
            {"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_mode": mode},
        )
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}


@pytest.mark.nightly  # TRL takes seconds to import
@pytest.mark.parametrize("name", TRL)
def test_the_losses_are_those_of_trl(name: str) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    algorithm, changes, settings = TRL[name]
    given = draws()
    logprobs = given["logprobs"].clone().requires_grad_()
    ids = torch.zeros(len(LENGTHS), LIMIT, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": given["mask"].sum(),
        "importance_sampling_ratio": weights_of(given, settings.get("vllm_importance_sampling_mode", "")),
    }
    compare(
        ours(given, algorithm, **changes),
        trainer._compute_loss(trl_trainer(logprobs, **settings), None, inputs),
        logprobs,
    )


@pytest.mark.nightly
def test_leave_one_out_is_that_of_trl() -> None:
    trainer = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    given = draws()
    logprobs = given["logprobs"].clone().requires_grad_()
    ids = torch.zeros(len(LENGTHS), LIMIT, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_logps": (given["old"] * given["mask"]).sum(1),
    }
    compare(ours(given, "rloo"), trainer._compute_loss(trl_trainer(logprobs), None, inputs), logprobs)


def nemo_rl(
    given: dict[str, torch.Tensor], logprobs: torch.Tensor, *, dual: float | None, sequences: bool
) -> torch.Tensor:
    """NeMo-RL's clipped policy-gradient loss by its documented formulas: token level, or the mean of the sequences' means."""
    mask, advantage = given["mask"], given["advantages"][:, None]
    ratio = (logprobs - given["old"]).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH))
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * dual), loss)
    loss = loss * (given["old"] - given["generation"]).exp()
    distance = given["reference"] - logprobs
    loss = loss + BETA * (distance.exp() - distance - 1)
    if sequences:
        return ((loss * mask).sum(1) / mask.sum(1)).mean()
    return (loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("dual", [None, 1.1])
@pytest.mark.parametrize("algorithm", ["dapo", "grpo"])
def test_the_losses_are_those_of_nemo_rl(algorithm: str, dual: float | None) -> None:
    given = draws()
    logprobs = given["logprobs"].clone().requires_grad_()
    changes = {
        "grpo_kl_beta": BETA,
        "rl_reference": "x",
        "rl_inference_logprobs_is_correction": True,
        "rl_dual_clip": dual,
    }
    expected = nemo_rl(given, logprobs, dual=dual, sequences=algorithm == "grpo")
    compare(ours(given, algorithm, **changes), expected, logprobs)


@pytest.mark.parametrize("baseline", ["group-std", "batch-std", "group-mean", "leave-one-out"])
def test_equal_rewards_give_no_advantage_and_nothing_infinite(baseline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = torch.full((3, 4), 0.7)
    assert not advantages_of(rewards, baseline).any()
    if baseline.endswith("std"):  # the planted defect: a deviation of zero divides
        monkeypatch.setattr("megatron.rl.advantages.STD_EPSILON", 0.0)
        assert not advantages_of(rewards, baseline).isfinite().all()
