"""Checkpoints of Megatron-LM's own pretrain_gpt.py, with its complete arguments: a run goes on with its losses and its loss scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.parallel.boxes import whole_box
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint, read_megatron_arguments
from tests.peers.make_fixtures import unpack
from tests.peers.ours import logged_steps
from tests.peers.parser_defaults import parser_defaults
from tests.peers.programs import LAST, PROGRAMS, SAVED, TRAINING, Program

TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-6  # of losses; of norms of gradients, relative
HALF_TOLERANCE, HALF_NORM_TOLERANCE = 1e-3, 1e-3  # in fp16, whose sums are made in another order
# What validation takes out of the namespace again.
REMOVED = {
    "batch_size",
    "checkpoint_activations",
    "cuda_graph_scope_deprecated",
    "model_parallel_size",
    "recompute_activations",
    "warmup",
}
IN_A_MINUTE = {
    "0.12.3": ("pp2-distributed",),
    "0.16.1": ("ep2pp2-distributed", "fp16", "fp16-overflowed", "pp2-layout-distributed", "sgd-torch"),
    "0.19.0": ("experts", "fp16-distributed", "vpp2-distributed"),
}
WRITTEN = [
    pytest.param(
        release, case, id=f"{release}-{name}", marks=() if name in IN_A_MINUTE.get(release, ()) else pytest.mark.nightly
    )
    for name, case in PROGRAMS.items()
    for release in case.releases
    if case.program == "pretrain_gpt.py"
]


def unpacked(release: str, case: Program, folder: Path) -> Path:
    """The folder of a fixture."""
    return unpack(case.name, folder, version=f"pretrain-{release}")


def steps_of_ours(folder: Path, *flags: str) -> dict[int, Any]:
    """Iteration -> what a run of ours logs that goes on from a fixture."""
    words = ["--use-checkpoint-args", "--load", str(folder / "checkpoints"), "--data-path", str(folder / "tokens")]
    return {
        line["iteration"]: line for line in logged_steps([*words, *TRAINING.split(), *flags], folder / "ours.jsonl")
    }


@pytest.mark.parametrize("release, case", WRITTEN)
def test_a_run_goes_on_from_the_real_programs_checkpoint(release: str, case: Program, tmp_path: Path) -> None:
    folder = unpacked(release, case, tmp_path)
    ours = steps_of_ours(folder, *case.training_flags.split())
    theirs = {step["iteration"]: step for step in json.loads((folder / "losses.json").read_text())}
    loss, norm = (HALF_TOLERANCE, HALF_NORM_TOLERANCE) if "--fp16" in case.flags else (TOLERANCE, NORM_TOLERANCE)
    for step in range(SAVED + 1, LAST + 1):
        assert ours[step]["losses"]["lm loss"] == pytest.approx(theirs[step]["losses"]["lm loss"], abs=loss), step
        assert ours[step]["loss_scale"] == theirs[step]["loss_scale"], step
        if theirs[step]["grad_norm"] is not None:  # else it has overflowed
            assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=norm), step


@pytest.mark.parametrize("release, case", WRITTEN)
def test_the_fixture_holds_every_argument_of_the_parser_and_all_state_is_read(
    release: str, case: Program, tmp_path: Path
) -> None:
    folder = unpacked(release, case, tmp_path)
    arguments = read_megatron_arguments(folder / "checkpoints")
    assert parser_defaults()[release].keys() - arguments.keys() <= REMOVED
    source = open_megatron_checkpoint(folder / "checkpoints", {"true_vocab_size": 32})
    assert source.skipped == ""
    assert {name.split(".")[1] for name in source.formats if name.startswith("optimizer.")} >= set(case.moments)
    assert ("run.loss_scale" in source.values) == ("--fp16" in case.flags)


@pytest.mark.parametrize("form", ["-distributed", "-torch", "-distributed-torch"])
def test_every_form_of_a_t5s_optimizer_state_holds_the_same_moments_of_all_its_parameters(
    form: str, tmp_path: Path
) -> None:
    folders = [unpack(f"t5{one}", tmp_path / f"t5{one}", version="pretrain-0.16.1") for one in ("", form)]
    usual, other = (open_megatron_checkpoint(folder / "checkpoints") for folder in folders)
    assert (usual.skipped, other.skipped, usual.values["run.optimizer_steps"]) == ("", "", SAVED)
    parameters = {name.removeprefix("model.") for name in usual.formats if name.startswith("model.")}
    for slot in ("exp_avg", "exp_avg_sq"):
        for name in sorted(f"optimizer.{slot}.{one}" for one in parameters):
            box = whole_box(usual.formats[name].shape)
            assert torch.equal(usual.read(name, box), other.read(name, box)), name
