"""KTO and reward models: a step by the formulas, the same step under every layout, and mistakes that these see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.preference import data as data_module
from megatron.preference import step as step_module
from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.dataset import PreferenceDataset, PreferenceRowSource, _prompt_with_other_rows_answer
from megatron.preference.rows import LabeledAnswer, PreferencePair, Row
from megatron.preference.settings import PreferenceConfig
from megatron.training.report.metrics import StepMetrics, _resolve_step_metrics
from megatron.training.state.evaluate import evaluation_mode
from megatron.training.state.step import train_step
from tests.helpers.preference import random_rows, train_pairs_here, trainer_of
from tests.helpers.world import Worlds
from tests.unit.preference.test_training import LAYOUTS, LLAMA, LORA, STEPS, answer_logprob, compare

KTO: dict[str, Any] = {
    "finetune_task": "kto",
    "preference_beta": 0.3,
    "kto_desirable_weight": 1.25,
    "kto_undesirable_weight": 0.75,
}
REWARD: dict[str, Any] = {"finetune_task": "reward", "reward_centre": 0.05}
TASKS = {"kto": KTO, "reward": REWARD}
ROWS_OF_LAYOUTS = [
    ("kto", "tp2 sp"), ("kto", "pp2"), ("kto", "cp2"), ("kto", "dp2 zero"), ("kto", "pp2 lora"), ("kto", "ep2 etp2 tp2"),
    ("kto", "tp2"), ("kto", "pp2 frozen"), ("reward", "tp2"), ("reward", "pp2 frozen"),
    ("reward", "tp2 sp"), ("reward", "pp2"), ("reward", "cp2"), ("reward", "dp2 fsdp"), ("reward", "ep2 etp2 tp2"),
]  # fmt: skip
DEFAULT = (("kto", "cp2"), ("kto", "dp2 zero"), ("reward", "tp2 sp"))


def rows_of(task: str, samples: int) -> list[Row]:
    """The rows in the first samples."""
    made = PreferenceDataset(
        PreferenceRowSource("rows", random_rows(task, 40)),
        range(40),
        length=32,
        num_samples=200,
        seed=1,
        split="train",
        task=task,  # type: ignore[arg-type]
    )
    rows = random_rows(task, 40)
    numbers = [
        number for index in range(samples) for number, which in made.answer_indices_in_sample(index) if which == 0
    ]
    return [rows[number] for number in numbers]


def step_and_norm(config: dict[str, Any], losses: Any) -> None:
    """A step's loss and gradient norm are those of losses(stage, reference), one a row, whose mean is taken."""
    trainer, data = trainer_of(PreferenceConfig(**config), **LLAMA, clip_grad=0.0)
    stage = trainer.stages[0]
    with evaluation_mode(trainer):
        expected = torch.stack(losses(stage, data._reference.stages[0] if data._reference else None)).mean()
        weights = [param for param in stage.parameters() if param.requires_grad]
        gradients = torch.autograd.grad(expected, weights, allow_unused=True)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None))
    step = train_step(trainer, data)
    total, _ = step.losses["preference loss"].tolist()
    count = float(step.losses["preference loss"][1])
    assert total / count == pytest.approx(float(expected.detach()), rel=1e-10)
    assert float(step.grad_norm) == pytest.approx(norm, rel=1e-9)


def kto_losses(stage: Any, reference: Any) -> list[Tensor]:
    """KTO's loss of each row of the first step, from whole logits; z over the whole batch, without a gradient."""
    rows = rows_of("kto", 8)
    everything = random_rows("kto", 40)
    places = [
        next(p for p, row in enumerate(everything) if row.answer_ids[0] is one.answer_ids[0] or _same(row, one))
        for one in rows
    ]
    with torch.no_grad():
        others = [_prompt_with_other_rows_answer(everything, place) for place in places]
        gaps = [answer_logprob(stage, ids) - answer_logprob(reference, ids) for ids in others]
        z = torch.stack(gaps).mean().clamp(min=0)
    losses = []
    for row in rows:
        assert isinstance(row, LabeledAnswer)
        with torch.no_grad():
            base = answer_logprob(reference, row.answer)
        gap = 0.3 * (answer_logprob(stage, row.answer) - base - z)
        losses.append(1.25 * (1 - torch.sigmoid(gap)) if row.desirable else 0.75 * (1 - torch.sigmoid(-gap)))
    return losses


def _same(a: Row, b: Row) -> bool:
    return a.answer_ids[0].tolist() == b.answer_ids[0].tolist()


def reward_losses(stage: Any, reference: Any) -> list[Tensor]:
    """Bradley and Terry's loss of each row of the first step, each answer read alone."""
    losses = []
    for row in rows_of("reward", 8):
        assert isinstance(row, PreferencePair)
        first, second = (stage(ids=torch.from_numpy(ids ^ (ids >> 31)).long()[None])[0, -1] for ids in row.answer_ids)
        losses.append(-torch.sigmoid(first - second - row.margin).log() + 0.05 * (first + second) ** 2)
    return losses


