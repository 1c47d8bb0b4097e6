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

import torch
from torch import Tensor

from megatron.core.datasets.blend import build_splits
from megatron.core.datasets.kinds import gpt_kind
from megatron.core.datasets.samples import DatasetKind
from megatron.core.parallel import collectives
from megatron.core.transformer.adapters import without_adapters
from megatron.preference.asking import logprobs, mismatched_batch
from megatron.preference.dataset import PreferenceKind
from megatron.preference.reference_cache import attach_reference_logprobs
from megatron.preference.settings import PreferenceConfig, reference_folder
from megatron.training.checkpoint.reference import reference_trainer
from megatron.training.data.batch import Batch
from megatron.training.loader import Batches, Datasets, SplitBatches, build_data
from megatron.training.run import Run
from megatron.training.trainer import Trainer


def dataset_kind(run: Run, config: PreferenceConfig) -> DatasetKind:
    """How files become samples."""
    train, data = run.config.train, run.config.data
    if config.finetune_task == "sft":
        return gpt_kind(data, sequence_length=train.seq_length, seed=train.seed, tokenizer=run.tokenizer)
    return PreferenceKind(run.tokenizer, config.preference_prompt_format, train.seq_length, train.seed, config)


def with_epochs(run: Run, config: PreferenceConfig, kind: DatasetKind) -> Run:
    """The run with as many iterations as --finetune-epochs asks for. All ranks call this together."""
    if config.finetune_epochs is None:
        return run
    train = run.config.train
    if run.mesh.world.is_first:  # which also makes the caches of the others
        samples = sum(len(part) for part in build_splits(run.config.data, kind, (None, 0, 0)) if part is not None)
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
    """The microbatches of a split, with what is asked of networks about each global batch. All ranks call everything together."""

    def __init__(self, trainer: Trainer, inner: Batches, reference: Trainer | None, config: PreferenceConfig) -> None:
        """reference: None where it is the base under adapters, or where samples say what it gives."""
        self._trainer, self._inner, self._reference, self._config = trainer, inner, reference, config
        self._batches: Iterator[Batch] = iter(())

    def __iter__(self) -> ReferenceScoredBatches:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def prepare_step(self, num_microbatches: int) -> int:
        """Read the next global batch and ask the networks; returns its number of microbatches."""
        batches = [next(self._inner) for _ in range(num_microbatches)]
        is_cached = self._config.preference_reference_cache is not None
        if self._config.has_reference and not is_cached:
            batches = _add_tensors(batches, "reference", self._reference_logprobs(batches))
        if self._config.finetune_task == "kto":
            others = [mismatched_batch(batch, self._trainer.run.mesh.cp) for batch in batches]
            if not is_cached:
                others = _add_tensors(others, "reference", self._reference_logprobs(others))
            divergence = self._divergence(others, logprobs(self._trainer, self._trainer, others))
            batches = [_with_extras(batch, {"divergence": divergence}) for batch in batches]
        self._batches = iter(batches)
        return num_microbatches

    def batch_metrics(self) -> Mapping[str, tuple[float, float]]:
        """Nothing beside what the loss reports."""
        return {}

    def close(self) -> None:
        """End the threads that read ahead."""
        self._inner.close()

    def _reference_logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        trainer = self._trainer
        with nullcontext() if self._reference is not None else without_adapters(*trainer.stages):
            return logprobs(trainer, self._reference or trainer, batches)

    def _divergence(self, batches: Sequence[Batch], policy: Sequence[Tensor]) -> Tensor:
        """z of the global batch, the same on all ranks, without a gradient. policy: as `logprobs` gives them."""
        mesh = self._trainer.run.mesh
        pair = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        if mesh.tp.is_first:  # tensor ranks have the same
            for batch, values in zip(batches if policy else (), policy, strict=True):
                assert batch.loss_mask is not None, "the stage of the loss has the mask"
                total = values.double().sum() - (batch.extras["reference"] * batch.extras["answer_mask"]).double().sum()
                pair += torch.stack((total, batch.loss_mask.double().sum()))
        total, count = collectives.all_reduce(pair, mesh.world)
        return (total / count.clamp(min=1.0)).clamp(min=0.0).detach()


def _with_extras(batch: Batch, values: Mapping[str, Tensor]) -> Batch:
    return dataclasses.replace(batch, extras={**batch.extras, **values})


def _add_tensors(batches: Sequence[Batch], name: str, values: Sequence[Tensor]) -> list[Batch]:
    """The batches with a tensor of each; as they are on stages that have none."""
    if not values:
        return list(batches)
    return [_with_extras(batch, {name: value}) for batch, value in zip(batches, values, strict=True)]


def data_source(config: PreferenceConfig, kind: DatasetKind) -> Callable[[Trainer], SplitBatches]:
    """What gives the shared training loop its data. The reference is loaded once."""
    references: list[Trainer | None] = []

    def datasets(run: Run, samples: tuple[int, int | None, int]) -> Datasets:
        return build_splits(run.config.data, kind, samples)

    def data_of(trainer: Trainer) -> SplitBatches:
        if config.finetune_task == "sft":
            return build_data(trainer, datasets)
        assert isinstance(kind, PreferenceKind), "answers are read by their own kind"
        if not references:
            if config.preference_reference_cache:
                attach_reference_logprobs(
                    trainer,
                    config,
                    kind,
                    lambda: reference_trainer(trainer, reference_folder(config, trainer.run.config)),
                )
                references.append(None)
            else:
                references.append(reference_trainer(trainer, reference_folder(config, trainer.run.config)))
        data = build_data(trainer, datasets)

        def referenced(batches: Batches) -> Batches:
            return ReferenceScoredBatches(trainer, batches, references[0], config)

        train = None if data.train is None else referenced(data.train)
        splits = []
        for part in (data.valid, data.test):
            if part is not None:
                once = part.once
                part = dataclasses.replace(
                    part,
                    batches=referenced(part.batches),
                    once=None if once is None else lambda once=once: referenced(once()),  # type: ignore[misc]
                )
            splits.append(part)
        return SplitBatches(train, *splits)

    return data_of
