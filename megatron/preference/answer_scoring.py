"""Passes without gradients, in which a network says how likely it finds answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Axis
from megatron.core.pipeline_parallel.executor import run_rank_script as execute
from megatron.preference.step import PreferenceStep
from megatron.training.data.batch import Batch
from megatron.training.evaluate import evaluation_mode
from megatron.training.step import StepWork
from megatron.training.trainer import Trainer


def compute_answer_logprobs(trainer: Trainer, network: Trainer, batches: Sequence[Batch]) -> list[Tensor]:
    """Return log-probabilities of the answers' labels, 0 at others: [b, s] for each microbatch on ranks of the last
    stage, [] on others. No gradients. Collective.

    trainer: the run's. network: the trainer whose stages compute them, which have no dropout in this pass.
    """
    mesh, step = trainer.run.mesh, trainer.forward_step
    assert isinstance(step, PreferenceStep), "answers are trained by a preference step"
    step.collected = []
    names, network.loss_names = network.loss_names, ()
    try:
        with evaluation_mode(trainer) if trainer.stages[0].training else nullcontext():
            work = StepWork(network, iter(batches), len(batches), training=False)
            execute(
                trainer.pipeline_script(len(batches), training=False),
                work=work,
                axis=mesh.pp,
                backward_axis=mesh.pp_backward,
            )
        return step.collected
    finally:
        step.collected, network.loss_names = None, names


def mismatched_answers_batch(batch: Batch, context: Axis) -> Batch:
    """Return KTO's microbatch of mismatched answers that belongs to a batch. Samples that only pad an evaluation get a
    zero mask.
    """
    if batch.tokens is None or batch.loss_mask is None:
        return batch
    counts = collectives.all_reduce(batch.loss_mask.sum(dim=1, keepdim=True), context) > 0
    extras = {name.removeprefix("kl_"): value for name, value in batch.extras.items() if name.startswith("kl_")}
    return dataclasses.replace(
        batch,
        tokens=extras.pop("tokens"),
        labels=extras.pop("labels"),
        loss_mask=extras.pop("loss_mask") * counts,
        positions=extras.pop("position_ids"),
        documents=extras.pop("document_ids")[:, :-1],
        extras={**extras, "answer_mask": extras["answer_mask"] * counts},
    )
