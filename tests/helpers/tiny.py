"""Tiny runs: configs, batches and trainers small enough to be trained in a test."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import pretrain_bert
import pretrain_t5
from megatron.core.config.flags import from_values
from megatron.core.config.plan import StageSpec
from megatron.core.config.run import RunConfig
from megatron.core.kernels.table import Need, select
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tokenizers.build import NullTokenizer
from megatron.training.batch import Batch, LossFunction, language_loss
from megatron.training.regroup import Regrouped
from megatron.training.run import Run
from megatron.training.stages import Trainer, build_trainer
from megatron.training.timers import Timers

VOCABULARY = 50  # not a multiple of anything: padding is always at work
BASE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "seq_length": 16, "micro_batch_size": 1, "global_batch_size": 8,
    "max_position_embeddings": 16, "make_vocab_size_divisible_by": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "init_method_std": 0.1, "lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "cosine", "train_iters": 8, "clip_grad": 0.5,
    "weight_decay": 0.1, "mock_data": True, "seed": 7, "num_workers": 0,
}


def config(world_size: int = 1, **changes: Any) -> RunConfig:
    """The base config with changes, resolved and with its vocabulary."""
    run = from_values(RunConfig, {**BASE, **changes}).resolve(world_size)
    return replace(run, model=run.model.with_vocabulary(VOCABULARY, run.parallel.tp))


def with_vocabulary(settings: RunConfig, size: int) -> RunConfig:
    """The config with another vocabulary."""
    return replace(settings, model=settings.model.with_vocabulary(size, settings.parallel.tp))


def run_of(settings: RunConfig, device: torch.device = torch.device("cpu")) -> Run:
    """A run on this process's ranks (or alone)."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    mesh = Mesh.single(device) if alone else Mesh.build(settings.parallel, device)
    dtype = getattr(torch, settings.precision.dtype)
    kernels = select(Need(device=device.type, dtype=dtype), settings.model.kernel_wishes)
    return Run(args=argparse.Namespace(), config=settings, mesh=mesh, kernels=kernels, tokenizer=NullTokenizer(VOCABULARY - 1),
               streams=RandomStreams.build(mesh, settings.train.seed), timers=Timers(level=0), log=logging.getLogger("tiny"))


def gpt(run: Run, stage: StageSpec) -> GPTModel:
    """The model provider."""
    return GPTModel(stage, run.build)


def forward_step(run: Run, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
    """The forward step of pretrain_gpt."""
    batch = next(batches)
    output = stage(ids=batch.tokens, hidden=batch.hidden, labels=batch.labels, positions=batch.positions,
                   documents=batch.documents, side=batch.side, ahead=batch.ahead)
    return output, lambda losses: language_loss(losses, batch, run.config.model.mtp)


def samples(settings: RunConfig, iteration: int) -> dict[str, np.ndarray]:
    """The global batch of an iteration: random ids, and a loss mask with very uneven rows."""
    random = np.random.default_rng((settings.train.seed, iteration))
    shape = (settings.train.global_batch_size, settings.train.seq_length)
    window = random.integers(0, VOCABULARY, (shape[0], shape[1] + 1))
    kept = random.random(shape) < random.uniform(0.1, 1.0, (shape[0], 1))
    kept[:, 0] = True
    ends = random.random(shape) < 0.15
    documents = np.cumsum(ends, axis=1) - ends
    if settings.model.architecture != "gpt":
        return _with_padding(settings, random, window, kept)
    starts = np.maximum.accumulate(np.where(np.diff(documents, axis=1, prepend=-1) > 0, np.arange(shape[1]), 0), axis=1)
    return {"tokens": window[:, :-1].copy(), "labels": window[:, 1:].copy(), "loss_mask": kept.astype(np.float32),
            "documents": documents, "positions": np.arange(shape[1]) - starts}


def _with_padding(settings: RunConfig, random: np.random.Generator, window: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
    """The global batch of a BERT or a T5: rows of very uneven length, and what else their samples hold."""
    train = settings.train
    lengths = random.integers(1, train.seq_length + 1, (len(window), 1))
    padding = np.arange(train.seq_length) < lengths
    if settings.model.architecture == "bert":
        return {"tokens": window[:, :-1].copy(), "labels": window[:, 1:].copy(), "loss_mask": (kept & padding).astype(np.int64),
                "types": random.integers(0, 2, padding.shape), "padding_mask": padding.astype(np.int64),
                "is_random": random.integers(0, 2, len(window))}
    size = train.decoder_seq_length
    return {"tokens": window[:, :-1].copy(), "enc_mask": padding.astype(np.int64), "loss_mask": kept[:, :size].astype(np.int64),
            "text_dec": random.integers(0, VOCABULARY, (len(window), size)), "labels": random.integers(0, VOCABULARY, (len(window), size))}


def batches(run: Run, iteration: int) -> Iterator[Batch]:
    """This rank's microbatches of an iteration, in the order of the single sampler; those of all ranks regrouped, if asked."""
    if run.config.parallel.hybrid_context_parallel:
        return Regrouped(rows(run, iteration, Axis("dp")), run.mesh, run.config)
    return rows(run, iteration, run.mesh.dp)


def rows(run: Run, iteration: int, axis: Axis) -> Iterator[Batch]:
    """The microbatches of one rank of a data axis."""
    whole, train = samples(run.config, iteration), run.config.train
    data = run.config.data
    for start in range(0, train.global_batch_size, train.micro_batch_size * axis.size):
        first = start + axis.rank * train.micro_batch_size
        own = {name: torch.from_numpy(array[first:first + train.micro_batch_size]).to(run.mesh.device)
               for name, array in whole.items()}
        batch = Batch(tokens=own["tokens"], labels=own["labels"], loss_mask=own["loss_mask"],
                      positions=own["positions"] if data.reset_position_ids else None,
                      documents=own["documents"] if data.reset_attention_mask else None,
                      extras={name: row for name, row in own.items() if name not in Batch.__slots__})
        yield batch.looking_ahead(run.config.model.mtp.mtp_num_layers or 0).over_context(run.mesh.cp)


PROVIDERS = {"gpt": (gpt, forward_step), "bert": (pretrain_bert.model, pretrain_bert.forward_step),
             "t5": (pretrain_t5.model, pretrain_t5.forward_step)}


def trainer_of(run: Run) -> Trainer:
    """A trainer of the tiny network that the config speaks of."""
    return build_trainer(run, *PROVIDERS[run.config.model.architecture])
