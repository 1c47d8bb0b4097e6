"""The command line of finetune.py: the flags of every run and those of `PreferenceConfig`, checked together."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.flags import from_namespace, given_words
from megatron.core.config.settings.run import RequestedRun
from megatron.preference.settings import PreferenceConfig, problems
from megatron.training.cli.arguments import parse_args

UNKNOWN = 1_000_000  # iterations of a run in epochs, until its data are read


def defaults_of(words: Sequence[str]) -> Mapping[str, Any]:
    """What the flags of a run are in finetune.py where they are not given. Epochs become iterations once the data are read."""
    given = given_words(words)
    task = given.get("--finetune-task", PreferenceConfig().finetune_task)
    defaults: dict[str, Any] = {"tokenizer_type": "GPT2BPETokenizer", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    if task == "sft":
        defaults |= {"sft": True}
    else:
        defaults |= {"reset_attention_mask": True, "reset_position_ids": True, "reward_head": task == "reward"}
    return defaults | ({"train_iters": UNKNOWN} if "--finetune-epochs" in given else {})


def preference_problems(args: Namespace, world_size: int) -> list[str]:
    """What is wrong between the flags of finetuning and those of the run, a line each."""
    run = from_namespace(RequestedRun, args).resolve(world_size)
    given = {name for name, origin in args.origins.items() if origin in ("command line", "file")}
    return list(problems(from_namespace(PreferenceConfig, args), run, given))


def parse_preference_args(
    argv: Sequence[str] | None = None, *, world_size: int, speaks: bool
) -> tuple[Namespace, PreferenceConfig]:
    """The namespace and the settings of a run that can start. Says what is wrong and exits with code 2 otherwise.

    argv: left out, the words of this process. world_size: ranks that will run; speaks: this rank is the one that says what is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(
        argv,
        defaults=defaults_of(argv),
        extra=(PreferenceConfig,),
        world_size=world_size,
        speaks=speaks,
        reads_data="lines",
        own_problems=preference_problems,
    )
    return args, from_namespace(PreferenceConfig, args)
