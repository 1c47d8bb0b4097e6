"""The command line of train_rl.py: the flags of every run and those of `RLConfig`, checked together."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.flags import from_namespace
from megatron.core.config.rules.engine import NEEDS, broken
from megatron.core.config.rules.rule import Setting
from megatron.core.config.settings.run import RequestedRun
from megatron.rl.settings import RLConfig, generation_config, problems
from megatron.training.cli.arguments import parse_args


def defaults_of(words: Sequence[str]) -> Mapping[str, Any]:
    """What the flags of a run are in train_rl.py where they are not given: a global batch is a whole round of rollouts."""
    given = dict(zip(words, [*words[1:], ""]))
    given |= dict(word.split("=", 1) for word in words if "=" in word)
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


def rl_problems(args: Namespace, world_size: int) -> list[str]:
    """What is wrong between the flags of reinforcement learning and those of the run, a line each."""
    rl, requested = from_namespace(RLConfig, args), from_namespace(RequestedRun, args)
    run = requested.resolve(world_size)
    lines = list(problems(rl, run))
    if rl.copies_network(run) and not any(rule.says(Setting(run, world_size)) for rule in NEEDS):
        generating = broken(generation_config(run, rl.inference_sizes), world_size)
        lines += [f"the network that generates: {message}" for _, message in generating]
    return lines


def parse_rl_args(argv: Sequence[str] | None = None, *, world_size: int, speaks: bool) -> tuple[Namespace, RLConfig]:
    """The namespace and the settings of a run that can start. Says what is wrong and exits with code 2 otherwise.

    argv: left out, the words of this process. world_size: ranks that will run; speaks: this rank is the one that says what is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(
        argv,
        defaults=defaults_of(argv),
        extra=(RLConfig,),
        world_size=world_size,
        speaks=speaks,
        reads_data=True,
        own_problems=rl_problems,
    )
    return args, from_namespace(RLConfig, args)
