"""Tiny runs: configs, batches and trainers small enough to be trained in a test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import pretrain_bert
import pretrain_t5
import pretrain_vision_classify
from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.kernels.choice.run_requirements import kernel_requirements
from megatron.core.kernels.choice.startup_check import select_kernels_with_trials
from megatron.core.kernels.choice.table import KernelRequirements
from megatron.core.models.decoders import build_decoder
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tokenizers.build import NullTokenizer
from megatron.training.state.batch import Batch, LossFunction, language_loss_with_mtp
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import Trainer, build_trainer
from megatron.verify.parity.short_run import random_global_batch, random_microbatches_of_rank, short_run_batches  # noqa: F401 - from here tests take them

DEVICE = torch.device(os.environ.get("MEGATRON_TEST_DEVICE", "cpu"))
VOCABULARY = 50  # not a multiple of anything: padding is always at work
BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
    "lr": 1e-2,
    "min_lr": 1e-3,
    "lr_decay_style": "cosine",
    "train_iters": 8,
    "clip_grad": 0.5,
    "weight_decay": 0.1,
    "mock_data": True,
    "seed": 7,
    "num_workers": 0,
}


def config(world_size: int = 1, **changes: Any) -> RunConfig:
    """The base config with changes, resolved and with its vocabulary."""
    run = config_from_flat_dict(RequestedRun, {**BASE, **changes}).resolve(world_size)
    return replace(run, model=run.model.with_vocabulary(VOCABULARY, run.parallel.tp))


def with_vocabulary(settings: RunConfig, size: int) -> RunConfig:
    """The config with another vocabulary."""
    return replace(settings, model=settings.model.with_vocabulary(size, settings.parallel.tp))


def run_of(settings: RunConfig, device: torch.device = DEVICE) -> RunContext:
    """A run on this process's ranks (or alone)."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    mesh = Mesh.single_process(device) if alone else Mesh.build(settings.parallel, device)
    dtype = getattr(torch, settings.precision.param_dtype_name)
    need = KernelRequirements(device=device.type, dtype=dtype, low=settings.precision.low)
    if device.type == "cuda":
        need = kernel_requirements(settings, device)
    return RunContext(
        config=settings,
        mesh=mesh,
        kernels=select_kernels_with_trials(settings, need, device).kernels,
        tokenizer=NullTokenizer(VOCABULARY),
        streams=RandomStreams.build(mesh, settings.train.seed),
        log=logging.getLogger("tiny"),
    )


def gpt(run: RunContext, stage: StageSpec) -> GPTModel:
    """The model provider."""
    return build_decoder(stage, run.layer_build_context)


def forward_step(run: RunContext, microbatches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
    """The forward step of pretrain_gpt."""
    batch = next(microbatches)
    output = stage(
        ids=batch.token_ids_with_images,
        hidden=batch.hidden,
        labels=batch.masked_labels,
        positions=batch.positions,
        documents=batch.documents,
        microbatch_context=batch.microbatch_context,
        ahead=batch.mtp_inputs,
    )
    return output, lambda losses: language_loss_with_mtp(losses, batch, run.config.model.mtp)


PROVIDERS = {
    "gpt": (gpt, forward_step),
    "bert": (pretrain_bert.model_provider, pretrain_bert.forward_step),
    "t5": (pretrain_t5.model_provider, pretrain_t5.forward_step),
    "vit": (pretrain_vision_classify.model_provider, pretrain_vision_classify.forward_step),
}


def trainer_of(run: RunContext) -> Trainer:
    """A trainer of the tiny network that the config speaks of."""
    return build_trainer(run, *PROVIDERS[run.config.model.architecture.name])
