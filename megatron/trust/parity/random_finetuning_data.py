"""Made-up answers for a short run of finetune.py: the same rows in every layout, and a reference with other random weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.dataset import PreferenceDataset, PreferenceRowSource
from megatron.preference.rows import LabeledAnswer, PreferencePair, Row
from megatron.preference.settings import PreferenceConfig
from megatron.training.loader import microbatches_of_split
from megatron.training.trainer import ModelProvider, Trainer, build_trainer

_ROWS = 64


def random_finetuning_batches(
    trainer: Trainer, model: ModelProvider, config: PreferenceConfig, steps: int
) -> ReferenceScoredBatches:
    """Return the global batches of `steps` steps of a finetune.py task on random rows, with the reference's
    log-probabilities. The reference has other random weights; under adapters it is the base.
    """
    run, reference = trainer.run, None
    train, ids = run.config.train, run.config.model.true_vocab_size
    assert ids is not None, "the config has its vocabulary"
    if config.has_reference and not run.config.model.adapter.has_adapters:
        other = replace(run, config=replace(run.config, train=replace(train, seed=train.seed + 1)))
        stages = build_trainer(other, model, trainer.forward_step).stages
        for stage in stages:
            stage.eval()
        reference = replace(trainer, stages=stages, parallels=[], hooks=[], scripts={})
    dataset = PreferenceDataset(
        PreferenceRowSource("rows", _random_answer_rows(config, train.seq_length, ids, train.seed)),
        range(_ROWS),
        length=train.seq_length,
        num_samples=steps * train.global_batch_size,
        seed=train.seed,
        split="train",
        task=config.finetune_task,
        packing=config.finetune_packing,
    )
    return ReferenceScoredBatches(
        trainer, microbatches_of_split(run, dataset, consumed_samples=0, reads=True), reference, config
    )


def _random_answer_rows(config: PreferenceConfig, length: int, ids: int, seed: int) -> tuple[Row, ...]:
    """Return random rows with very uneven answers; both of a pair fit into a sample. ids: size of the vocabulary."""
    random, rows = np.random.default_rng(seed), list[Row]()
    for number in range(_ROWS):
        prompt, *answers = (
            random.integers(0, ids, random.integers(1, 1 + most)).astype(np.int32)
            for most in (2, *[max(1, length // 2 - 2)] * 2)
        )
        first, second = (np.concatenate([~prompt, answer]) for answer in answers)
        is_kto = config.finetune_task == "kto"
        rows.append(
            LabeledAnswer(first, number % 3 > 0) if is_kto else PreferencePair(first, second, 0.25 * (number % 3))
        )
    return tuple(rows)
