"""Forward-only passes: the right mean, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.training.state.batch import Batch
from megatron.training.state.evaluate import evaluate_loss
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.world import Worlds

FIRST = 100  # the iteration whose made-up data evaluations begin with


def valid(run: RunContext) -> Iterator[Batch]:
    """Validation microbatches of this rank, for ever."""
    iteration = FIRST
    while True:
        yield from tiny.short_run_batches(run, iteration)
        iteration += 1


def trainer_of(world_size: int = 1, **changes: Any) -> Trainer:
    """A tiny trainer on this process's ranks."""
    return tiny.trainer_of(tiny.run_of(tiny.config(world_size, **{"fp64": True, **changes})))


def evaluate_here(changes: dict[str, Any], steps: int) -> dict[str, float]:
    """On every rank: train a little, and evaluate two batches."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = trainer_of(size, **changes)
    for _ in range(steps):
        train_step(trainer, tiny.short_run_batches(trainer.run, trainer.progress.iteration))
    return evaluate_loss(trainer, valid(trainer.run), 2)


def expected(trainer: Trainer, iterations: int) -> float:
    """The mean over all tokens, from logits and torch's cross entropy, without dropout."""
    total = count = 0.0
    stage = trainer.stages[0].eval()
    with torch.no_grad():
        for iteration in range(FIRST, FIRST + iterations):
            for batch in tiny.short_run_batches(trainer.run, iteration):
                logits = stage(ids=batch.tokens)[..., : tiny.VOCABULARY].transpose(0, 1)
                losses = F.cross_entropy(
                    logits.reshape(-1, tiny.VOCABULARY), batch.labels.reshape(-1), reduction="none"
                )
                total += float((losses * batch.loss_mask.reshape(-1)).sum())
                count += float(batch.loss_mask.sum())
    stage.train()
    return total / count


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_size": 4},
        {"calculate_per_token_loss": False},
        {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    ],
    ids=str,
)
def test_the_loss_is_the_mean_over_all_tokens_without_dropout(changes: dict[str, Any]) -> None:
    trainer = trainer_of(**changes)
    found = evaluate_loss(trainer, valid(trainer.run), 2)
    assert found == {"lm loss": pytest.approx(expected(trainer, 2), rel=1e-12)}


def test_an_evaluation_may_have_a_global_batch_of_its_own() -> None:
    trainer = trainer_of(eval_global_batch_size=4)  # training has 8: two evaluations of 4 are one of 8
    assert trainer.batches.evaluation_batch_size == 4
    assert evaluate_loss(trainer, valid(trainer.run), 4) == evaluate_loss(trainer_of(), valid(trainer.run), 2)


def test_nothing_of_the_training_changes() -> None:
    changes = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    plain = trainer_of(**changes)
    steps = [train_step(plain, tiny.short_run_batches(plain.run, iteration)) for iteration in range(3)]
    trainer = trainer_of(**changes)
    for iteration, expected_step in enumerate(steps):
        weights = [param.detach().clone() for param in trainer.stages[0].parameters()]
        evaluate_loss(trainer, valid(trainer.run), 1)
        assert all(torch.equal(a, b) for a, b in zip(weights, trainer.stages[0].parameters(), strict=True))
        assert trainer.stages[0].training, "dropout stayed off"
        step = train_step(trainer, tiny.short_run_batches(trainer.run, iteration))
        assert torch.equal(step.losses["lm loss"], expected_step.losses["lm loss"])
        assert torch.equal(step.grad_norm, expected_step.grad_norm)


def test_random_numbers_that_a_forward_pass_draws_are_given_back() -> None:
    trainer = trainer_of()

    def drawing(run: RunContext, batches: Iterator[Batch], stage: Any) -> Any:
        torch.rand(3)
        with run.streams.fork("cut"):
            torch.rand(3)
        return tiny.forward_step(run, batches, stage)

    trainer.forward_step = drawing
    before = trainer.run.streams.state()
    evaluate_loss(trainer, valid(trainer.run), 1)
    after = trainer.run.streams.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_evaluation_counts_in_the_batch_that_a_ramp_ends_with() -> None:
    taken: list[Batch] = []

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            taken.append(batch)
            yield batch

    trainer = trainer_of(
        train_iters=None, train_samples=40, rampup_batch_size=(2, 2, 20), global_batch_size=8, micro_batch_size=2
    )
    evaluate_loss(trainer, watched(valid(trainer.run)), 3)
    assert len(taken) == 3 * 8 // 2


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
        (
            2,
            {
                "use_distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "ddp_bucket_size": 1000,
            },
        ),
        (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ],
    ids=["tp2-sp", "pp2-vpp2", "dp2-zero-overlap", "tp2-pp2"],
)
def test_every_layout_and_every_rank_gives_the_serial_loss(world: Worlds, ranks: int, layout: dict[str, Any]) -> None:
    serial = evaluate_here({"fp64": True}, 2)
    for found in world(ranks).run(evaluate_here, {"fp64": True, **layout}, 2):
        assert found == {"lm loss": pytest.approx(serial["lm loss"], rel=1e-10)}


def test_an_evaluation_builds_no_plans_of_attention_and_training_may_afterwards() -> None:
    trainer, seen = tiny.trainer_of(tiny.run_of(tiny.config())), []
    trainer.stages[0].register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    evaluate_loss(trainer, tiny.short_run_batches(trainer.run, 0), 1)
    assert before and set(seen) == {False} and torch.backends.cuda.cudnn_sdp_enabled()
