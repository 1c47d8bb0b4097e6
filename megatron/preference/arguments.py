"""The command line of finetune.py: the flags of every run and those of `PreferenceConfig`, checked together."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.cli.arguments import parse_args
from megatron.core.config.flags.declare import config_from_flat_dict, config_from_namespace, raw_flag_values
from megatron.core.config.settings.run import RequestedRun
from megatron.preference.settings import PreferenceConfig, preference_config_problems

if TYPE_CHECKING:
    from megatron.training.checked_run import CheckedRun

UNKNOWN = 1_000_000  # iterations of a run in epochs, until its data are read


def preference_flag_defaults(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the defaults of a run's flags in finetune.py, as its task needs them. Epochs become iterations once the
    data are read.
    """
    given = raw_flag_values(words)
    task = given.get("--finetune-task", PreferenceConfig().finetune_task)
    defaults: dict[str, Any] = {"tokenizer_type": "GPT2BPETokenizer", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    if task == "sft":
        defaults |= {"sft": True}
    else:
        defaults |= {"reset_attention_mask": True, "reset_position_ids": True, "reward_head": task == "reward"}
    return defaults | ({"train_iters": UNKNOWN} if "--finetune-epochs" in given else {})


def preference_flag_problems(args: Namespace, world_size: int) -> list[str]:
    """Return a line for each problem between the flags of finetuning and those of the run."""
    run = config_from_namespace(RequestedRun, args).resolve(world_size)
    given = {name for name, origin in args.origins.items() if origin in ("command line", "file")}
    return list(preference_config_problems(config_from_namespace(PreferenceConfig, args), run, given))


def parse_preference_args(
    argv: Sequence[str] | None = None, *, world_size: int, speaks: bool
) -> tuple[CheckedRun, PreferenceConfig]:
    """Parse and check the command line; print what is wrong and exit with code 2 otherwise.

    argv: None: this process's. world_size: ranks that will run. speaks: this rank prints what is wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    checked = parse_args(
        argv,
        defaults=preference_flag_defaults(argv),
        extra=(PreferenceConfig,),
        world_size=world_size,
        speaks=speaks,
        reads_data="lines",
        own_problems=preference_flag_problems,
    )
    return checked, config_from_flat_dict(PreferenceConfig, checked.given)
