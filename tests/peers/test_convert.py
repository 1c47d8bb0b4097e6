"""`tools/checkpoint/convert.py` of checkpoints that the real Megatron Core wrote: names of this network, for weights and for Adam's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.commands.checkpoint import convert
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.pickles import read_torch_file
from megatron.core.dist_checkpointing.saved import open_native_checkpoint
from megatron.core.models.describe import global_parameter_shapes
from megatron.megatron_lm.checkpoint import torch_dist
from megatron.megatron_lm.checkpoint.stored import TorchDistIndexEntry
from tests.peers.cases import CASES, RUN
from tests.peers.make_fixtures import unpack
from tests.peers.test_continuation import demand_its_steps, steps_of_continuation, steps_of_megatron

BUFFERS = ("expert_bias",)  # parts of a network that are not trained
BY_DAY = ("experts", "experts-grouped-torch", "mtp", "mtp-torch", "deepseek", "deepseek-torch", "ep2-reshardable")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in CASES]
)
def test_a_converted_checkpoint_has_the_names_of_its_network_and_nothing_else(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    convert.main(
        ["--load", str(folder / "checkpoints"), "--save", str(tmp_path / "ours"), "--saver", "own", "--verify"]
    )
    saved = open_native_checkpoint(next((tmp_path / "ours").glob("iter_*")))
    expected = global_parameter_shapes(model_config_from_settings(dict(saved.settings)))
    trained = {name: shape for name, shape in expected.items() if not name.endswith(BUFFERS)}
    assert {
        name.removeprefix("model."): tuple(one.shape)
        for name, one in saved.formats.items()
        if name.startswith("model.")
    } == {name: tuple(shape) for name, shape in expected.items()}
    for slot in ("exp_avg", "exp_avg_sq"):
        found = {
            name.removeprefix(f"optimizer.{slot}."): tuple(one.shape)
            for name, one in saved.formats.items()
            if name.startswith(f"optimizer.{slot}.")
        }
        assert found == {name: tuple(shape) for name, shape in trained.items()}


def test_a_run_goes_on_from_a_converted_checkpoint_with_megatrons_losses(tmp_path: Path) -> None:
    folder = unpack("deepseek", tmp_path)
    convert.main(["--load", str(folder / "checkpoints"), "--save", str(tmp_path / "ours"), "--saver", "own"])
    demand_its_steps(
        steps_of_continuation(
            folder, "--load", str(tmp_path / "ours"), "--seq-length", str(RUN["seq_length"]), "--no-load-rng"
        ),
        steps_of_megatron(folder),
    )


STRANGERS = (
    "decoder.layers.0.mixer.in_proj.weight",
    "mtp.layers.0.another_layer.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.experts.more.linear_fc1.weight",
)


def refused(folder: Path, save: Path) -> str:
    """What the tool says when it ends without having written anything."""
    with pytest.raises(SystemExit) as ended:
        convert.main(["--load", str(folder / "checkpoints"), "--save", str(save), "--saver", "own"])
    assert ended.value.code not in (0, None) and not save.exists()
    return str(ended.value)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_parameter_that_no_network_here_has_ends_the_tool_with_an_error(stranger: str, tmp_path: Path) -> None:
    folder = unpack("deepseek-torch", tmp_path)
    file = folder / "checkpoints" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    content = read_torch_file(file)
    content["model"][stranger] = torch.zeros(4, 4)
    torch.save(content, tmp_path / "other.pt")  # the first is mapped
    (tmp_path / "other.pt").replace(file)
    assert f"{stranger}: no parameter of this network" in refused(folder, tmp_path / "ours")


@pytest.mark.parametrize("stranger", STRANGERS)
def test_so_does_one_in_the_distributed_format(stranger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, entries = unpack("deepseek", tmp_path), torch_dist._parse_torch_dist_index

    def with_stranger(index: Any, place: Path) -> Any:
        tensors, texts = entries(index, place)
        return {**tensors, stranger: TorchDistIndexEntry(stranger, (4, 4), torch.float32, ())}, texts

    monkeypatch.setattr(torch_dist, "_parse_torch_dist_index", with_stranger)
    assert f"{stranger}: no parameter of this network" in refused(folder, tmp_path / "ours")
