"""What a run makes of sequences that are cut: losses, counts and means over any cut, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.datasets.blend import build_gpt_datasets
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.training.data.rebalance import RebalancedBatches, documents_with_loss
from megatron.training.loader import iterate_split_microbatches
from megatron.training.state.batch import Batch
from megatron.training.state.evaluate import evaluate_loss
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from tests.helpers import tiny
from tests.helpers.world import Worlds

# Which places count in the loss: none of rank 0 of two or four, only the last one, none at all.
COUNTING = {"rank-1-only": [4, 5, 10, 11], "last": [15], "none": []}


def batches(run: RunContext, iteration: int, counting: list[int]) -> Iterator[Batch]:
    """The microbatches of `tiny`, with a loss at these places only; cut like those."""
    cut, axis = Zigzag(run.config.train.seq_length, run.mesh.cp.size), run.mesh.cp
    mask = torch.zeros(cut.length)
    mask[counting] = 1.0
    for batch in tiny.short_run_batches(run, iteration):
        yield replace(batch, loss_mask=cut.shard(mask, axis.rank).expand_as(batch.loss_mask))


def train_here(changes: dict[str, Any], counting: list[int]) -> tuple[list[float], list[float]]:
    """On every rank: norms and mean losses of two steps, then those of an evaluation."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(size, fp64=True, **changes)))
    norms, losses = [], []
    for _ in range(2):
        step = train_step(trainer, batches(trainer.run, trainer.progress.iteration, counting))
        total, count = collectives.all_reduce(step.losses["lm loss"].double(), trainer.run.mesh.world).tolist()
        norms.append(float(step.grad_norm))
        losses.append(total / max(count, 1.0))
    return norms, [*losses, evaluate_loss(trainer, batches(trainer.run, 9, counting), 1)["lm loss"]]


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("counting", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize(
    "layout",
    [
        {"context_parallel_size": 4},
        {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
        {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
    ],
    ids=str,
)
def test_ranks_without_a_token_that_counts_change_nothing(
    world: Worlds, layout: dict[str, int], counting: list[int], per_token: bool
) -> None:
    changes = {"calculate_per_token_loss": per_token}
    alone = train_here(changes, counting)
    assert counting == [] or all(norm > 0 for norm in alone[0])
    for found in world(4).run(train_here, {**changes, **layout}, counting):
        assert found[0] == pytest.approx(alone[0], rel=1e-10)
        assert found[1] == pytest.approx(alone[1], rel=1e-10, nan_ok=True)


def seen_here(changes: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """On every rank: two training microbatches as the data gives them."""
    run = tiny.run_of(
        tiny.config(torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1, **changes)
    )
    train, _, _ = build_gpt_datasets(
        run.config.data,
        sequence_length=16,
        seed=1,
        train_samples=16,
        valid_samples=0,
        test_samples=0,
        tokenizer=run.tokenizer,
    )
    found = []
    stream = iterate_split_microbatches(run, train, consumed_samples=0, reads=True)
    for batch in (next(stream), next(stream)):
        rows = {name: getattr(batch, name) for name in ("tokens", "labels", "loss_mask", "positions", "documents")}
        found.append({name: row.numpy() for name, row in {**rows, **batch.extras}.items() if row is not None})
    return found


def test_the_data_of_context_ranks_are_pieces_of_one_sequence_but_for_its_documents(world: Worlds) -> None:
    changes = {"dataloader_inter_document_masking": True, "mtp_num_layers": 1}
    alone = seen_here(changes)
    for rank, found in enumerate(world(4).run(seen_here, {**changes, "context_parallel_size": 4})):
        places = Zigzag(16, 4).positions_of_rank(rank, torch.device("cpu")).numpy()
        for batch, whole in zip(found, alone, strict=True):
            assert batch.keys() == whole.keys() and "mtp_1_tokens" in batch
            for name, rows in whole.items():
                assert np.array_equal(batch[name], rows if name == "documents" else rows[:, places]), name


def test_what_has_no_places_is_not_cut() -> None:
    rows, number = torch.arange(8).view(1, 8), torch.arange(8)
    group: Any = object()
    batch = Batch(
        tokens=rows, labels=rows, loss_mask=rows, extras={"each": rows, "sample": number, "other": torch.zeros(1, 5)}
    )
    cut = batch.shard_over_context(Axis("cp", 2, 1, (0, 1), group))
    assert (
        cut.tokens.tolist() == [[2, 3, 4, 5]]
        and cut.extras["each"].tolist() == [[2, 3, 4, 5]]
        and cut.positions is None
    )
    assert cut.extras["sample"] is number and cut.extras["other"].shape == (1, 5)
    assert batch.shard_over_context(Axis("cp")) is batch


HYBRID: dict[str, Any] = {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 4}
APART: dict[str, Any] = {"reset_attention_mask": True, "reset_position_ids": True}


def regrouped_here(changes: dict[str, Any], counting_rows: int) -> tuple[list[float], list[float], list[int]]:
    """On every rank: norms and losses of two steps and of an evaluation, where only the first rows of a batch have a loss; and how
    many microbatches each rank had.
    """
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = tiny.trainer_of(tiny.run_of(tiny.config(size, fp64=True, **changes)))
    alone, counts = Axis("dp"), []

    def rows(iteration: int) -> Iterator[Batch]:
        for number, batch in enumerate(tiny.random_microbatches_of_rank(trainer.run, iteration, alone)):
            yield replace(batch, loss_mask=batch.loss_mask * (number < counting_rows))

    def batches(iteration: int) -> Iterator[Batch]:
        hybrid = trainer.run.config.parallel.hybrid_context_parallel
        return RebalancedBatches(rows(iteration), trainer.run.mesh, trainer.run.config) if hybrid else rows(iteration)

    norms, losses = [], []
    for iteration in range(2):
        own = batches(iteration)
        step = train_step(trainer, own)
        if isinstance(own, RebalancedBatches):
            counts.append(sum(share.includes_rank(trainer.run.mesh.dp.rank) for share in own.plan.shares))
        total, count = collectives.all_reduce(step.losses["lm loss"].double(), trainer.run.mesh.world).tolist()
        norms.append(float(step.grad_norm))
        losses.append(total / max(count, 1.0))
    return norms, [*losses, evaluate_loss(trainer, batches(9), 1)["lm loss"]], counts


@pytest.mark.parametrize("kind", ["p2p", "a2a", "allgather"])
@pytest.mark.parametrize("counting_rows", [8, 1, 0])
def test_documents_divided_by_their_length_give_the_serial_run(world: Worlds, kind: str, counting_rows: int) -> None:
    alone = regrouped_here(APART, counting_rows)
    results = world(4).run(regrouped_here, {**APART, **HYBRID, "cp_comm_type": (kind,)}, counting_rows)
    for norms, losses, _ in results:
        assert norms == pytest.approx(alone[0], rel=1e-10) and losses == pytest.approx(alone[1], rel=1e-10, nan_ok=True)
    counts = [found[2][0] for found in results]
    assert min(counts) > 1 if counting_rows == 8 else min(counts) == 0, f"microbatches a rank: {counts}"


def test_documents_are_taken_out_of_rows_whole_and_those_without_a_loss_are_left() -> None:
    tokens = torch.arange(20).view(2, 10)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2], [0] * 10])
    mask = torch.ones(2, 10)
    mask[0, 3:7] = 0.0
    found = list(
        documents_with_loss(
            Batch(
                tokens=tokens,
                labels=tokens + 1,
                loss_mask=mask,
                documents=documents,
                extras={"mtp_1_tokens": tokens + 2},
            )
        )
    )
    assert [document["tokens"].tolist() for document in found] == [[0, 1, 2], [7, 8, 9], list(range(10, 20))]
    assert [document["positions"].tolist() for document in found] == [[0, 1, 2], [7, 8, 9], list(range(10))]
    assert all(torch.equal(document["labels"], document["tokens"] + 1) for document in found)
    assert all(torch.equal(document["mtp_1_tokens"], document["tokens"] + 2) for document in found)


def read_here(changes: dict[str, Any]) -> list[tuple[int, int, int, list[int]]]:
    """On every rank: of its share of a global batch as the data gives it, places held, places of the whole, and what has a loss."""
    run = tiny.run_of(tiny.config(torch.distributed.get_world_size(), **changes))
    train, _, _ = build_gpt_datasets(
        run.config.data,
        sequence_length=16,
        seed=1,
        train_samples=16,
        valid_samples=0,
        test_samples=0,
        tokenizer=run.tokenizer,
    )
    stream = iterate_split_microbatches(run, train, consumed_samples=0, reads=True)
    found = []
    for _ in range(stream.prepare_step(2)):
        batch = next(stream)
        found.append((batch.tokens.shape[1], batch.documents.shape[1], batch.tokens[batch.loss_mask > 0].tolist()))
    stream.close()
    return found


def test_the_data_of_a_global_batch_are_divided_over_all_ranks(world: Worlds) -> None:
    changes = {**HYBRID, "dataloader_inter_document_masking": True, "global_batch_size": 8}
    whole = [
        sample["tokens"] for sample in seen_here({"dataloader_inter_document_masking": True, "micro_batch_size": 8})[:1]
    ]
    results = world(4).run(read_here, changes)
    read = sorted(token for found in results for _, _, tokens in found for token in tokens)
    assert read == sorted(whole[0].flatten().tolist()), "every token of the eight samples is on one rank"
    for found in results:
        for held, length, _ in found:
            assert held <= 4 and length % held == 0 and length // held in (1, 2, 4), "no rank holds more than its limit"
