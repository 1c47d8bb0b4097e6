"""The tensors of a run by their global names: what this rank saves of them, and what a load fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.sharded_state import (
    Tree,
    add_sharded_tensor,
    sharded_optimizer_state,
    sharded_parameter,
)
from megatron.core.dist_checkpointing.source import CheckpointSource, ShapeAndDtype
from megatron.core.dist_checkpointing.state_hooks import StateHooks
from megatron.core.distributed.buffers import OwnedSegment
from megatron.core.parallel.spec import param_spec_of
from megatron.core.tensor_parallel.low_precision import LowPrecisionScaling, delayed_scalings_by_layer
from megatron.training.state.trainer import Trainer

Formats = Mapping[str, ShapeAndDtype]
Slot = tuple[str, OwnedSegment, Tensor]


def weights_of(trainer: Trainer, *, rounded: bool = False) -> Tree:
    """The weights that this rank holds: views of them, which are gathered. rounded: as they work, also where a rank has
    only their main weights.
    """
    weights: Tree = {}
    for parallel in trainer.parallels:
        parallel.finish_gather()
        for param in parallel.whole_params:
            add_sharded_tensor(
                weights, f"model.{param_spec_of(param).name}", sharded_parameter(param, trainer.run.mesh)
            )
        for segment in parallel.sharded_segments:
            values = segment.data.to(segment.rounds_to) if rounded and segment.rounds_to else segment.data
            add_sharded_tensor(
                weights, f"model.{segment.name}", sharded_optimizer_state(segment, values, trainer.run.mesh)
            )
    return weights


def random_stream_states(trainer: Trainer) -> Tree:
    """The streams of dropout of this rank, by its place in the layout."""
    place = f"{trainer.run.mesh.pp.rank}.{trainer.run.mesh.tp.rank}.{trainer.run.mesh.dp_cp.rank}"
    return {f"run.random.{place}.{name}": value for name, value in trainer.run.streams.state().items()}


def checkpoint_load_targets(trainer: Trainer, formats: Formats, slots: Sequence[Slot], *, optimizer: bool) -> Tree:
    """What a load fills: weights, and slots of the optimizer. Masters that are not in the checkpoint, or not asked
    for, are filled from the weights, in the precision in which those were saved."""
    tensors = weights_of(trainer)
    for slot, segment, tensor in slots:
        name = f"optimizer.{slot}.{segment.name}"
        if slot == "master" and not (optimizer and name in formats):
            add_sharded_tensor(
                tensors, f"model.{segment.name}", sharded_optimizer_state(segment, tensor, trainer.run.mesh)
            )
        elif optimizer:
            add_sharded_tensor(tensors, name, sharded_optimizer_state(segment, tensor, trainer.run.mesh))
    return tensors


def main_weights_to_read_instead(trainer: Trainer, formats: Formats) -> dict[str, str]:
    """Weights to read from their main weights: those saved in another format than this run's, so as to round only once."""
    replacements = {}
    for stage in trainer.stages:
        for param in stage.parameters():
            name, master = f"model.{param_spec_of(param).name}", f"optimizer.master.{param_spec_of(param).name}"
            if master in formats and name in formats and formats[name].dtype != param.dtype:
                replacements[name] = master
    return replacements


def resolve_missing_weights(trainer: Trainer, state: Tree, formats: Formats) -> tuple[Tree, dict[str, str]]:
    """Return (the state without weights that keep their initial values, name -> name of what is read instead).

    Read instead: fp32 main weights (`optimizer.master.*`) for weights saved in another dtype, and for a weight that the
    checkpoint lacks the one that `ParamSpec.starts_from` names.
    """
    replacements = main_weights_to_read_instead(trainer, formats)
    for param in (param for stage in trainer.stages for param in stage.parameters()):
        name, start = f"model.{param_spec_of(param).name}", param_spec_of(param).starts_from
        if start is None or name in formats:
            continue
        if start:
            replacements[name] = f"model.{start}"
        else:
            state = {other: value for other, value in state.items() if other != name}
    return state, replacements


def refresh_after_load(trainer: Trainer, slots: Sequence[Slot]) -> None:
    """Let everybody know that weights and slots were written."""
    trainer.optimizer.apply_loaded_state(slots)
    for parallel in trainer.parallels:
        parallel.regather_loaded_params()


class AmaxHistories(StateHooks):
    """Saves the largest values of earlier steps (`run.amax.<layer>`), from which delayed scaling computes its scales."""

    def __init__(self, stages: Sequence[nn.Module], device: torch.device, *, log: Callable[[str], None]) -> None:
        self._stages, self._device, self._log = stages, device, log
        self._read: dict[str, Tensor] = {}

    @property
    def _scalings(self) -> dict[str, LowPrecisionScaling]:
        """The layers' scalings, by the names under which their histories are saved."""
        return {f"run.amax.{name}": one for name, one in delayed_scalings_by_layer(self._stages).items()}

    def chosen(self, state: Tree) -> Tree:
        """Add the histories: they go with the optimizer."""
        if "run.optimizer_steps" not in state:
            return state
        return state | {name: scaling.history for name, scaling in self._scalings.items()}

    def targets(self, source: CheckpointSource, state: Tree) -> Tree:
        """Add the histories that the source has; those that it lacks are logged."""
        requested = self._scalings if "run.optimizer_steps" in state else {}
        self._read = {
            name: torch.zeros(source.formats[name].shape, device=self._device)
            for name in requested
            if name in source.formats
        }
        if len(self._read) < len(requested):
            self._log(
                f"the checkpoint has no history of {len(requested) - len(self._read)} of {len(requested)} layers with delayed scales: "
                "in the next step these scale by their own values"
            )
        return state | self._read

    def loaded(self, source: CheckpointSource) -> None:
        """Give the layers their histories, whose length may be another."""
        scalings = self._scalings
        for name, history in self._read.items():
            scalings[name].load_amax_history(history)
        self._read = {}
