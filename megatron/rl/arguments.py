"""The command line of train_rl.py: the flags of every run and those of `RLConfig`, checked together."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.flags import from_namespace, given_words
from megatron.core.config.rules.engine import NEEDS, broken_rules
from megatron.core.config.rules.rule import RuleInput
from megatron.core.config.settings.run import RequestedRun
from megatron.rl.settings import RLConfig, generation_config, problems
from megatron.training.cli.arguments import parse_args


def defaults_of(words: Sequence[str]) -> Mapping[str, Any]:
    """What the flags of a run are in train_rl.py where they are not given: a global batch is a whole round of rollouts."""
    given = given_words(words)
    rl = RLConfig()
    sizes = [
        given.get(f"--{name.replace('_', '-')}", str(getattr(rl, name)))
        for name in ("grpo_prompts_per_step", "grpo_group_size")
    ]
    batch = int(sizes[0]) * int(sizes[1]) if all(size.isdecimal() for size in sizes) else 0
    return {
        "tokenizer_type": "GPT2BPETokenizer",
        "mock_data": True,
        "eval_iters": 0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "global_batch_size": batch or None,
    }


def num_training_ranks(words: Sequence[str], world_size: int) -> int:
    """How many of the ranks of a job train: all but those of --rl-generation-ranks, which Ray starts beside them with
    --rl-ray-address. 0 or less: none is left.
    """
    given = given_words(words)
    count = "0" if "--rl-ray-address" in given else given.get("--rl-generation-ranks", "0")
    return world_size - int(count) if count.isdecimal() else world_size


def no_training_ranks_message(world_size: int) -> str:
    """What is wrong where --rl-generation-ranks leaves no rank to train."""
    return f"--rl-generation-ranks leaves none of the {world_size} ranks of the job to train; give fewer, or start more ranks"


def rl_problems(args: Namespace, world_size: int) -> list[str]:
    """What is wrong between the flags of reinforcement learning and those of the run, a line each."""
    rl, requested = from_namespace(RLConfig, args), from_namespace(RequestedRun, args)
    run = requested.resolve(world_size)
    lines = list(problems(rl, run))
    if rl.needs_network_copy(run) and not any(rule.says(RuleInput(run, world_size)) for rule in NEEDS):
        generating = broken_rules(
            generation_config(run, rl.inference_parallel_sizes), rl.rl_generation_ranks or world_size
        )
        lines += [f"the network that generates: {message}" for _, message in generating]
    return lines


def parse_rl_args(argv: Sequence[str] | None = None, *, world_size: int, speaks: bool) -> tuple[Namespace, RLConfig]:
    """The namespace and the settings of a run that can start. Says what is wrong and exits with code 2 otherwise.

    argv: left out, the words of this process. world_size: ranks of the job; speaks: this rank is the one that says what is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    ranks = num_training_ranks(argv, world_size)
    if ranks < 1:
        if speaks:
            sys.stderr.write(f"ConfigError: {no_training_ranks_message(world_size)}\n")
        raise SystemExit(2)
    args = parse_args(
        argv,
        defaults=defaults_of(argv),
        extra=(RLConfig,),
        world_size=ranks,
        speaks=speaks,
        reads_data="datasets",
        own_problems=rl_problems,
    )
    return args, from_namespace(RLConfig, args)
