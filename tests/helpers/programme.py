"""Whole runs in this process: what a command line does, without a launcher and without leaving anything behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import pretrain_gpt
from megatron.cli.arguments import parse_args_unchecked
from megatron.cli.preflight import check_arguments
from megatron.core.config.flags.declare import raise_config_error_if
from megatron.core.datasets.indexed import IndexedDatasetBuilder
from megatron.training.checked_run import CheckedRun
from megatron.training.initialize import initialize_megatron
from megatron.training.loader import DatasetProvider
from megatron.training.loop import pretrain
from megatron.training.state.hooks import StepHooks
from megatron.training.state.run import RunContext
from megatron.training.state.trainer import ForwardStep

VOCABULARY = 30  # and the end of document
SEQUENCE = 16
# The smallest run that there is; what a test adds behind wins.
TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --global-batch-size 4 "
    f"--lr 1e-2 --tokenizer-type NullTokenizer --vocab-size {VOCABULARY + 1} --num-workers 0 --eval-iters 0 "
    "--log-interval 1000 --make-vocab-size-divisible-by 8"
).split()


def checked(argv: Sequence[str], *, world_size: int = 1) -> CheckedRun:
    """A command line that was checked; `ConfigError` with all that is wrong."""
    run = check_arguments(parse_args_unchecked(argv), world_size)
    raise_config_error_if(line for _, line in run.problems)
    return run


def started(argv: Sequence[str]) -> RunContext:
    """A run up to where providers are called. Lines go to the standard output of now."""
    log = logging.getLogger("megatron")
    log.handlers.clear()
    return initialize_megatron(checked([*TINY, *argv]))


def trained(
    argv: Sequence[str],
    *,
    datasets: DatasetProvider = pretrain_gpt.datasets_provider,
    forward_step: ForwardStep = pretrain_gpt.forward_step,
    hooks: Sequence[StepHooks] = (),
) -> RunContext:
    """pretrain_gpt, with these flags behind TINY."""
    run = started(argv)
    try:
        pretrain(
            run,
            datasets,
            pretrain_gpt.model_provider,
            forward_step,
            pretrain_gpt.make_eval_generate_function,
            hooks=hooks,
        )
    finally:
        logging.getLogger("megatron").handlers.clear()
        if torch.are_deterministic_algorithms_enabled():  # to say so at all imports the compiler
            torch.use_deterministic_algorithms(False)
    return run


def write_tokens(prefix: Path, *, documents: int = 60, seed: int = 0) -> list[str]:
    """A small pair of files of random walks over the ids, and the flags that read it."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(str(prefix), np.dtype(np.uint16)) as builder:
        for length in random.integers(20, 60, documents):
            steps = random.integers(0, 3, length)
            builder.add_sequence(np.append(np.cumsum(steps) % VOCABULARY, VOCABULARY).astype(np.uint16))
            builder.end_document()
    return ["--data-path", str(prefix), "--split", "60,20,20"]
