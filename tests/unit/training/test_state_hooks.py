"""Hooks into checkpoints: what they save, add to a source, want to be filled, and are told."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.dist_checkpointing.sharded_state import Tree, replicated_tensor
from megatron.core.dist_checkpointing.source import CheckpointSource, FilteredCheckpointSource
from megatron.core.dist_checkpointing.state_hooks import OPTIONAL, OptionalWeights, StateHooks
from megatron.training.checkpoint.checkpointing import Checkpointer
from megatron.training.checkpoint.resuming import OpenedCheckpoint
from megatron.training.state.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.training import train_on, weights_of
from tests.parity.table import MODELS

PROJECTOR = "vision_projection."


def trainer_of(**changes: Any) -> Trainer:
    return tiny.trainer_of(tiny.run_of(tiny.config(**changes)))


class Noise(StateHooks):
    """A stranger's hook: keeps a tensor and a value of its own in checkpoints."""

    def __init__(self, tensor: torch.Tensor, calls: list[str]) -> None:
        self.tensor, self.calls, self.scale = tensor, calls, 0.0

    def chosen(self, state: Tree) -> Tree:
        return {**state, "noise.tensor": replicated_tensor(self.tensor), "run.noise": {"scale": 3.0}}

    def opened(self, source: CheckpointSource) -> CheckpointSource:
        self.calls.append("opened")
        if "run.noise" not in source.values:
            raise CheckpointError(f"{source.where} has no noise")
        return source

    def targets(self, source: CheckpointSource, state: Tree) -> Tree:
        self.calls.append("targets")
        assert not self.tensor.any(), "nothing is filled yet"
        return {**state, "noise.tensor": replicated_tensor(self.tensor)}

    def loaded(self, source: CheckpointSource) -> None:
        assert self.tensor.all(), "tensors are filled"
        self.calls.append("loaded")
        self.scale = source.values["run.noise"]["scale"]


def test_a_hook_of_the_trainer_saves_and_loads_state_of_its_own(tmp_path: Path) -> None:
    first, calls = trainer_of(save=str(tmp_path)), list[str]()
    first.state_hooks.append(Noise(torch.full((3,), 2.0), calls))
    train_on(first, 1)
    Checkpointer(first).save()
    second = trainer_of(load=str(tmp_path))
    hook = Noise(torch.zeros(3), calls)
    second.state_hooks.append(hook)
    assert Checkpointer(second).resume() and second.progress.iteration == 1
    assert (hook.tensor.tolist(), hook.scale, calls) == ([2.0] * 3, 3.0, ["opened", "targets", "loaded"])
    assert Checkpointer(trainer_of(load=str(tmp_path))).resume(), "without the hook its state is left alone"


def test_a_hook_refuses_a_checkpoint_before_any_tensor_is_changed(tmp_path: Path) -> None:
    first = trainer_of(save=str(tmp_path))
    train_on(first, 1)
    Checkpointer(first).save()
    second = trainer_of(load=str(tmp_path))
    before = {name: value.pieces[0][1].clone() for name, value in weights_of(second).items()}
    second.state_hooks.append(Noise(torch.zeros(3), []))
    with pytest.raises(CheckpointError, match="has no noise"):
        Checkpointer(second).resume()
    assert all(torch.equal(value.pieces[0][1], before[name]) for name, value in weights_of(second).items())


def test_a_hook_gets_what_the_one_before_it_returned(tmp_path: Path) -> None:
    class First(StateHooks):
        def chosen(self, state: Tree) -> Tree:
            return {**state, "run.order": ["first"]}

    class Second(StateHooks):
        def chosen(self, state: Tree) -> Tree:
            return {**state, "run.order": [*state["run.order"], "second"]}

    trainer = trainer_of(save=str(tmp_path))
    trainer.state_hooks += [First(), Second()]
    Checkpointer(trainer).save()
    assert open_native_checkpoint(tmp_path / "iter_0000000").values["run.order"] == ["first", "second"]


class FurtherWeights(StateHooks):
    """Weights of which a run without this hook knows nothing, as it knows nothing of a critic's."""

    def chosen(self, state: Tree) -> Tree:
        return {**state, "model.noise.weight": replicated_tensor(torch.ones(3))}


def test_weights_that_are_said_to_be_optional_are_left_by_a_run_that_has_them_not(tmp_path: Path) -> None:
    for folder, hooks in (("strict", []), ("optional", [OptionalWeights("model.noise.")])):
        trainer = trainer_of(save=str(tmp_path / folder))
        trainer.state_hooks += [FurtherWeights(), *hooks]
        Checkpointer(trainer).save()
    assert open_native_checkpoint(tmp_path / "optional" / "iter_0000000").values[OPTIONAL] == ["model.noise."]
    assert Checkpointer(trainer_of(load=str(tmp_path / "optional"))).resume()
    with pytest.raises(CheckpointError) as refused:
        Checkpointer(trainer_of(load=str(tmp_path / "strict"))).resume()
    (problem,) = refused.value.problems
    assert problem == "model.noise.weight: unexpected, the checkpoint has it and this run does not"


def without_projector(folder: Path) -> OpenedCheckpoint:
    source = open_native_checkpoint(folder / "iter_0000001")
    left = FilteredCheckpointSource(source, lambda name: PROJECTOR not in name)
    assert len(left.formats) < len(source.formats)
    return OpenedCheckpoint(left, weights_only=True)


def test_a_projector_that_a_checkpoint_lacks_starts_afresh_where_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = trainer_of(**MODELS["vlm"], save=str(tmp_path))
    train_on(first, 1)
    Checkpointer(first).save()
    opened, now = without_projector(tmp_path), time.perf_counter()
    with pytest.raises(CheckpointError, match="do not fit this run") as refused:
        Checkpointer(trainer_of(**MODELS["vlm"])).load(opened, now)
    assert all(PROJECTOR in line for line in refused.value.problems)
    second = trainer_of(**MODELS["vlm"], allow_missing_vision_projection_checkpoint=True)
    initial = {name: value.pieces[0][1].clone() for name, value in weights_of(second).items()}
    caplog.set_level(logging.INFO)
    Checkpointer(second).load(opened, now)
    assert "the projector of images starts afresh" in caplog.text
    trained = weights_of(first)
    for name, value in weights_of(second).items():
        expected = initial[name] if name.startswith(PROJECTOR) else trained[name].pieces[0][1]
        assert torch.equal(value.pieces[0][1], expected), name
    caplog.clear()
    whole = OpenedCheckpoint(open_native_checkpoint(tmp_path / "iter_0000001"), weights_only=True)
    Checkpointer(second).load(whole, now)
    assert "starts afresh" not in caplog.text
    assert all(
        torch.equal(value.pieces[0][1], trained[name].pieces[0][1]) for name, value in weights_of(second).items()
    )
