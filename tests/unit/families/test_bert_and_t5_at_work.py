"""Folders of BERT and T5 where they are used: converted, shown as flags, and as what a run begins with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.settings.model import RequestedModel
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError, checkpoint_model_settings
from megatron.core.families import hf, hf_export
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.spec import param_spec_of
from megatron.training.checkpoint.checkpointing import Checkpointer
from tests.helpers import tiny
from tests.unit.families.made import Made, same_tensors
from tests.unit.families.test_bert import OURS as MEGATRON_BERT
from tests.unit.families.test_bert import PUBLISHED as BERT
from tests.unit.families.test_bert import WORDS, at_most
from tests.unit.families.test_t5 import FIRST, LATER

NETWORKS = {"bert": BERT, "megatron bert": MEGATRON_BERT, "t5": FIRST, "t5 v1.1": LATER}


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    """The tool as a module."""
    path = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "convert.py"
    spec = importlib.util.spec_from_file_location("convert", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("network", NETWORKS)
def test_there_and_back_through_a_checkpoint_of_ours_gives_the_same_files(
    convert: ModuleType, tmp_path: Path, network: str
) -> None:
    kind = NETWORKS[network]["architecture"].upper()
    hf_export.export_hf_folder(Made(NETWORKS[network], torch.bfloat16), tmp_path / "in")
    convert.main(["--load", str(tmp_path / "in"), "--save", str(tmp_path / "own"), "--model-type", kind, "--verify"])
    convert.main(["--load", str(tmp_path / "own"), "--save", str(tmp_path / "out"), "--saver", "hf", "--verify"])
    assert {file: (tmp_path / "out" / file).read_bytes() for file in ("config.json", "model.safetensors")} == {
        path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()
    }
    with pytest.raises(SystemExit, match=f"--model-type GPT: .* holds a {kind}"):
        convert.main(["--load", str(tmp_path / "in"), "--save", str(tmp_path / "other"), "--model-type", "GPT"])


def test_a_bert_goes_to_megatron_and_back(convert: ModuleType, tmp_path: Path) -> None:
    source = Made(MEGATRON_BERT)
    hf_export.export_hf_folder(source, tmp_path / "in")
    convert.main(
        [
            "--load",
            str(tmp_path / "in"),
            "--save",
            str(tmp_path / "megatron"),
            "--saver",
            "megatron",
            "--verify",
            "--target-tensor-parallel-size",
            "2",
            "--target-pipeline-parallel-size",
            "2",
        ]
    )
    convert.main(
        [
            "--load",
            str(tmp_path / "megatron"),
            "--save",
            str(tmp_path / "back"),
            "--saver",
            "hf",
            "--true-vocab-size",
            "20",
            "--like",
            str(tmp_path / "in"),
        ]
    )
    same_tensors(hf.open_hf_folder(tmp_path / "back"), source)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (tmp_path / "in" / "config.json").read_text()
    )
    convert.main(
        [
            "--load",
            str(tmp_path / "megatron"),
            "--save",
            str(tmp_path / "own"),
            "--saver",
            "own",
            "--true-vocab-size",
            "20",
        ]
    )
    settings = checkpoint_model_settings(tmp_path / "own")
    assert (settings["squared_relu"], settings["num_layers"]) == (False, 2), (
        "what Megatron does not say has its default"
    )


def beginning(folder: Path, settings: dict[str, Any]) -> Checkpointer:
    """A run that has not begun yet: `--load FOLDER --finetune`."""
    lengths = {"decoder_seq_length": 8} if settings["architecture"] == "t5" else {}
    config = tiny.config(**{**settings, "seq_length": 8, "load": str(folder), "finetune": True, **lengths})
    return Checkpointer(tiny.trainer_of(tiny.run_of(config)))


@pytest.mark.parametrize("network", NETWORKS)
def test_a_run_begins_with_the_weights_of_a_folder_under_the_flags_that_it_gives(tmp_path: Path, network: str) -> None:
    source = Made({**NETWORKS[network], "true_vocab_size": tiny.VOCABULARY})
    hf_export.export_hf_folder(source, tmp_path / "in")
    settings = {**hf.hf_model_settings(tmp_path / "in"), "architecture": NETWORKS[network]["architecture"]}
    assert (
        config_from_flat_dict(RequestedModel, settings).resolve().activation_name
        == config_from_flat_dict(RequestedModel, NETWORKS[network]).resolve().activation_name
    )
    checkpoint = beginning(tmp_path / "in", settings)
    assert checkpoint.resume()
    for param in checkpoint.trainer.stages[0].parameters():
        shape = param_spec_of(param).shape
        found = param.detach()[tuple(slice(extent) for extent in shape)]
        assert torch.equal(found, source.read(f"model.{param_spec_of(param).name}", whole_box(shape))), param_spec_of(
            param
        ).name


def test_a_run_with_another_network_than_the_folder_is_refused(tmp_path: Path) -> None:
    hf_export.export_hf_folder(Made({**BERT, "true_vocab_size": tiny.VOCABULARY}), tmp_path / "bert")
    with pytest.raises(CheckpointError, match="holds another network") as raised:
        beginning(tmp_path / "bert", {**BERT, "norm_after_residual": False, "openai_gelu": True}).resume()
    assert {problem.split(":")[0] for problem in raised.value.problems} == {"--norm-after-residual", "--openai-gelu"}
    with pytest.raises(CheckpointError, match="kind of network: bert in the checkpoint, t5 in this run"):
        beginning(tmp_path / "bert", FIRST).resume()


def test_a_run_that_needs_heads_that_a_folder_lacks_is_told_which(tmp_path: Path) -> None:
    hf_export.export_hf_folder(at_most(Made({**BERT, "true_vocab_size": tiny.VOCABULARY}), *WORDS), tmp_path / "bert")
    with pytest.raises(CheckpointError, match="5 names .* do not fit") as raised:
        beginning(tmp_path / "bert", BERT).resume()
    assert "model.lm_head.dense.weight: missing in the checkpoint" in raised.value.problems
