"""Losses of answers beside TRL's own functions: values, and gradients of the log-probabilities, to 1e-6."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.preference.losses import PAIR_LOSSES, AnswerLogprobs, kto_loss, reward_loss
from megatron.preference.settings import PreferenceConfig

trl = pytest.importorskip("trl", reason="trl is not installed")

BETA, GAMMA = 0.3, 0.7
HERE = SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values, gather=lambda values: values)


def tokens_of(seed: int, *, answers: int = 6) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens, which have gradients, and which are an answer's: [answers, s] each, of very uneven lengths."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (answers, 1), generator=drawn)
    logprobs = -2 * torch.rand(answers, 9, generator=drawn, dtype=torch.float64) - 0.01
    return logprobs.requires_grad_(), torch.arange(9) < lengths


def scores(tokens: tuple[Tensor, Tensor], reference: Tensor | None = None) -> AnswerLogprobs:
    """What our losses are given. reference: of the answers; left out, 0."""
    total, count = (tokens[0] * tokens[1]).sum(1), tokens[1].sum(1).double()
    return AnswerLogprobs(total, torch.zeros_like(total) if reference is None else reference, count)


def assert_same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    """Values and gradients agree."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, check_dtype=False)
    for mine, other in zip(torch.autograd.grad(ours.mean(), inputs), torch.autograd.grad(theirs.mean(), inputs)):
        assert mine.abs().max() > 1e-3, "this gradient says something"
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo_is_trls(smoothing: float) -> None:
    from trl.experimental.cpo import CPOTrainer

    chosen, rejected = tokens_of(1), tokens_of(2)
    means = [(logprobs * mask).sum(1) / mask.sum(1) for logprobs, mask in (chosen, rejected)]
    settings = SimpleNamespace(
        alpha=0.0, beta=BETA, simpo_gamma=GAMMA, label_smoothing=smoothing, loss_type="simpo", accelerator=HERE
    )
    theirs, *rewards = CPOTrainer.cpo_loss(settings, *means)  # type: ignore[arg-type]
    config = PreferenceConfig(
        preference_loss="simpo", preference_beta=BETA, preference_label_smoothing=smoothing, preference_margin=GAMMA
    )
    for answer, reward in zip((chosen, rejected), rewards, strict=True):
        torch.testing.assert_close(scores(answer).reward(config), reward, rtol=1e-6, atol=1e-6, check_dtype=False)
    ours = PAIR_LOSSES["simpo"](scores(chosen), scores(rejected), config)
    assert_same(ours, theirs, chosen[0], rejected[0])


def test_orpo_is_trls_beside_the_cross_entropy_of_the_answer() -> None:
    """TRL's own cross entropy counts the prompt, too; the paper's, and ours, the answer alone."""
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = tokens_of(3), tokens_of(4)
    means = [(logprobs * mask).sum(1) / mask.sum(1) for logprobs, mask in (chosen, rejected)]
    weighed, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=BETA, accelerator=HERE), *means)  # type: ignore[arg-type]
    config = PreferenceConfig(preference_loss="orpo", preference_beta=BETA)
    for answer, reward in zip((chosen, rejected), rewards, strict=True):
        torch.testing.assert_close(scores(answer).reward(config), reward, rtol=1e-6, atol=1e-6, check_dtype=False)
    ours = PAIR_LOSSES["orpo"](scores(chosen), scores(rejected), config)
    assert_same(ours, -means[0] - weighed, chosen[0], rejected[0])


@pytest.mark.parametrize("agrees", [False, True], ids=["divergent", "at most the reference"])
def test_kto_is_trls(agrees: bool) -> None:
    """z, weights and both kinds of answers; where the policy is less likely than the reference, z is 0."""
    answers, others = tokens_of(5), tokens_of(6)
    reference, of_others = -9 * torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    of_others = torch.zeros_like(of_others) if agrees else of_others - 4
    desirable = torch.tensor([True, False, True, True, False, True])
    weights = (1.25, 0.75)
    z = (scores(others).logprob - of_others).mean().clamp(min=0).detach()
    assert (z == 0) == agrees
    config = PreferenceConfig(preference_beta=BETA, kto_desirable_weight=weights[0], kto_undesirable_weight=weights[1])
    ours = kto_loss(scores(answers, reference), desirable.double(), z, config)
    theirs = _their_kto(answers, others, desirable, (reference, of_others), weights)
    assert_same(ours.mean(), theirs, answers[0])


def _their_kto(
    answers: tuple[Tensor, Tensor],
    others: tuple[Tensor, Tensor],
    desirable: Tensor,
    references: tuple[Tensor, Tensor],
    weights: tuple[float, float],
) -> Tensor:
    """The mean loss that TRL's trainer computes where a network gives these log-probabilities."""

    def network(input_ids: Tensor, **_: Any) -> Any:
        """Rows of the mismatched answers are marked by their ids."""
        logprobs, mask = others if bool((input_ids == 1).all()) else answers
        return SimpleNamespace(log_probs=logprobs * mask, entropy=logprobs * 0, mean_logits=logprobs * 0)

    def whole(mask: Tensor) -> Tensor:  # one longer: the first token has no prediction
        return F.pad(mask.long(), (1, 0))

    ids, ones = torch.zeros(6, 10, dtype=torch.long), torch.ones(6, 10, dtype=torch.long)
    batch = {
        "input_ids": ids, "attention_mask": ones, "completion_mask": whole(answers[1]), "label": desirable,
        "KL_input_ids": ones, "KL_attention_mask": ones, "KL_completion_mask": whole(others[1]),
        "ref_logps": references[0], "ref_KL_logps": references[1],
    }  # fmt: skip
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=HERE, calculate_KL=True, aux_loss_enabled=False, beta=BETA,
        precompute_ref_logps=True, loss_type="kto", desirable_weight=weights[0], undesirable_weight=weights[1],
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    trainer._compute_kl_logps = lambda model, given: trl.KTOTrainer._compute_kl_logps(trainer, model, given)
    return trl.KTOTrainer._compute_loss(trainer, network, batch, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("centre", [None, 0.05])
@pytest.mark.parametrize("margin", [False, True], ids=["no margin", "margin"])
def test_the_loss_of_reward_models_is_trls(margin: bool, centre: float | None) -> None:
    logits = torch.randn(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(8), requires_grad=True)
    margins = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=HERE, _total_train_tokens=0, _metrics={"eval": defaultdict(list)},
        args=SimpleNamespace(center_rewards_coefficient=centre),
    )  # fmt: skip
    inputs = {"margin": margins} if margin else {}
    theirs = trl.RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)  # type: ignore[arg-type]
    chosen, rejected = logits[:, 0].chunk(2)
    ours = reward_loss(chosen, rejected, margins if margin else torch.zeros_like(margins), centre or 0.0)
    assert_same(ours.mean(), theirs, logits)
