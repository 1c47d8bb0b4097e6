"""The command line of finetune.py: the flags of every run and those of `PreferenceConfig`, checked together."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from megatron.core.config.flags import from_namespace
from megatron.core.config.settings.run import RequestedRun
from megatron.preference.settings import PreferenceConfig, problems
from megatron.training.cli.arguments import parse_args

DEFAULTS = {
    "tokenizer_type": "GPT2BPETokenizer",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "reset_attention_mask": True,
    "reset_position_ids": True,
}


def preference_problems(args: Namespace, world_size: int) -> list[str]:
    """What is wrong between the flags of preference optimization and those of the run, a line each."""
    run = from_namespace(RequestedRun, args).resolve(world_size)
    return list(problems(from_namespace(PreferenceConfig, args), run))


def parse_preference_args(
    argv: Sequence[str] | None = None, *, world_size: int, speaks: bool
) -> tuple[Namespace, PreferenceConfig]:
    """The namespace and the settings of a run that can start. Says what is wrong and exits with code 2 otherwise.

    argv: left out, the words of this process. world_size: ranks that will run; speaks: this rank is the one that says what is wrong.
    """
    args = parse_args(
        sys.argv[1:] if argv is None else argv,
        defaults=DEFAULTS,
        extra=(PreferenceConfig,),
        world_size=world_size,
        speaks=speaks,
        reads_data=False,
        own_problems=preference_problems,
    )
    return args, from_namespace(PreferenceConfig, args)
