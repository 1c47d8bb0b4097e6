#!/usr/bin/env python3
"""Continue a text with a checkpoint of any layout, in one process.

    python tools/generate_text.py --load runs/quickstart/checkpoints --prompt "The state of the union is"
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron.core.config.flags import ConfigError, from_values
from megatron.core.config.parallel import ParallelConfig
from megatron.core.config.rules import stages_of
from megatron.core.config.run import RunConfig
from megatron.core.dist_checkpointing import dcp, store
from megatron.core.dist_checkpointing.tree import placed_parameter
from megatron.core.kernels.table import Need, select
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.device import pick_device
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import spec_of
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.transformer.build import Build
from megatron.inference.generate import generate_text
from megatron.inference.sampling import Sampling


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to continue")
    what.add_argument("--load", required=True, metavar="FOLDER", help="folder of checkpoints (the --save of a run)")
    what.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load, instead of the newest")
    what.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    how = parser.add_argument_group("how")
    how.add_argument("--num-tokens", type=int, default=64, metavar="N", help="most tokens to add (default: 64)")
    how.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest (default: 1)")
    how.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest only (default: 0, all)")
    how.add_argument("--top-p", type=float, default=0.0, metavar="P", help="draw from the likeliest that reach P (default: 0, all)")
    how.add_argument("--seed", type=int, default=1234, help="seed of the draws (default: 1234)")
    files = parser.add_argument_group("tokenizer", "Files other than those that the run was given.")
    for name in ("vocab-file", "merge-file", "tokenizer-model"):
        files.add_argument(f"--{name}", metavar="FILE")
    return parser.parse_args(argv)


def load_model(folder: str, step: int | None) -> tuple[GPTModel, RunConfig]:
    """The whole network of a checkpoint in evaluation mode, and the config of the run that saved it."""
    iteration = store.find(folder, step)
    if iteration is None:
        raise store.CheckpointError(f"--load {folder} holds no complete checkpoint")
    path = store.iteration_folder(folder, iteration)
    saved = from_values(RunConfig, store.describe(path).values)
    config = dataclasses.replace(saved, parallel=ParallelConfig())
    mesh = Mesh.single(pick_device())
    dtype = getattr(torch, config.precision.dtype)
    model = dataclasses.replace(config.model, attention_backend="auto")
    build = Build(model=model, mesh=mesh, kernels=select(Need(device=mesh.device.type, dtype=dtype)), dtype=dtype,
                  streams=RandomStreams.build(mesh, config.train.seed))
    (stage,) = stages_of(config)
    network = GPTModel(stage, build).materialize(config.train.seed)
    dcp.load({f"model.{spec_of(param).name}": placed_parameter(param, mesh) for param in network.parameters()}, path,
             complete=("model.",))
    return network.eval(), config


def main(argv: list[str] | None = None) -> None:
    """Load, continue, print."""
    given = options(argv)
    logging.basicConfig(level=logging.WARNING)
    try:
        model, config = load_model(given.load, given.ckpt_step)
        changed = {name: value for name in ("vocab_file", "merge_file", "tokenizer_model")
                   if (value := getattr(given, name)) is not None}
        tokenizer = build_tokenizer(dataclasses.replace(config.tokenizer, **changed))
        sampling = Sampling(given.temperature, given.top_k, given.top_p)
    except (ConfigError, store.CheckpointError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(1) from None
    for prompt in given.prompt:
        text = generate_text(model, tokenizer, prompt, num_tokens=given.num_tokens, sampling=sampling, seed=given.seed)
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
