"""A checkpoint's network as a Hugging Face folder that knows where its texts begin and end.

A config.json without ids of special tokens takes its class's: Llama's say that 2 ends a text, GPT-2's 50256, whatever tokenizer the
network was trained with; generation would then never stop. So the tokenizer of the run, or of the folder that it is to be like, is
built, and its ids are written, into config.json and generation_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.core.config.flags import ConfigError, config_from_flat_dict
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families import hf_export
from megatron.core.families.parameter_mapping import Family
from megatron.core.families.tokenizer_files import tokenizer_settings_of_folder
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.core.tokenizers.build import build_tokenizer


def export_hf_with_special_tokens(
    source: CheckpointSource,
    folder: str | Path,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    shard_bytes: int = hf_export.SHARD_BYTES,
) -> Family:
    """`hf_export.export` with the ids of the tokenizer, where its files are here. A config.json in `like` has the last word on them."""
    rows = source.formats[f"model.{WORD_EMBEDDING}"].shape[0] if f"model.{WORD_EMBEDDING}" in source.formats else 0
    return hf_export.export_hf_folder(
        source,
        folder,
        family=family,
        like=like,
        shard_bytes=shard_bytes,
        ids=hf_config_special_token_ids(source.settings, like, rows=rows),
    )


def hf_config_special_token_ids(
    settings: Mapping[str, Any], like: str | Path | None, *, rows: int
) -> dict[str, int | list[int] | None]:
    """Return the keys of a Hugging Face config.json that name special tokens (bos, eos ..), by the tokenizer.
    settings: of a run. like: folder whose tokenizer is taken instead. rows: of the embedding. None is written, since a
    missing key gets the class's default. Empty without a tokenizer, and for a BERT, which generates nothing.
    """
    known = {field.name for field in fields(TokenizerConfig)}
    of_run = {name: value for name, value in settings.items() if name in known}
    chosen = tokenizer_settings_of_folder(Path(like)) if like else of_run
    architecture = settings.get("architecture", "gpt")
    if architecture == "bert" or not chosen.get("tokenizer_type"):
        return {}
    try:
        tokenizer = build_tokenizer(config_from_flat_dict(TokenizerConfig, chosen))
    except (ConfigError, OSError, ValueError):
        return {}
    ends = list(dict.fromkeys(token for token in (tokenizer.eod, tokenizer.eos) if token is not None and token < rows))
    eos = ends[0] if len(ends) == 1 else ends or None
    ids: dict[str, int | list[int] | None] = {"bos_token_id": tokenizer.bos, "eos_token_id": eos}
    if architecture == "t5":
        ids |= {"decoder_start_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
    return ids
