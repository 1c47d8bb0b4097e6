"""Global batches of pairs, with the log-probabilities that the reference gives their tokens.

The reference is a network of its own in the same layout, or the base under adapters, which takes no memory. It runs over a global
batch before the policy trains on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

from torch import Tensor

from megatron.core.datasets.blend import build_splits
from megatron.core.pipeline_parallel.executor import run as execute
from megatron.core.transformer.adapters import without_adapters
from megatron.preference.dataset import PreferenceKind
from megatron.preference.settings import PreferenceConfig, reference_folder
from megatron.preference.step import PreferenceStep
from megatron.training.checkpoint.inference_model import GPT, load_network
from megatron.training.data.batch import Batch
from megatron.training.evaluate import resting
from megatron.training.loader import Batches, Data, DatasetProvider, Datasets, build_data
from megatron.training.run import Run
from megatron.training.step import StepWork
from megatron.training.trainer import Trainer


def datasets_of(config: PreferenceConfig) -> DatasetProvider:
    """What gives a run its training, validation and test pairs."""

    def datasets(run: Run, samples: tuple[int, int | None, int]) -> Datasets:
        train = run.config.train
        kind = PreferenceKind(run.tokenizer, config.preference_prompt_format, train.seq_length, train.seed)
        return build_splits(run.config.data, kind, samples)

    return datasets


class ReferencedBatches:
    """The microbatches of a split, each global batch with the reference's log-probabilities. All ranks call everything together."""

    def __init__(self, trainer: Trainer, inner: Batches, reference: Trainer | None, config: PreferenceConfig) -> None:
        self._trainer, self._inner, self._reference, self._config = trainer, inner, reference, config
        self._batches: Iterator[Batch] = iter(())

    def __iter__(self) -> ReferencedBatches:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def begin(self, num_microbatches: int) -> int:
        """Read the next global batch and ask the reference; returns its number of microbatches."""
        batches = [next(self._inner) for _ in range(num_microbatches)]
        if self._config.has_reference:
            scores = self._label_logprobs(batches)
            if scores:
                batches = [
                    dataclasses.replace(batch, extras={**batch.extras, "reference": score})
                    for batch, score in zip(batches, scores, strict=True)
                ]
        self._batches = iter(batches)
        return num_microbatches

    def figures(self) -> Mapping[str, tuple[float, float]]:
        """Nothing beside what the loss reports."""
        return {}

    def close(self) -> None:
        """End the threads that read ahead."""
        self._inner.close()

    def _label_logprobs(self, batches: list[Batch]) -> list[Tensor]:
        """Log-probabilities of the labels, [b, s] for each microbatch, on ranks of the last stage; nothing elsewhere."""
        trainer, mesh = self._trainer, self._trainer.run.mesh
        step = trainer.forward_step
        assert isinstance(step, PreferenceStep), "pairs are trained by a preference step"
        step.collected = []
        names, trainer.loss_names = trainer.loss_names, ()
        network = self._reference or trainer
        training = trainer.stages[0].training
        try:
            with (
                resting(trainer) if training else nullcontext(),
                nullcontext() if self._reference is not None else without_adapters(*trainer.stages),
            ):
                work = StepWork(network, iter(batches), len(batches), training=False)
                execute(
                    trainer.script(len(batches), training=False),
                    work=work,
                    axis=mesh.pp,
                    backward_axis=mesh.pp_backward,
                )
            return step.collected
        finally:
            step.collected, trainer.loss_names = None, names


def reference_trainer(trainer: Trainer, config: PreferenceConfig) -> Trainer | None:
    """The trainer with the stages of the reference network; None where there is none, or where it is the base under adapters."""
    run = trainer.run
    folder = reference_folder(config, run.config)
    if folder is None:
        return None
    loaded = load_network(
        folder,
        GPT,
        parallel=run.config.parallel,
        dtype=run.config.precision.dtype,
        tokenizer=dataclasses.asdict(run.config.tokenizer),
        device=run.mesh.device,
    )
    return dataclasses.replace(trainer, stages=list(loaded.stages), parallels=[], hooks=[], scripts={})


def data_source(config: PreferenceConfig) -> Callable[[Trainer], Data]:
    """What gives the shared training loop its data. The reference is loaded once."""
    references: list[Trainer | None] = []

    def data_of(trainer: Trainer) -> Data:
        if not references:
            references.append(reference_trainer(trainer, config))
        data = build_data(trainer, datasets_of(config))

        def referenced(batches: Batches) -> Batches:
            return ReferencedBatches(trainer, batches, references[0], config)

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
        return Data(train, *splits)

    return data_of
