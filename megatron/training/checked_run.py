"""CheckedRun: a run as it would start, or why it cannot. The command line makes one, and initialize_megatron takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.tokenizers.base import Tokenizer

Problem = tuple[str, str]  # name of a rule, what to say
LOCAL = ("files", "machine")  # rules whose answer can be another on another machine


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run as it would start, or why it cannot. config: resolved, with the vocabulary if the tokenizer was read.
    problems: what keeps it from starting. notes: what is accepted and changes nothing, and what could not be checked.
    origins: setting -> where its value came from. ranks: how many of `world_size` train; layouts: as it was given, and as
    --elastic chose for them. given: every flag of the command line, the script's own too.
    """

    config: RunConfig
    tokenizer: Tokenizer | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    origins: Mapping[str, str]
    world_size: int
    ranks: int
    layouts: tuple[ParallelConfig, ParallelConfig]
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_local_problems(self) -> bool:
        """Whether another machine may find other problems."""
        return any(rule in LOCAL for rule, _ in self.problems)
