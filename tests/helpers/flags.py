"""Command lines in tests that need neither files nor a machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.cli.arguments import parse_args_unchecked
from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.flags.declare import config_from_namespace, raise_config_error_if
from megatron.core.config.settings.run import RequestedRun, RunConfig


def parse_args_or_raise(
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    extra: Sequence[type] = (),
    provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    world_size: int = 1,
) -> argparse.Namespace:
    """The namespace of a command line; `ConfigError` for broken rules between flags."""
    args = parse_args_unchecked(argv, defaults=defaults, extra=extra, provider=provider)
    run_config_of_args(args, world_size)
    return args


def run_config_of_args(args: argparse.Namespace, world_size: int) -> RunConfig:
    """The resolved config of a namespace; `ConfigError` with every broken rule between its flags."""
    config, problems = resolve_and_examine(config_from_namespace(RequestedRun, args), world_size)
    raise_config_error_if([*args.problems, *(message for _, message in problems)])
    return config
