"""The command line of train_rl.py: the flags of every run and those of `RLConfig`, checked together."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.cli.arguments import parse_args
from megatron.core.config.flags.declare import config_from_flat_dict, config_from_namespace, raw_flag_values
from megatron.core.config.rules.engine import NEEDS, broken_rules
from megatron.core.config.rules.rule import ConfigRuleInput
from megatron.core.config.settings.run import RequestedRun
from megatron.rl.settings import RLConfig, generation_run_config, rl_config_problems

if TYPE_CHECKING:
    from megatron.training.checked_run import CheckedRun


def rl_flag_defaults(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the defaults of a run's flags in train_rl.py; the global batch is a whole round of rollouts."""
    given = raw_flag_values(words)
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
    """Return how many of a job's ranks train: all but --rl-generation-ranks, unless Ray starts those in addition. May
    be 0 or less.
    """
    given = raw_flag_values(words)
    count = "0" if "--rl-ray-address" in given else given.get("--rl-generation-ranks", "0")
    return world_size - int(count) if count.isdecimal() else world_size


def no_training_ranks_message(world_size: int) -> str:
    """Return the message that --rl-generation-ranks leaves no rank to train."""
    return f"--rl-generation-ranks leaves none of the {world_size} ranks of the job to train; give fewer, or start more ranks"


def rl_flag_problems(args: Namespace, world_size: int) -> list[str]:
    """Return a line for each problem between the flags of reinforcement learning and those of the run."""
    rl, requested = config_from_namespace(RLConfig, args), config_from_namespace(RequestedRun, args)
    run = requested.resolve(world_size)
    lines = list(rl_config_problems(rl, run))
    if rl.needs_network_copy(run) and not any(rule.problem_message(ConfigRuleInput(run, world_size)) for rule in NEEDS):
        generating = broken_rules(
            generation_run_config(run, rl.inference_parallel_sizes), rl.rl_generation_ranks or world_size
        )
        lines += [f"the network that generates: {message}" for _, message in generating]
    return lines


def parse_rl_args(argv: Sequence[str] | None = None, *, world_size: int, speaks: bool) -> tuple[CheckedRun, RLConfig]:
    """Parse and check the command line; print what is wrong and exit with code 2 otherwise.

    argv: None: this process's. world_size: ranks of the job. speaks: this rank prints what is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    ranks = num_training_ranks(argv, world_size)
    if ranks < 1:
        if speaks:
            sys.stderr.write(f"ConfigError: {no_training_ranks_message(world_size)}\n")
        raise SystemExit(2)
    checked = parse_args(
        argv,
        defaults=rl_flag_defaults(argv),
        extra=(RLConfig,),
        world_size=ranks,
        speaks=speaks,
        reads_data="datasets",
        own_problems=rl_flag_problems,
    )
    return checked, config_from_flat_dict(RLConfig, checked.given)
