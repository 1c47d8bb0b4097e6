"""Forward-only passes, and the mean loss over their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.core.parallel import collectives
from megatron.core.parallel.device import without_cudnn_attention
from megatron.training.state.batch import Batch
from megatron.training.state.step import StepWork
from megatron.training.state.trainer import Trainer


def evaluate_loss(trainer: Trainer, batches: Iterator[Batch], iterations: int) -> dict[str, float]:
    """Return the mean of each loss over `iterations` global batches, alike on all ranks; random streams stay."""
    mesh = trainer.run.mesh
    count = trainer.batches.evaluation_batch_size // trainer.batches.unit
    totals: dict[str, torch.Tensor] = {}
    mesh.flight_recorder.begin_activity("evaluation", trainer.progress.iteration)
    with evaluation_mode(trainer):
        for _ in range(iterations):
            work = StepWork(trainer, batches, count, training=False)
            trainer.run_schedule(work, work.own_microbatches, training=False)
            for name, pair in work.loss_sums().items():
                totals[name] = totals[name] + pair if name in totals else pair
    means = {}
    for name, pair in totals.items():
        total, tokens = collectives.all_reduce(pair.double(), mesh.world).tolist()
        means[name] = total / tokens if tokens else float("nan")
    return means


@contextmanager
def evaluation_mode(trainer: Trainer) -> Iterator[None]:
    """Within: parameters gathered, dropout and cuDNN attention off; then training mode and random streams as before."""
    streams = trainer.run.streams.state()
    trainer.set_train_mode(False)
    for parallel in trainer.parallels:
        parallel.finish_gather()
    with without_cudnn_attention():
        yield
    trainer.set_train_mode(True)
    trainer.run.streams.load(streams)
