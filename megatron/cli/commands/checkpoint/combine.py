"""Combine a language model and an encoder of images into one checkpoint, to start pretrain_vlm.py from.

    megatron checkpoint combine --language-model SmolLM2-135M --vision-model clip-vit-large-patch14-336 --save combined \\
        --vision-num-layers 23 --disable-vision-class-token
    python pretrain_vlm.py --use-checkpoint-args --pretrained-checkpoint combined --allow-missing-vision-projection-checkpoint ...

Both are checkpoints in any format, or Hugging Face folders. The projector is not there yet, and starts afresh; its flags, and how many
layers of the encoder are used, are given here, so that the checkpoint says all that the network is. A layer that is not used, a norm
that is not asked for and a head for classes are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.cli.tool_parser import ToolArgumentParser, exit_on
from megatron.core.config.flags.declare import (
    ConfigError,
    add_config_arguments,
    config_from_flat_dict,
    config_from_namespace,
    config_to_flat_dict,
)
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.settings.model import ModelConfig, RequestedModel
from megatron.core.config.settings.vision import VisionConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.rewrite import rewrite_checkpoint
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families.hf_folder import is_hf_checkpoint
from megatron.core.families.tokenizer_files import tokenizer_settings_of_folder
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.parallel.boxes import Box
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.checkpoint.inference_model import infer_checkpoint_architecture
from megatron.training.launch.launch_info import install_interrupt_excepthook

_PROJECTOR, _ENCODER = "model.vision_projection.", "model.vision_model."


class CombinedVisionLanguageSource:
    """A source with the weights of a language model, and of an image encoder as far as the whole network uses them."""

    def __init__(self, language: CheckpointSource, vision: CheckpointSource, given: VisionConfig) -> None:
        self._language, self._vision = language, vision
        self.where = f"{language.where} and {vision.where}"
        model = _combined_vlm_config(language, vision, given)
        tokenizer = tokenizer_settings_of_folder(Path(language.where)) if is_hf_checkpoint(language.where) else {}
        self.settings = {**language.settings, **config_to_flat_dict(model), **tokenizer}
        self.values = {name: value for name, value in language.values.items() if name == "run.tokenizer"}
        expected = {f"model.{name}" for name in global_parameter_shapes(model)}
        encoder = {name: one for name, one in vision.formats.items() if name.startswith(_ENCODER) and name in expected}
        decoder = {name: one for name, one in language.formats.items() if name in expected - encoder.keys()}
        self.formats = {**decoder, **encoder}
        missing = [name for name in sorted(expected - self.formats.keys()) if not name.startswith(_PROJECTOR)]
        if missing:
            raise CheckpointError(
                f"{self.where} lack what the network needs", [f"{name} is missing" for name in missing]
            )

    def read(self, name: str, box: Box) -> Tensor:
        """See `Source`."""
        return (self._vision if name.startswith(_ENCODER) else self._language).read(name, box)


def _combined_vlm_config(language: CheckpointSource, vision: CheckpointSource, given: VisionConfig) -> ModelConfig:
    """Return the whole network's config. given: projector, used part of the encoder. Raises `CheckpointError`."""
    for source, expected in ((language, "gpt"), (vision, "vit")):
        if infer_checkpoint_architecture(source) != expected:
            words = "a decoder-only language model" if expected == "gpt" else "an encoder of images alone"
            raise CheckpointError(
                f"{source.where} holds a {infer_checkpoint_architecture(source)}, and {words} is asked for"
            )
    encoder = model_config_from_settings(vision.settings)
    own = encoder.vision
    changes: dict[str, Any] = {
        "vision_model_type": own.vision_model_type or "vit",
        "vision_num_layers": given.vision_num_layers or encoder.num_layers,
        "vision_hidden_size": encoder.hidden_size,
        "vision_ffn_hidden_size": encoder.ffn_hidden_size,
        "vision_num_attention_heads": encoder.num_attention_heads,
        "vision_activation": own.vision_activation,
        "vision_norm_epsilon": own.vision_norm_epsilon,
        "vision_position_grid": own.vision_position_grid,
        "patch_dim": own.patch_dim,
        "num_channels": own.num_channels,
    }
    for name in ("img_h", "img_w"):
        if getattr(given, name) == getattr(VisionConfig(), name):
            changes[name] = getattr(own, name)
    requested = config_from_flat_dict(RequestedModel, language.settings)
    return replace(requested, vision=replace(given, **changes)).resolve()


def write_combined_checkpoint(language: str, vision: str, save: Path, given: VisionConfig) -> str:
    """Write the combined checkpoint. Return what was done, in words."""
    source = CombinedVisionLanguageSource(open_checkpoint(language, None), open_checkpoint(vision, None), given)
    path = rewrite_checkpoint(source, save, iteration=0, settings=source.settings)
    encoder = sum(name.startswith(_ENCODER) for name in source.formats)
    return f"{source.where} -> {path}: {len(source.formats) - encoder} tensors of the language model, {encoder} of the encoder"


def parser() -> argparse.ArgumentParser:
    """Make the tool's argument parser."""
    made = ToolArgumentParser(description=__doc__)
    made.add_argument("--language-model", required=True, metavar="DIR", help="a decoder-only network, in any format")
    made.add_argument("--vision-model", required=True, metavar="DIR", help="an encoder of images, in any format")
    made.add_argument("--save", required=True, type=Path, metavar="DIR", help="folder to write")
    add_config_arguments(made, VisionConfig)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Combine, and print what was done."""
    install_interrupt_excepthook()
    args = parser().parse_args(arguments)
    with exit_on(CheckpointError, ConfigError, OSError):
        print(
            write_combined_checkpoint(
                args.language_model, args.vision_model, args.save, config_from_namespace(VisionConfig, args)
            )
        )
