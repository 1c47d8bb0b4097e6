"""One optimizer step against the same network's logits, plain cross entropy and autograd."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.datasets.indexed import DataError
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.spec import param_spec_of
from megatron.training.report.metrics import StepMetrics, StepMetricsMeter
from megatron.training.state.batch import Batch, LossFunction, masked_loss_sum
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer, build_trainer
from tests.helpers import tiny

# The plainest update there is, so that a step shows its gradient: w - lr * gradient.
PLAIN: dict[str, Any] = {
    "fp64": True,
    "optimizer": "sgd",
    "sgd_momentum": 0.0,
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "lr": 0.5,
    "min_lr": 0.5,
    "lr_decay_style": "constant",
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
}


def trainer_of(**changes: Any) -> Trainer:
    """A tiny trainer on one process."""
    return tiny.trainer_of(tiny.run_of(tiny.config(1, **{**PLAIN, **changes})))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of every parameter by its global name."""
    return {param_spec_of(param).name: param.detach().clone() for param in trainer.stages[0].parameters()}


def sums(trainer: Trainer, batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum of the losses that count, their number) of one microbatch, from logits and torch's cross entropy."""
    logits = trainer.stages[0](ids=batch.tokens)[..., : tiny.VOCABULARY].transpose(0, 1)
    losses = F.cross_entropy(logits.reshape(-1, tiny.VOCABULARY), batch.labels.reshape(-1), reduction="none")
    mask = batch.loss_mask.reshape(-1).double()
    return (losses * mask).sum(), mask.sum()


