"""Preference optimization of a tiny network under any layout, with random pairs and a random reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from megatron.core.parallel import collectives
from megatron.preference.data import ReferenceScoredBatches
from megatron.preference.dataset import PreferenceDataset, PreferenceRowSource
from megatron.preference.rows import LabeledAnswer, PreferencePair, Row
from megatron.preference.settings import PreferenceConfig
from megatron.preference.step import PreferenceStep
from megatron.training.loader import iterate_split_microbatches
from megatron.training.state.step import train_step
from megatron.training.state.trainer import Trainer, build_trainer
from tests.helpers import tiny
from tests.helpers.training import Held, held_weights

BASE: dict[str, Any] = {
    "fp64": True,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "eval_iters": 0,
    "lr": 1e-3,
    "seq_length": 32,
    "reset_attention_mask": True,
    "reset_position_ids": True,
    "calculate_per_token_loss": True,
}


def random_pairs(number: int) -> tuple[PreferencePair, ...]:
    """Pairs with a common prompt of 1 to 4 ids and answers of 1 to 7, of very uneven lengths."""
    random = np.random.default_rng(0)

    def ids(low: int, high: int) -> np.ndarray:
        return random.integers(0, tiny.VOCABULARY, random.integers(low, high)).astype(np.int32)

    pairs = []
    for _ in range(number):
        prompt = ids(1, 5)
        pairs.append(PreferencePair(*(np.concatenate([~prompt, ids(1, 8)]) for _ in range(2))))
    return tuple(pairs)


def random_rows(task: str, number: int) -> tuple[Row, ...]:
    """Rows of a task: pairs, of reward models with margins, or of kto one of the answers of each and whether it is desirable."""
    pairs = random_pairs(number)
    if task == "kto":
        return tuple(LabeledAnswer(pair.answer_ids[place % 2], place % 3 > 0) for place, pair in enumerate(pairs))
    return tuple(dataclasses.replace(pair, margin=0.25 * (place % 3)) for place, pair in enumerate(pairs))


def trainer_of(config: PreferenceConfig, **changes: Any) -> tuple[Trainer, ReferenceScoredBatches]:
    """A tiny GPT in preference optimization on this process's ranks, and its data. The reference has other random weights."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    changes = {"reward_head": config.finetune_task == "reward", **changes}
    run = tiny.run_of(tiny.config(world_size, **{**BASE, **changes}))
    trainer = build_trainer(run, tiny.gpt, PreferenceStep(config))
    reference = None
    if config.has_reference and not run.config.model.adapter.has_adapters:
        other = tiny.run_of(tiny.config(world_size, **{**BASE, **changes, "seed": 99}))
        stages = build_trainer(other, tiny.gpt, PreferenceStep(config)).stages
        for stage in stages:
            stage.eval()
        reference = dataclasses.replace(trainer, stages=stages, parallels=[], hooks=[], scripts={})
    dataset = PreferenceDataset(
        PreferenceRowSource("rows", random_rows(config.finetune_task, 40)),
        range(40),
        length=run.config.train.seq_length,
        num_samples=200,
        seed=1,
        split="train",
        task=config.finetune_task,
        packing=config.finetune_packing,
    )
    inner = iterate_split_microbatches(run, dataset, consumed_samples=0, reads=True)
    return trainer, ReferenceScoredBatches(trainer, inner, reference, config)


def train_pairs_here(
    config: dict[str, Any], changes: dict[str, Any], steps: int
) -> tuple[list[dict[str, float]], list[float], Held]:
    """On every rank: train on pairs; figures of each step, gradient norms, and this rank's weights."""
    trainer, data = trainer_of(PreferenceConfig(**config), **changes)
    figures, norms = [], []
    for _ in range(steps):
        step = train_step(trainer, data)
        figures.append({name: _mean(pair, trainer) for name, pair in step.losses.items()})
        norms.append(float(step.grad_norm or 0.0))
    data.close()
    for parallel in trainer.parallels:
        parallel.finish_gather()
    return figures, norms, held_weights(trainer)


def _mean(pair: torch.Tensor, trainer: Trainer) -> float:
    total, count = collectives.all_reduce(pair.double(), trainer.run.mesh.world).tolist()
    return total / count if count else 0.0
