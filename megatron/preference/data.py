"""Global batches of answers, with what is asked of networks before the policy trains on them.

reference     log-probabilities of all answers by a network of its own in the same layout, by the base under adapters, which takes no
              memory, or from files (reference_cache.py)
divergence    of kto: the mean over the global batch of how much likelier the policy, as it is, finds mismatched answers than the
              reference does, and at least 0
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from megatron.adapters.quantized_base import without_adapters
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.dataset_protocols import DatasetKind
from megatron.core.datasets.text_kinds import make_gpt_dataset_kind
from megatron.core.parallel import collectives
from megatron.preference.dataset import PreferenceDatasetKind
from megatron.preference.reference_cache import load_or_cache_reference_logprobs
from megatron.preference.settings import PreferenceConfig, reference_checkpoint_path
from megatron.preference.step import compute_answer_logprobs, mismatched_answers_batch
from megatron.training.checkpoint.reference import load_reference_policy
from megatron.training.loader import ClosableBatches, Datasets, SplitBatches, build_split_batches
from megatron.training.state.batch import Batch
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer


def make_finetune_dataset_kind(run: RunContext, config: PreferenceConfig) -> DatasetKind:
    """Return the dataset kind of the task: conversations (sft), or rows of answers."""
    train, data = run.config.train, run.config.data
    if config.finetune_task == "sft":
        return make_gpt_dataset_kind(data, sequence_length=train.seq_length, seed=train.seed, tokenizer=run.tokenizer)
    return PreferenceDatasetKind(run.tokenizer, config.preference_prompt_format, train.seq_length, train.seed, config)


def with_epoch_iterations(run: RunContext, config: PreferenceConfig, kind: DatasetKind) -> RunContext:
    """Return the run with as many iterations as --finetune-epochs amounts to. Collective."""
    if config.finetune_epochs is None:
        return run
    train = run.config.train
    if run.mesh.world.is_first:  # which also makes the caches of the others
        samples = sum(
            len(part) for part in build_split_datasets(run.config.data, kind, (None, 0, 0)) if part is not None
        )
    else:
        samples = 0
    samples = collectives.broadcast_object(samples, run.mesh.world)
    iterations = max(1, math.ceil(config.finetune_epochs * samples / train.global_batch_size))
    run.print_rank_0(
        f"--finetune-epochs {config.finetune_epochs:g}: {samples} samples an epoch, {train.global_batch_size} a step: "
        f"{iterations} iterations"
    )
    changed = dataclasses.replace(run.config, train=dataclasses.replace(train, train_iters=iterations))
    return dataclasses.replace(run, config=changed)


class ReferenceScoredBatches:
    """The microbatches of a split, to which each step's reference log-probabilities (and KTO's divergence) are added.
    Collective.
    """

    def __init__(
        self, trainer: Trainer, inner: ClosableBatches, reference: Trainer | None, config: PreferenceConfig
    ) -> None:
        """reference: None where it is the base under adapters, or where samples say what it gives."""
        self._trainer, self._inner, self._reference, self._config = trainer, inner, reference, config
        self._batches: Iterator[Batch] = iter(())

    def __iter__(self) -> ReferenceScoredBatches:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def prepare_step(self, num_microbatches: int) -> int:
        """Read the next global batch and score it with the networks; return its number of microbatches. Collective."""
        batches = [next(self._inner) for _ in range(num_microbatches)]
        is_cached = self._config.preference_reference_cache is not None
        if self._config.has_reference and not is_cached:
            batches = _add_extra_to_each_batch(batches, "reference", self._reference_logprobs(batches))
        if self._config.finetune_task == "kto":
            others = [mismatched_answers_batch(batch, self._trainer.run.mesh.cp) for batch in batches]
            if not is_cached:
                others = _add_extra_to_each_batch(others, "reference", self._reference_logprobs(others))
            divergence = self._kto_divergence(others, compute_answer_logprobs(self._trainer, self._trainer, others))
            batches = _add_extra_to_each_batch(batches, "divergence", [divergence] * len(batches))
        self._batches = iter(batches)
        return num_microbatches

    def batch_metrics(self) -> Mapping[str, tuple[float, float]]:
        """Return no metrics: the loss reports all."""
        return {}

    def close(self) -> None:
        """Stop the threads that read ahead."""
        self._inner.close()

    def _reference_logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the reference's log-probabilities of the answers, as `compute_answer_logprobs`; by the base under adapters if
        it is
        no network of its own.
        """
        trainer = self._trainer
        with nullcontext() if self._reference is not None else without_adapters(*trainer.stages):
            return compute_answer_logprobs(trainer, self._reference or trainer, batches)

    def _kto_divergence(self, batches: Sequence[Batch], policy: Sequence[Tensor]) -> Tensor:
        """Return KTO's z of the global batch, a scalar without gradient, equal on all ranks: the mean log-ratio of
        policy to reference on mismatched answers, at least 0. policy: as `compute_answer_logprobs` returns them.
        """
        mesh = self._trainer.run.mesh
        pair = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        if mesh.tp.is_first:  # tensor ranks have the same
            for batch, values in zip(batches if policy else (), policy, strict=True):
                assert batch.loss_mask is not None, "the stage of the loss has the mask"
                total = values.double().sum() - (batch.extras["reference"] * batch.extras["answer_mask"]).double().sum()
                pair += torch.stack((total, batch.loss_mask.double().sum()))
        total, count = collectives.all_reduce(pair, mesh.world)
        return (total / count.clamp(min=1.0)).clamp(min=0.0).detach()


def _add_extra_to_each_batch(batches: Sequence[Batch], name: str, values: Sequence[Tensor]) -> list[Batch]:
    """Return the batches with the extra tensor `name`, one value each; unchanged if there are no values (earlier
    stages).
    """
    if not values:
        return list(batches)
    return [
        dataclasses.replace(batch, extras={**batch.extras, name: value})
        for batch, value in zip(batches, values, strict=True)
    ]


def preference_data_provider(config: PreferenceConfig, kind: DatasetKind) -> Callable[[Trainer], SplitBatches]:
    """Return the function that gives the training loop its data for a trainer. The reference is loaded once."""
    references: list[Trainer | None] = []

    def datasets(run: RunContext, samples: tuple[int, int | None, int]) -> Datasets:
        return build_split_datasets(run.config.data, kind, samples)

    def build_trainer_data(trainer: Trainer) -> SplitBatches:
        if config.finetune_task == "sft":
            return build_split_batches(trainer, datasets)
        assert isinstance(kind, PreferenceDatasetKind), "answers are read by their own kind"
        if not references:
            load = partial(load_reference_policy, trainer, reference_checkpoint_path(config, trainer.run.config))
            if config.preference_reference_cache:
                load_or_cache_reference_logprobs(trainer, config, kind, load)
            references.append(None if config.preference_reference_cache else load())
        data = build_split_batches(trainer, datasets)

        def with_reference_scores(batches: ClosableBatches) -> ClosableBatches:
            return ReferenceScoredBatches(trainer, batches, references[0], config)

        train = None if data.train is None else with_reference_scores(data.train)
        splits = []
        for part in (data.valid, data.test):
            if part is not None:
                once = part.once
                part = dataclasses.replace(
                    part,
                    batches=with_reference_scores(part.batches),
                    once=None if once is None else lambda once=once: with_reference_scores(once()),  # type: ignore[misc]
                )
            splits.append(part)
        return SplitBatches(train, *splits)

    return build_trainer_data
