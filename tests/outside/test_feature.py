"""A feature in a folder outside of the repository, an adapter of another kind, trains, saves and resumes with no change here.

`pretrain_ia3.py` is what a stranger would write. It is copied away, and knows megatron as an installed package.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.cli.arguments import parse_args_unchecked
from megatron.cli.commands.checkpoint.resume_check import compare_states_at
from megatron.cli.preflight import check_arguments
from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict, raise_config_error_if
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.training.initialize import initialize_megatron
from megatron.training.loop import pretrain
from megatron.training.state.hooks import StepHooks
from tests.helpers.architecture import ROOT
from tests.helpers.programme import TINY, trained

VECTORS = ".adapter.scale"
RUN = "--mock-data --train-iters 4 --lr-decay-style constant".split()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The stranger's file, in a folder of its own."""
    place = tmp_path_factory.mktemp("outside") / "pretrain_ia3.py"
    shutil.copy(Path(__file__).parent / "pretrain_ia3.py", place)
    spec = importlib.util.spec_from_file_location("pretrain_ia3", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_ia3"] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


class Ends(StepHooks):
    """Keeps the parameters at a run's begin and end."""

    def begin_run(self, session: Any) -> None:
        self.first = self._copy(session)

    def end_run(self, session: Any, reason: str) -> None:
        self.last = self._copy(session)

    def _copy(self, session: Any) -> dict[str, Tensor]:
        (stage,) = session.trainer.stages
        return {name: param.detach().clone() for name, param in stage.named_parameters()}


def adapted(script: ModuleType, *words: object) -> tuple[Any, Ends]:
    """Run the stranger's script in this process; return its feature, and what it made of the parameters."""
    logging.getLogger("megatron").handlers.clear()
    args = parse_args_unchecked([*TINY, *RUN, *map(str, words)], extra=(script.IA3Config,))
    checked = check_arguments(args, 1, own_problems=script.ia3_problems)
    raise_config_error_if(line for _, line in checked.problems)
    ia3, ends = script.IA3(config_from_flat_dict(script.IA3Config, checked.given)), Ends()
    providers = (pretrain_gpt.datasets_provider, ia3.build_stage, pretrain_gpt.forward_step)
    pretrain(initialize_megatron(checked), *providers, hooks=[ia3, ends])
    return ia3, ends


@pytest.fixture(scope="module")
def straight(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Ends, Path]:
    """Four steps in one go, with a checkpoint after two."""
    folder = tmp_path_factory.mktemp("straight")
    return *adapted(script, "--save", folder, "--save-interval", 2), folder


def test_its_vectors_are_trained_and_nothing_else(straight: tuple[Any, Ends, Path]) -> None:
    ia3, ends, _ = straight
    moved = {name for name, value in ends.last.items() if not torch.equal(value, ends.first[name])}
    assert len(moved) == 4 and moved == {name for name in ends.last if name.endswith(VECTORS)}
    assert ia3.updates == 4 and ia3.interval_line(4).startswith("IA3: 4 updates")


def test_it_resumes_as_if_it_had_not_stopped(
    script: ModuleType, straight: tuple[Any, Ends, Path], tmp_path: Path
) -> None:
    _, ends, folder = straight
    adapted(script, "--save", tmp_path, "--save-interval", 2, "--exit-interval", 2)
    ia3, resumed = adapted(script, "--save", tmp_path, "--load", tmp_path, "--save-interval", 2)
    assert ia3.updates == 4 and all(torch.equal(value, ends.last[name]) for name, value in resumed.last.items())
    compared = compare_states_at(folder, tmp_path, 4)
    assert not [one for one in compared if not one.is_equal]
    assert {one.item.what: one.count for one in compared}["state of a script's own hooks"] == 2


def test_it_starts_from_a_network_without_it(script: ModuleType, tmp_path: Path) -> None:
    trained([*RUN, "--save", str(tmp_path)])
    ia3, ends = adapted(script, "--pretrained-checkpoint", tmp_path, "--seed", 7)
    assert ia3.updates == 4
    assert all(bool((value == 1).all()) for name, value in ends.first.items() if name.endswith(VECTORS))


def test_what_does_not_fit_it_is_refused(script: ModuleType, straight: tuple[Any, Ends, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--lora-rank 2 puts adapters where --ia3-targets multiplies; drop one"):
        adapted(script, "--lora-rank", 2)
    with pytest.raises(CheckpointError, match="was trained with --ia3-targets linear_qkv linear_fc1; give the same"):
        adapted(script, "--load", straight[2], "--ia3-targets", "linear_fc1")
    with pytest.raises(CheckpointError, match="adapter.scale"):
        trained([*RUN, "--load", str(straight[2])])


@pytest.mark.nightly
def test_its_help_and_resume_check_know_it(script: ModuleType) -> None:
    assert script.__file__ is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def printed(*words: str) -> str:
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=600).stdout

    assert "linear layers with a vector" in printed(sys.executable, script.__file__, "--help", "ia3")
    check = [sys.executable, "-m", "megatron", "checkpoint", "resume-check", "--steps", "2", "--entry", script.__file__]
    assert "bit for bit" in printed(*check, *TINY, "--mock-data", "--train-iters", "4")
