"""megatron checkpoint combine: a language model and an encoder of images in one checkpoint, with what the network uses of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.cli.commands.checkpoint.combine import main
from megatron.core.families import hf
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.parallel.boxes import whole_box
from megatron.training.checkpoint.formats import open_checkpoint
from tests.helpers.flags import parse_args_or_raise, run_config_of_args
from tests.unit.families.test_vision import TEXT, clip, saved


def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def combined(folder: Path, *flags: str) -> Any:
    """What the tool makes of a LLaMA and a CLIP."""
    saved(llama, folder / "llama")
    saved(clip, folder / "clip")
    words = ["--language-model", str(folder / "llama"), "--vision-model", str(folder / "clip")]
    main([*words, "--save", str(folder / "both"), *flags])
    return open_checkpoint(str(folder / "both"), None)


def test_a_combined_checkpoint_holds_all_that_the_network_uses_but_the_projector(tmp_path: Path) -> None:
    source = combined(tmp_path, "--vision-num-layers", "2", "--disable-vision-class-token")
    model = hf.model_config_from_settings(source.settings)
    assert model.vision.vision_num_layers == 2 and model.vision.disable_vision_class_token and model.vision.img_h == 28
    expected = {f"model.{name}" for name in global_parameter_shapes(model) if not name.startswith("vision_projection.")}
    assert source.formats.keys() == expected
    for part, name in (
        ("llama", "model.decoder.layers.1.mlp.linear_fc2.weight"),
        ("clip", "model.vision_model.encoder.layers.1.mlp.linear_fc2.weight"),
    ):
        box = whole_box(source.formats[name].shape)
        assert torch.equal(source.read(name, box), hf.open_hf_folder(tmp_path / part).read(name, box))


def test_parts_are_frozen_as_the_command_line_says_and_not_as_a_checkpoint_was_trained(tmp_path: Path) -> None:
    both = str(combined(tmp_path, "--freeze-LM").where)
    flags = [
        "--use-checkpoint-args",
        "--pretrained-checkpoint",
        both,
        "--mock-data",
        "--micro-batch-size",
        "1",
        "--lr",
        "1",
    ]
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "64", "--train-iters", "1", "--seq-length", "64"]
    args = parse_args_or_raise([*flags, "--freeze-ViT"], defaults={"sft": True})
    model = run_config_of_args(args, 1).model
    assert (args.freeze_LM, args.freeze_ViT) == (False, True) and model.adapter.freeze == ("vision_model.*",)
    assert model.vision.vision_hidden_size == 32, "the shape is the checkpoint's"


def test_what_is_no_encoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(llama, tmp_path / "llama")
    folder = str(tmp_path / "llama")
    with pytest.raises(SystemExit):
        main(["--language-model", folder, "--vision-model", folder, "--save", str(tmp_path / "both")])
    assert "holds a gpt, and an encoder of images alone is asked for" in capsys.readouterr().err
