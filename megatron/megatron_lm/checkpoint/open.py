"""A folder of Megatron's, whatever its version, as a `Source`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.models.describe import global_parameter_shapes
from megatron.core.models.parameter_names import VOCABULARY, WORD_EMBEDDING
from megatron.megatron_lm.checkpoint.folders import find_megatron_checkpoint, is_legacy_checkpoint
from megatron.megatron_lm.checkpoint.legacy import legacy_run_arguments, open_legacy_checkpoint
from megatron.megatron_lm.checkpoint.source import MegatronSource
from megatron.megatron_lm.checkpoint.torch_dist import open_torch_dist_checkpoint, torch_dist_run_arguments

_MOST = 12  # problems that are told


def open_megatron_checkpoint(path: str | Path, given: Mapping[str, Any] | None = None) -> MegatronSource:
    """Open the Megatron checkpoint in a folder, or the one that its tracker names, as a `Source`.

    given: settings that override the checkpoint's, and `true_vocab_size`, without which rows of vocabulary padding
    count as ids. Raises `CheckpointError` if there is none, or it does not fit its own arguments.
    """
    folder = find_megatron_checkpoint(path)
    if folder is None:
        raise CheckpointError(
            f"{path} holds no checkpoint of Megatron's: neither mp_rank_... folders, nor a metadata.json "
            "that says torch_dist"
        )
    source = (
        open_legacy_checkpoint(folder, given)
        if is_legacy_checkpoint(folder)
        else open_torch_dist_checkpoint(folder, given)
    )
    _require_tensors_match_settings(source)
    return source


def read_megatron_arguments(path: str | Path, iteration: int | None = None) -> dict[str, Any]:
    """Return the arguments of the run that saved a Megatron checkpoint; {} if there is no checkpoint, or it has none."""
    folder = find_megatron_checkpoint(path, iteration)
    return (
        {}
        if folder is None
        else legacy_run_arguments(folder)
        if is_legacy_checkpoint(folder)
        else torch_dist_run_arguments(folder)
    )


def _require_tensors_match_settings(source: CheckpointSource) -> None:
    """Raise `CheckpointError` if parameters are missing, unknown, or of other shapes than the settings imply.

    Heads of a BERT may be missing. Shapes are compared only if the settings give all sizes.
    """
    try:
        model = model_config_from_settings(
            {"true_vocab_size": source.formats[f"model.{WORD_EMBEDDING}"].shape[0], **source.settings}
        )
        expected = {name: tuple(shape) for name, shape in global_parameter_shapes(model).items()}
    except ConfigError as error:
        raise CheckpointError(f"{source.where} has arguments that make no network here: {error}") from None
    shapes = {
        name.removeprefix("model."): tuple(one.shape)
        for name, one in source.formats.items()
        if name.startswith("model.")
    }
    problems = [f"{name}: no parameter of this network" for name in shapes if name not in expected]
    if model.architecture.is_decoder_only:
        problems += [f"{name} is missing" for name in expected if name not in shapes]
    if {"ffn_hidden_size", "kv_channels"} <= source.settings.keys():
        problems += [
            f"{name}: {shapes[name]} in the checkpoint, {expected[name]} by its arguments"
            for name in shapes.keys() & expected.keys() - VOCABULARY
            if shapes[name] != expected[name]
        ]
    if problems:
        more = [f"... and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        raise CheckpointError(
            f"{source.where} holds a network that is not built here, or has other arguments", problems[:_MOST] + more
        )
