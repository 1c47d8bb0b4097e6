"""get_args() and friends, for user scripts written against Megatron. Our own code never calls them."""

from __future__ import annotations

import argparse

from megatron.core.tokenizers.base import Tokenizer
from megatron.training.report.timers import Timers
from megatron.training.state.run import RunContext

_RUN: RunContext | None = None
_ARGS = argparse.Namespace()


def set_global_run(run: RunContext) -> None:
    """Set the global run that the getters of this module return. Called once, by initialize_megatron."""
    global _RUN, _ARGS
    _RUN, _ARGS = run, argparse.Namespace(**run.given)


def get_global_run() -> RunContext:
    """Return the global run; `RuntimeError` before initialize_megatron."""
    if _RUN is None:
        raise RuntimeError("no run is installed; call initialize_megatron first")
    return _RUN


def get_args() -> argparse.Namespace:
    """Return the namespace of the command line."""
    get_global_run()
    return _ARGS


def get_tokenizer() -> Tokenizer:
    """Return the run's tokenizer."""
    return get_global_run().tokenizer


def get_timers() -> Timers:
    """Return the run's timers."""
    return get_global_run().timers
