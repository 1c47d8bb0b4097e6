#!/usr/bin/env python3
"""Associative recall (Arora et al., 2023, arXiv 2312.04927): a layer of attention among Mamba-2's recalls what a state cannot hold.

    python examples/hybrid/associative_recall.py runs/recall [--steps N] [--pairs N]

A text is a list of pairs of a key and a value, and the same pairs in another order; the loss is that of the values in the second half, each
of which follows from its key alone. Texts grow from two pairs on in the first half of training. Two networks learn it, in turn: one layer of attention to three of Mamba-2, and Mamba-2 alone.
Writes accuracy.json and accuracy.svg; needs the package matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from matplotlib.figure import Figure

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.hybrid import HybridConfig
from megatron.core.config.settings.model import ModelConfig, PositionConfig
from megatron.core.config.settings.optim import OptimizerConfig, ScheduleConfig
from megatron.core.config.settings.run import RunConfig, TrainConfig
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.tokenizers.build import NullTokenizer
from megatron.training.state.batch import Batch, LossFunction, masked_loss_sum
from megatron.training.state.run import RunContext
from megatron.training.state.step import train_step
from megatron.training.state.trainer import build_trainer

KEYS, VALUES = 32, 32
PATTERNS = {"hybrid": "MM*M", "Mamba-2 alone": "MMMM"}
Curve = list[tuple[int, float]]


def settings(pattern: str, pairs: int, steps: int) -> RunConfig:
    """Everything about a run."""
    config = RunConfig(
        model=ModelConfig(
            hidden_size=64,
            num_attention_heads=2,
            normalization="RMSNorm",
            add_bias_linear=False,
            init_method_std=0.1,
            untie_embeddings_and_output_weights=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            rope=PositionConfig(position_embedding_type="none"),
            hybrid=HybridConfig(hybrid_layer_pattern=pattern, mamba_head_dim=32, mamba_num_groups=1, mamba_state_dim=4),
        ),
        train=TrainConfig(seq_length=4 * pairs, micro_batch_size=32, global_batch_size=32, train_iters=steps),
        optimizer=OptimizerConfig(adam_beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(lr=3e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_fraction=0.1),
    ).resolve(1)
    return replace(config, model=config.model.with_vocabulary(KEYS + VALUES, 1))


def microbatches(most: int, size: int, seed: int, growth: int = 0) -> Iterator[Batch]:
    """Texts drawn anew for every batch: of `most` pairs, or in the first `growth` batches of fewer, from two on."""
    random = torch.Generator().manual_seed(seed)
    for batch in itertools.count():
        pairs = min(most, 2 + batch * (most - 2) // growth) if growth else most
        keys = torch.rand(size, KEYS, generator=random).argsort(dim=1)[:, :pairs]
        values = torch.randint(KEYS, KEYS + VALUES, (size, pairs), generator=random)
        order = torch.rand(size, pairs, generator=random).argsort(dim=1)
        both = torch.stack((keys, values), dim=2)
        again = both.gather(1, order[..., None].expand(-1, -1, 2))
        tokens = torch.cat((both, again), dim=1).flatten(1)
        labels = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
        mask = torch.zeros(tokens.shape)
        mask[:, 2 * pairs :: 2] = 1  # at the keys of the second half
        yield Batch(tokens=tokens, labels=labels, loss_mask=mask)


def forward_step(run: RunContext, batches: Iterator[Batch], stage: GPTModel) -> tuple[torch.Tensor, LossFunction]:
    """One microbatch."""
    batch = next(batches)
    return stage(ids=batch.tokens, labels=batch.labels), lambda losses: masked_loss_sum(losses, batch.loss_mask)


def model(run: RunContext, stage: StageSpec) -> GPTModel:
    """The whole network."""
    return GPTModel(stage, run.layer_build_context)


@torch.no_grad()
def accuracy(network: torch.nn.Module, batch: Batch) -> float:
    """The share of values that the network ranks first."""
    predicted = network(ids=batch.tokens)[..., : KEYS + VALUES].argmax(dim=-1).t()
    assert batch.loss_mask is not None, "recalled values are marked"
    return float(((predicted == batch.labels) * batch.loss_mask).sum() / batch.loss_mask.sum())


def learn(pattern: str, pairs: int, steps: int) -> tuple[int, Curve]:
    """Train a network. Returns its number of parameters, and its accuracy on texts that it was not trained with, by step."""
    config, mesh = settings(pattern, pairs, steps), Mesh.single_process(torch.device("cpu"))
    run = RunContext(
        config=config,
        mesh=mesh,
        kernels=select_kernels(KernelRequirements()),
        tokenizer=NullTokenizer(KEYS + VALUES),
        streams=RandomStreams.build(mesh, config.train.seed),
        log=logging.getLogger(),
    )
    trainer = build_trainer(run, model, forward_step)
    (network,) = trainer.stages
    batches, unseen = microbatches(pairs, 32, seed=0, growth=steps // 2), next(microbatches(pairs, 64, seed=1))
    curve, start = Curve(), time.process_time()
    for step in range(1, steps + 1):
        train_step(trainer, batches)
        if step % 50 == 0 or step == steps:
            curve.append((step, accuracy(network, unseen)))
            print(
                f"{pattern}  step {step:5d}  accuracy {curve[-1][1]:.3f}  {time.process_time() - start:.0f} CPU s",
                flush=True,
            )
    return sum(one.numel() for one in network.parameters()), curve


def draw(curves: dict[str, Curve], pairs: int, path: Path) -> None:
    """The curves as a picture."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.axhline(0.95, color="gray", linewidth=0.7, linestyle="--")
    axes.set(xlabel="step", ylabel="values recalled", ylim=(0, 1.02), title=f"{pairs} pairs of a key and a value")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Train both networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument("--steps", type=int, default=600, help="training steps of each network (default: 600)")
    parser.add_argument("--pairs", type=int, default=16, help=f"pairs of a text, up to {KEYS} (default: 16)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    curves = dict[str, Curve]()
    for name, pattern in PATTERNS.items():
        parameters, curves[name] = learn(pattern, options.pairs, options.steps)
        print(f"{name} ({pattern}, {parameters:,} parameters): {curves[name][-1][1]:.1%} of the values")
    (options.folder / "accuracy.json").write_text(json.dumps(curves), encoding="utf-8")
    draw(curves, options.pairs, options.folder / "accuracy.svg")


if __name__ == "__main__":
    main()
