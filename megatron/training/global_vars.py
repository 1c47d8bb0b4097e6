"""get_args() and friends, for user scripts written against Megatron. Our own code never calls them."""

from __future__ import annotations

import argparse

from megatron.core.tokenizers.base import Tokenizer
from megatron.training.report.timers import Timers
from megatron.training.run import Run

_RUN: Run | None = None


def set_run(run: Run) -> None:
    """Make this the run that the functions below speak of. Called once, by initialize_megatron."""
    global _RUN
    _RUN = run


def get_run() -> Run:
    """The installed run."""
    if _RUN is None:
        raise RuntimeError("no run is installed; call initialize_megatron first")
    return _RUN


def get_args() -> argparse.Namespace:
    """The namespace of the command line."""
    return get_run().args


def get_tokenizer() -> Tokenizer:
    """The tokenizer."""
    return get_run().tokenizer


def get_timers() -> Timers:
    """The timers."""
    return get_run().timers