def gradients(trainer: Trainer, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter by its global name."""
    params = list(trainer.stages[0].parameters())
    return {
        param_spec_of(param).name: found for param, found in zip(params, torch.autograd.grad(loss, params), strict=True)
    }


def resolved(step: StepMetrics) -> StepMetrics:
    """The step as plain numbers."""
    meter = StepMetricsMeter(lambda tensor: tensor)
    meter.add(step)
    return meter.resolve()[0]


def expect_step(trainer: Trainer, batches: list[Batch], objective: Tensor, logged: Tensor) -> None:
    """Train on the batches: the loss is `logged`, and the weights move down the gradient of `objective`."""
    before, gradient = weights(trainer), gradients(trainer, objective)
    step = resolved(train_step(trainer, iter(batches)))
    assert step.losses["lm loss"] == pytest.approx(logged.item(), rel=1e-12)
    norm = torch.sqrt(sum(value.square().sum() for value in gradient.values())).item()
    assert step.grad_norm == pytest.approx(norm, rel=1e-10)
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, before[name] - 0.5 * gradient[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_the_loss_is_the_sum_over_all_tokens_over_their_number(micro_batch_size: int) -> None:
    trainer = trainer_of(micro_batch_size=micro_batch_size)
    batches = list(tiny.short_run_batches(trainer.run, 0))
    counts = [int(batch.loss_mask.sum()) for batch in batches]
    assert len(batches) == 8 // micro_batch_size and (micro_batch_size == 8 or max(counts) > 1.5 * min(counts)), counts
    pairs = [sums(trainer, batch) for batch in batches]
    loss = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    expect_step(trainer, batches, loss, loss)


def test_off_per_token_loss_it_is_the_mean_of_the_microbatches_means_but_logged_over_tokens() -> None:
    trainer = trainer_of(micro_batch_size=2, calculate_per_token_loss=False)
    batches = list(tiny.short_run_batches(trainer.run, 0))
    pairs = [sums(trainer, batch) for batch in batches]
    mean_of_means = sum(total / count for total, count in pairs) / len(pairs)
    logged = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    assert abs(mean_of_means - logged) > 1e-3, "the two ways must differ for the test to see anything"
    expect_step(trainer, batches, mean_of_means, logged)


@pytest.mark.parametrize("per_token", [True, False])
def test_a_microbatch_without_any_loss_adds_nothing(per_token: bool) -> None:
    trainer = trainer_of(micro_batch_size=4, calculate_per_token_loss=per_token)
    first, second = tiny.short_run_batches(trainer.run, 0)
    empty = Batch(second.tokens, second.labels, torch.zeros_like(second.loss_mask))
    total, count = sums(trainer, first)
    expect_step(trainer, [first, empty], total / count / (1 if per_token else 2), total / count)


def test_what_the_gradient_is_made_of_is_reported() -> None:
    trainer = trainer_of(log_params_norm=True, log_num_zeros_in_grad=True)
    batches = list(tiny.short_run_batches(trainer.run, 0))
    pairs = [sums(trainer, batch) for batch in batches]
    gradient = gradients(trainer, sum(total for total, _ in pairs) / sum(count for _, count in pairs))
    step = resolved(train_step(trainer, iter(batches)))
    true_rows = {
        name: value[: tiny.VOCABULARY] if "word_embeddings" in name else value for name, value in gradient.items()
    }
    assert step.num_zeros == sum(int((value == 0).sum()) for value in true_rows.values())
    norm = torch.sqrt(sum(value.square().sum() for value in weights(trainer).values())).item()
    assert step.params_norm == pytest.approx(norm, rel=1e-10)


def test_a_growing_batch_takes_so_many_microbatches_and_counts_them() -> None:
    trainer = trainer_of(
        train_iters=None, train_samples=60, rampup_batch_size=(2, 2, 9), global_batch_size=8, micro_batch_size=2
    )
    taken: list[Batch] = []

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            taken.append(batch)
            yield batch

    source = watched(batch for iteration in range(9) for batch in tiny.short_run_batches(trainer.run, iteration))
    consumed, seen = 0, 0
    # By hand: 9 samples make three increments of 3 samples each.
    for size in (2, 2, 4, 6, 8, 8):
        probe = sum_probe(trainer)
        step = train_step(trainer, source)
        fresh, seen = taken[seen:], len(taken)
        assert (step.batch_size, len(fresh)) == (size, size // 2)
        consumed += size
        assert (
            step.consumed_samples
            == trainer.progress.consumed_train_samples
            == trainer.progress.schedule_samples
            == consumed
        )
        assert trainer.progress.consumed_tokens == consumed * 16
        pairs = [probe(batch) for batch in fresh]
        expected = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        assert resolved(step).losses["lm loss"] == pytest.approx(expected.item(), rel=1e-12)


def sum_probe(trainer: Trainer) -> Any:
    """`sums` of the weights as they are now."""
    frozen = trainer_of()
    frozen.stages[0].load_state_dict(trainer.stages[0].state_dict())
    return lambda batch: sums(frozen, batch)


def test_the_learning_rate_follows_the_samples_that_moved_the_weights() -> None:
    # fp16 ends at 2^16, so gradients overflow until the scale has been halved often enough.
    numbers = {"fp64": False, "fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1}
    rates = {"optimizer": "adam", "lr": 1e-2, "min_lr": 0.0, "lr_decay_style": "linear", "train_iters": 8}
    trainer = trainer_of(**numbers, **rates)
    before, steps = weights(trainer), []
    for _ in range(40):
        steps.append(resolved(train_step(trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration))))
        if not steps[-1].skipped:
            break
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items()), (
            "a skipped step moved the weights"
        )
        assert trainer.progress.schedule_samples == 0
    skipped = len(steps) - 1
    assert skipped > 0 and not steps[-1].skipped
    # As in Megatron's log: scale and rate after the step, which the next one takes.
    assert [step.loss_scale for step in steps] == [
        *(2.0 ** (39 - number) for number in range(skipped)),
        2.0 ** (40 - skipped),
    ]
    assert all(step.learning_rate == 1e-2 for step in steps[:-1]), "a skipped step used up some of the learning rate"
    assert steps[-1].learning_rate == pytest.approx(1e-2 * (1 - 8 / 64), rel=1e-12)
    assert trainer.progress.iteration == len(steps) and trainer.progress.consumed_train_samples == 8 * len(steps)
    assert trainer.progress.schedule_samples == 8
    after = resolved(train_step(trainer, tiny.short_run_batches(trainer.run, 0)))
    assert after.learning_rate == pytest.approx(1e-2 * (1 - 16 / 64), rel=1e-12)


def test_the_reported_learning_rate_is_that_of_megatrons_log() -> None:
    """Megatron reads it from its optimizer after the scheduler's step: at iteration n of a warm-up of 4 it is n quarters."""
    trainer = trainer_of(
        optimizer="adam",
        lr=1e-2,
        min_lr=0.0,
        lr_decay_style="constant",
        lr_warmup_iters=4,
        decoupled_lr=1.0,
        decoupled_min_lr=0.0,
        train_iters=8,
    )
    steps = [resolved(train_step(trainer, tiny.short_run_batches(trainer.run, number))) for number in range(6)]
    assert [step.learning_rate for step in steps] == pytest.approx(
        [1e-2 * share for share in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)]
    )
    assert [step.decoupled_learning_rate for step in steps] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_and_the_output_layer_can_have_a_rate_of_their_own(tied: bool) -> None:
    trainer = trainer_of(decoupled_lr=0.25, decoupled_min_lr=0.25, untie_embeddings_and_output_weights=not tied)
    batches = list(tiny.short_run_batches(trainer.run, 0))
    pairs = [sums(trainer, batch) for batch in batches]
    gradient = gradients(trainer, sum(total for total, _ in pairs) / sum(count for _, count in pairs))
    before = weights(trainer)
    step = train_step(trainer, iter(batches))
    assert (step.learning_rate, step.decoupled_learning_rate) == (0.5, 0.25)
    own = {"embedding.word_embeddings.weight", "output_layer.weight"} & before.keys()  # not positions, as in Megatron
    assert len(own) == (1 if tied else 2)
    for name, value in weights(trainer).items():
        rate = 0.25 if name in own else 0.5
        torch.testing.assert_close(value, before[name] - rate * gradient[name], rtol=1e-10, atol=1e-12, msg=name)


def test_every_loss_that_a_forward_step_reports_is_averaged_by_its_own_count() -> None:
    def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[Tensor, LossFunction]:
        batch = next(batches)

        def loss(losses: Tensor) -> Any:
            total, count, report = masked_loss_sum(losses, batch.loss_mask)
            return (
                total,
                count,
                {**report, "first token": torch.stack((losses[:, 0].sum().detach(), count.new_tensor(len(losses))))},
            )

        return stage(ids=batch.tokens, labels=batch.labels), loss

    run = tiny.run_of(tiny.config(1, **PLAIN))
    trainer = build_trainer(run, tiny.gpt, forward_step)
    batches = list(tiny.short_run_batches(run, 0))
    with torch.no_grad():
        first = torch.cat(
            [
                F.cross_entropy(
                    trainer.stages[0](ids=batch.tokens)[0, :, : tiny.VOCABULARY], batch.labels[:, 0], reduction="none"
                )
                for batch in batches
            ]
        )
    step = resolved(train_step(trainer, iter(batches)))
    assert list(step.losses) == ["lm loss", "first token"]
    assert step.losses["first token"] == pytest.approx(first.mean().item(), rel=1e-12)


def test_data_that_ends_within_a_step_is_named() -> None:
    trainer = trainer_of()
    with pytest.raises(DataError, match="the data ended before the run did; train on fewer samples or give more data"):
        train_step(trainer, islice(tiny.short_run_batches(trainer.run, 0), 3))
