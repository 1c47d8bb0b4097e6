"""What may take part when a run saves, and when it resumes: `trainer.state_hooks`.

    save   state of the run -> chosen -> files
    load   source -> opened -> (state of the run -> targets) -> tensors are filled -> loaded

Hooks are called in their order, each with what the one before it returned, on every rank. A hook inherits from `StateHooks` and
overrides what it needs. What a hook of a script of your own saves is called `run.hooks.<name>`, so that resume_check compares it.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.dist_checkpointing.sharded_state import Tree
from megatron.core.dist_checkpointing.source import CheckpointSource, FilteredCheckpointSource

UNTRAINED = "run.untrained_weights"  # value of a checkpoint: patterns of weights that a script of one's own froze
OPTIONAL = "run.optional_weights"  # value of a checkpoint: prefixes of weights that only a run of the same kind needs


class StateHooks:
    """Base class of hooks into checkpoints; each method changes nothing. The names of a tree are those of
    checkpointing.py: `model.*`, `optimizer.*`, `run.*`.
    """

    def chosen(self, state: Tree) -> Tree:
        """Return what is saved, of what the run and earlier hooks save. state: without `run.optimizer_steps` under --no-save-optim."""
        return state

    def opened(self, source: CheckpointSource) -> CheckpointSource:
        """Return the source that is read, with what it lacks added. Raises `CheckpointError` if it is not for this run."""
        return source

    def targets(self, source: CheckpointSource, state: Tree) -> Tree:
        """Return what is filled from a source. state: without `run.optimizer_steps` if the optimizer starts afresh."""
        return state

    def loaded(self, source: CheckpointSource) -> None:
        """Called when weights and optimizer state are filled."""


class OptionalWeights(StateHooks):
    """Saves weights, those with these prefixes, that a run of another kind need not have."""

    def __init__(self, *prefixes: str) -> None:
        self.prefixes = prefixes

    def chosen(self, state: Tree) -> Tree:
        """Record the prefixes beside the weights."""
        return {**state, OPTIONAL: list(self.prefixes)}


class UnusedWeights(StateHooks):
    """Leaves weights, those with this prefix, in the checkpoints that have them."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def opened(self, source: CheckpointSource) -> CheckpointSource:
        """Leave them out."""
        return FilteredCheckpointSource(source, lambda name: not name.startswith(self.prefix))


class MissingWeights(StateHooks):
    """Keeps the initial values of weights, those with this prefix, where a checkpoint has none of them. note: what is then logged."""

    def __init__(self, prefix: str, note: str, *, log: Callable[[str], None]) -> None:
        self.prefix, self.note, self._log = prefix, note, log

    def targets(self, source: CheckpointSource, state: Tree) -> Tree:
        """Do not fill them."""
        if any(name.startswith(self.prefix) for name in source.formats):
            return state
        self._log(self.note)
        return {name: value for name, value in state.items() if not name.startswith(self.prefix)}
