#!/usr/bin/env python3
"""The whole library in a hundred lines, without a flag: `python examples/minimal_loop.py` trains a tiny GPT on bytes.

Under `torchrun --nproc_per_node 2` (or 4) the same file trains on several ranks, and prints the same losses: change
TENSOR, PIPELINE or SHARDED and see.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.model import ModelConfig, PositionConfig
from megatron.core.config.settings.optim import OptimizerConfig, ScheduleConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RunConfig, TrainConfig
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tokenizers.build import ByteTokenizer
from megatron.training.state.batch import Batch, LossFunction, masked_loss_sum
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import build_trainer

TENSOR, PIPELINE, SHARDED = 1, 1, True
STEPS = 50


def settings(world_size: int) -> RunConfig:
    """Everything about the run."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            swiglu=True,
            normalization="RMSNorm",
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            rope=PositionConfig(position_embedding_type="rope"),
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=TENSOR, pipeline_model_parallel_size=PIPELINE, use_distributed_optimizer=SHARDED
        ),
        train=TrainConfig(seq_length=128, micro_batch_size=4, global_batch_size=16, train_iters=STEPS),
        optimizer=OptimizerConfig(adam_beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=3e-3, min_lr=3e-4, lr_decay_style="cosine", lr_warmup_fraction=0.1),
    ).resolve(world_size)
    return replace(config, model=config.model.with_vocabulary(ByteTokenizer().vocab_size, TENSOR))


def microbatches(run: RunContext, text: np.ndarray) -> Iterator[Batch]:
    """Random windows of the text: the same for any number of ranks."""
    train, axis = run.config.train, run.mesh.dp
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(text) - train.seq_length - 1, train.micro_batch_size * axis.size)
        own = starts[axis.rank * train.micro_batch_size : (axis.rank + 1) * train.micro_batch_size]
        windows = torch.from_numpy(np.stack([text[start : start + train.seq_length + 1] for start in own]))
        yield Batch(
            tokens=windows[:, :-1], labels=windows[:, 1:].contiguous(), loss_mask=torch.ones(windows[:, 1:].shape)
        )


def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
    """One microbatch through one stage."""
    batch = next(batches)
    output = stage(ids=batch.tokens, hidden=batch.hidden, labels=batch.labels)
    return output, lambda losses: masked_loss_sum(losses, batch.loss_mask)


def model(run: RunContext, stage: StageSpec) -> GPTModel:
    """One pipeline stage."""
    return GPTModel(stage, run.layer_build_context)


def main() -> None:
    """Build the run by hand, and train."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    config = settings(dist.get_world_size() if dist.is_initialized() else 1)
    device = torch.device("cpu")
    mesh = Mesh.build(config.parallel, device) if dist.is_initialized() else Mesh.single_process(device)
    run = RunContext(
        config=config,
        mesh=mesh,
        kernels=select_kernels(KernelRequirements()),
        tokenizer=ByteTokenizer(),
        streams=RandomStreams.build(mesh, config.train.seed),
        log=logging.getLogger(),
    )
    lines = (ROOT / "examples/data/demo_train_small.jsonl").read_text(encoding="utf-8").split("\n")
    text = np.frombuffer("\n".join(json.loads(line)["text"] for line in lines if line).encode(), np.uint8).astype(
        np.int64
    )
    trainer, batches = build_trainer(run, model, forward_step), microbatches(run, text)
    for _ in range(STEPS):
        step = train_step(trainer, batches)
        total, count = collectives.all_reduce(step.losses["lm loss"], mesh.world).tolist()
        if mesh.world.is_first:
            print(f"step {step.iteration:3d}  loss {total / count:.4f}  grad norm {float(step.grad_norm):.3f}")
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()  # or its threads may be at work when the process ends


if __name__ == "__main__":
    main()