BY_FORMULA = {"kto": kto_losses, "reward": reward_losses}


@pytest.mark.parametrize("task", TASKS)
def test_a_step_is_that_of_the_formulas(task: str) -> None:
    step_and_norm(TASKS[task], BY_FORMULA[task])


@pytest.mark.parametrize(
    "task, layout",
    [pytest.param(*row, marks=[] if row in DEFAULT else [pytest.mark.nightly]) for row in ROWS_OF_LAYOUTS],
)
def test_every_layout_gives_the_serial_step(world: Worlds, task: str, layout: str) -> None:
    ranks, network, changes = LAYOUTS[layout]
    results = world(ranks).run(train_pairs_here, TASKS[task], {**network, **changes}, STEPS)
    compare(train_pairs_here(TASKS[task], network, STEPS), results)


def test_a_step_without_undesirable_answers_reports_no_reward_of_theirs() -> None:
    """Such a step is as good as another, and is not ended as one whose loss is not a number."""
    losses = {"preference loss": torch.tensor([3.0, 4.0]), "rejected reward": torch.tensor([0.0, 0.0])}
    (step,) = _resolve_step_metrics(
        [StepMetrics(iteration=1, losses=losses, batch_size=4, consumed_samples=4, loss_scale=1.0, learning_rate=0.1)],
        lambda sums: sums,
    )
    assert step.losses == {"preference loss": 0.75} and step.has_finite_losses


def test_under_adapters_kto_starts_at_no_divergence() -> None:
    figures, _, _ = train_pairs_here(KTO, LORA, 1)
    assert figures[0]["divergence"] == 0 and figures[0]["chosen reward"] == pytest.approx(0, abs=1e-12)


def test_a_divergence_of_one_rank_is_seen(world: Worlds) -> None:
    layout = {**LLAMA, "use_distributed_optimizer": True}
    with pytest.raises(AssertionError):
        compare(train_pairs_here(KTO, LLAMA, STEPS), world(2).run(_with_local_divergence, KTO, layout, STEPS))


def _with_local_divergence(config: dict[str, Any], changes: dict[str, Any], steps: int) -> Any:
    """z of a rank's own answers."""
    with pytest.MonkeyPatch.context() as patch:
        local = type("Local", (), {**vars(collectives), "all_reduce": staticmethod(lambda x, *_: x)})
        patch.setattr(data_module, "collectives", local)
        return train_pairs_here(config, changes, steps)


def test_a_divergence_with_a_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """z of the very answers that are trained on, with their gradient."""
    real = step_module.kto_loss

    def attached(answers: Any, desirable: Tensor, divergence: Tensor, options: Any) -> Tensor:
        return real(
            answers, desirable, divergence + answers.log_ratio.mean() - answers.log_ratio.mean().detach(), options
        )

    monkeypatch.setattr(step_module, "kto_loss", attached)
    with pytest.raises(AssertionError):
        test_a_step_is_that_of_the_formulas("kto")


def test_a_score_of_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PreferenceDataset.__getitem__

    def earlier(self: PreferenceDataset, index: int) -> Any:
        rows = real(self, index)
        mask = rows["answer_mask"].copy()
        mask[:-1] = mask[1:].copy()
        return rows | {"answer_mask": mask}

    monkeypatch.setattr(PreferenceDataset, "__getitem__", earlier)
    with pytest.raises(AssertionError):
        test_a_step_is_that_of_the_formulas("reward")


def test_without_packing_a_sample_holds_one_row() -> None:
    made = PreferenceDataset(
        PreferenceRowSource("rows", random_rows("dpo", 9)),
        range(9),
        length=32,
        num_samples=None,
        seed=1,
        split="train",
        packing=False,
    )
    assert len(made) == 9 and sorted(made.answer_indices_in_sample(index)[0][0] for index in range(9)) == list(range(9))


def test_the_reference_is_asked_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is in training mode while answers are scored, and the policy is again when it trains."""
    seen: list[bool] = []
    real = ReferenceScoredBatches._reference_logprobs

    def noted(self: ReferenceScoredBatches, batches: Any) -> Any:
        network = (self._reference or self._trainer).stages[0]
        handle = network.register_forward_pre_hook(lambda module, _: seen.append(module.training))
        try:
            return real(self, batches)
        finally:
            handle.remove()

    monkeypatch.setattr(ReferenceScoredBatches, "_reference_logprobs", noted)
    for changes in (LLAMA, LORA):
        trainer, data = trainer_of(PreferenceConfig(), **changes)
        train_step(trainer, data)
        assert trainer.stages[0].training
    assert seen and not any(seen)
