"""What a run takes over from a checkpoint of another format: settings of its network and tokenizer, and of the run that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.config.flags.declare import flag_fields
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.checkpoint_folders import FREE
from megatron.core.tokenizers.build import settings_of_kind
from megatron.training.checkpoint.formats import find_foreign_checkpoint


def foreign_checkpoint_settings(
    path: str | Path, step: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return (settings of model and tokenizer, further run settings) of another format's checkpoint, by field name, or
    None. Free choices (kernels, dropout, initial values) are left out; flags may override the further ones.
    """
    located = find_foreign_checkpoint(path, step)
    if located is None:
        return None
    checkpoint_format, place = located
    settings, beside = checkpoint_format.settings(place)
    names = {field.name for config in (ModelConfig, TokenizerConfig) for field, _ in flag_fields(config)} - FREE | {
        "null_tokenizer_ids"
    }
    reads = settings_of_kind(beside.get("tokenizer_type", ""))  # Megatron has defaults for all kinds
    unread = {field.name for field, _ in flag_fields(TokenizerConfig)} - (
        reads | {"tokenizer_type"} if reads else set()
    )
    return (
        {name: value for name, value in settings.items() if name in names},
        {name: value for name, value in beside.items() if name not in unread},
    )
